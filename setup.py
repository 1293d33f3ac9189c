"""Builds the native extensions; everything else is in pyproject.toml.

An extension whose dependencies are missing does not fail the installation: the package works
without it, and the reason and the remedy are stored beside the place where it would have been, for
the error that is raised when it is asked for. Where they are there, an extension that cannot be
compiled, or was built and does not load, fails the build.
"""

from __future__ import annotations

import hashlib
import os
import runpy
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError, ExecError

NEEDED = {"gloo": "Gloo's headers and library (Debian, Ubuntu: apt-get install libgloo-dev) and "}
# What a system must have for the extension, as a program that includes it.
HEADERS = {"gloo": ["gloo/transport/tcp/device.h"], "shm": ["linux/futex.h"]}
# Of all files. Python's own -g makes nine tenths of a library, and Debian lacks a header of Gloo. A
# unit of several sources is no header, of whose anonymous namespaces GCC would warn.
FLAGS = ["-g0", "-Wno-subobject-linkage", "-idirafter", "csrc/gloo/missing"]
# Folders of csrc whose sources are compiled several at a time.
JOINED, TOGETHER = ("gloo", "shm"), 6
AGAIN = "pip install --force-reinstall --no-deps --no-cache-dir ."
# Of a file, by the name under which the package imports it.
LOAD = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location(*sys.argv[1:])
spec.loader.exec_module(module_from_spec(spec))
"""


def _short_name(ext: Any) -> str:
    """Return "gloo" for ``flashlight_py._native._gloo``."""
    return str(ext.name).rpartition(".")[2].lstrip("_")


class Objects:
    """Object files: of all extensions over all cores, each once, again only after a change.

    They are kept in FLASHLIGHT_OBJECTS, if that is set, for the next build. An object is named
    after its source and all flags, so extensions share those that both would compile alike.
    """

    def __init__(self, compiler: Any, folder: Path) -> None:
        self._compiler = compiler
        self._folder = Path(os.environ.get("FLASHLIGHT_OBJECTS") or folder / "objects")
        self._folder.mkdir(parents=True, exist_ok=True)
        self._pool = ThreadPoolExecutor(os.cpu_count())
        self._lock = threading.Lock()
        self._made: dict[Path, Future[None]] = {}
        self._ended = 0

    def compile(
        self,
        sources: list[str],
        output_dir: str | None = None,
        macros: Any = None,
        include_dirs: list[str] | None = None,
        debug: bool = False,
        extra_preargs: list[str] | None = None,
        extra_postargs: list[str] | None = None,
        depends: Any = None,
    ) -> list[str]:
        """Do what ``compile`` of a compiler of setuptools does."""
        flags = self._compiler._setup_compile(
            output_dir, macros, include_dirs, [], depends, extra_postargs
        )
        options = [*self._compiler._get_cc_args(flags[3], debug, extra_preargs), *flags[2], *FLAGS]
        objects = []
        for source in self._units(sources):
            command = hashlib.sha256(repr((source, options)).encode()).hexdigest()[:12]
            made = self._folder / f"{Path(source).stem}-{command}.o"
            with self._lock:
                if made not in self._made:
                    self._made[made] = self._pool.submit(self._make, source, made, options)
            objects.append(made)
        for made in objects:
            self._made[made].result()
        return [str(made) for made in objects]

    def _units(self, sources: list[str]) -> list[str]:
        """Join sources of the folders whose headers take longer to compile than what is in them.

        Copy what CFFI has generated: each kind of build has it in another folder.
        """
        units = []
        for each in map(Path, sources):
            if each.parts[0] != "csrc":
                units.append(self._unit(each.name, each.read_text()))
            elif each.parent.name not in JOINED:
                units.append(str(each))
        for folder in JOINED:
            joined = sorted(each for each in sources if Path(each).parent == Path("csrc", folder))
            for start in range(0, len(joined), TOGETHER):
                lines = [f'#include "{each}"' for each in joined[start : start + TOGETHER]]
                name = f"{folder}_{start // TOGETHER}.cc"
                units.append(self._unit(name, "\n".join([*lines, ""])))
        return units

    def _unit(self, name: str, text: str) -> str:
        """Return a source beside the objects."""
        unit = self._folder / name
        if not unit.exists() or unit.read_text() != text:
            unit.write_text(text)
        return str(unit)

    def _make(self, source: str, made: Path, options: list[str]) -> None:
        sums, depends = made.with_suffix(".sum"), made.with_suffix(".d")
        try:
            if made.exists() and sums.read_text() == self._sum(depends):
                return
        except OSError:  # the first time, or a header is gone
            pass
        sums.unlink(missing_ok=True)
        after = ["-MD", "-MF", str(depends)]
        self._compiler._compile(str(made), source, Path(source).suffix, options, after, [])
        sums.write_text(self._sum(depends))
        with self._lock:
            self._ended += 1
            print(f"compiled {self._ended} of {len(self._made)}: {source}", flush=True)

    @staticmethod
    def _sum(depends: Path) -> str:
        """Return a digest of all files that an object was compiled from."""
        total = hashlib.sha256()
        for name in depends.read_text().replace("\\\n", " ").split()[1:]:
            total.update(Path(name).read_bytes())
        return total.hexdigest()


class BuildOptionalExtensions(build_ext):
    """Build each extension, or leave the reason why it is missing."""

    extensions: list[Any]

    def finalize_options(self) -> None:
        super().finalize_options()
        # Each extension waits for its objects in a thread. Editable installs do not see it as an
        # option of setup().
        self.parallel = len(self.distribution.ext_modules)

    def build_extensions(self) -> None:
        self.compiler.compile = Objects(self.compiler, Path(self.build_temp)).compile
        super().build_extensions()
        for ext in self.extensions:
            self._check_that_it_loads(ext)

    def build_extension(self, ext: Any) -> None:
        note = self._note(ext)
        note.unlink(missing_ok=True)
        reason = self._why_not(ext)
        if reason is None:
            return
        Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)  # one from an earlier build
        note.parent.mkdir(parents=True, exist_ok=True)
        needed = NEEDED.get(_short_name(ext), "")
        remedy = f"Install {needed}a C++17 compiler, then install again: {AGAIN}"
        note.write_text(f"{reason}. {remedy}\n", encoding="utf-8", errors="backslashreplace")
        self.warn(f"{ext.name} is left out: {reason}")

    def _why_not(self, ext: Any) -> str | None:
        """Build ``ext``; return why it is left out, if it is."""
        if os.environ.get(self._switch(ext)):
            return f"{self._switch(ext)} was set when flashlight-py was built"
        try:
            super().build_extension(ext)
        except (CCompilerError, BaseError) as error:
            reason = f"it could not be compiled when flashlight-py was built ({error})"
            if self._has_what_is_needed(ext):
                raise ExecError(f"{ext.name}: {reason}. {self._without(ext)}") from error
            return reason
        return None

    def _has_what_is_needed(self, ext: Any) -> bool:
        """Tell whether a program that does nothing can be made with all that ``ext`` needs."""
        source = Path(self.build_temp) / f"needed{Path(ext.sources[0]).suffix}"
        source.parent.mkdir(parents=True, exist_ok=True)
        headers = ["Python.h", *HEADERS.get(_short_name(ext), [])]
        lines = [f"#include <{header}>" for header in headers]
        source.write_text("\n".join([*lines, "int main() { return 0; }", ""]))
        flags = {"extra_postargs": ext.extra_compile_args, "include_dirs": ext.include_dirs}
        try:
            objects = self.compiler.compile([str(source)], **flags)
            self.compiler.link_shared_object(
                objects, f"{source}.so", libraries=ext.libraries, target_lang=ext.language
            )
        except (CCompilerError, BaseError):
            return False
        return True

    def _check_that_it_loads(self, ext: Any) -> None:
        """Load what was built, in a process that it may end; fail the build if it does not."""
        path = Path(self.get_ext_fullpath(ext.name)).absolute()
        if not path.exists():  # left out, with a note
            return
        command = [sys.executable, "-c", LOAD, ext.name, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        path.unlink()  # also a build in place must not leave it to a user
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ExecError(f"{ext.name} was built and does not load: {reason}. {self._without(ext)}")

    def _without(self, ext: Any) -> str:
        return f"To install without it: {self._switch(ext)}=1 {AGAIN}"

    @staticmethod
    def _switch(ext: Any) -> str:
        return f"FLASHLIGHT_WITHOUT_{_short_name(ext).upper()}"

    def _note(self, ext: Any) -> Path:
        return Path(self.get_ext_fullpath(ext.name)).parent / f"{_short_name(ext)}.missing.txt"

    def copy_extensions_to_source(self) -> None:
        """Editable installs: only what was built can be copied; notes go along."""
        for ext in self.extensions:
            self._copy_note(ext)
        self.extensions = [ext for ext in self.extensions if Path(self._built(ext)).exists()]
        super().copy_extensions_to_source()

    def _built(self, ext: Any) -> str:
        name = self.get_ext_filename(self.get_ext_fullname(ext.name))
        return os.path.join(self.build_lib, str(name))

    def _copy_note(self, ext: Any) -> None:
        source = Path(self._built(ext)).parent / f"{_short_name(ext)}.missing.txt"
        target = Path("flashlight_py/_native") / source.name
        target.unlink(missing_ok=True)
        if source.exists():
            target.write_bytes(source.read_bytes())

    def get_outputs(self) -> list[str]:
        """Only files that exist, so that a missing extension does not fail the packing."""
        return [path for path in super().get_outputs() if Path(path).exists()]


BUILD = runpy.run_path("csrc/build.py")

setup(
    ext_modules=BUILD["EXTENSIONS"],
    cffi_modules=BUILD["BINDINGS"],
    cmdclass={"build_ext": BuildOptionalExtensions},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
