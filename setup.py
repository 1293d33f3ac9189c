"""Build the native extensions; everything else is in pyproject.toml.

Without a compiler, the package is installed without native code, like the wheel for any platform.
With a compiler, a missing package fails the build, except libgloo-dev: only the extension for Gloo
needs it. FLASHLIGHT_WITHOUT_GLOO=1 omits one extension, FLASHLIGHT_WITHOUT_NATIVE=1 all of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import runpy
import shlex
import shutil
import stat
import subprocess
import sys
import sysconfig
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError, ExecError

# By Debian package: a header that only this package installs, and the suffix of a source with it.
NEEDED = {
    "gcc": ("stdlib.h", ".c"),
    "g++": ("cstdlib", ".cc"),
    "python3-dev": ("Python.h", ".c"),
    "libgloo-dev": ("gloo/transport/tcp/device.h", ".cc"),
}
# Flags for all files. Debug information, which Python's flags request, would be nine tenths of a
# library. Debian lacks a header of Gloo. GCC takes joined sources for headers and would warn of
# their anonymous namespaces.
FLAGS = ["-g0", "-Wno-subobject-linkage", "-idirafter", "csrc/gloo/missing"]
# Folders of csrc whose sources are joined, and the number of sources in each compiled file.
JOINED, TOGETHER = ("gloo", "shm"), 6
# Program that loads an extension. Arguments: its name in the package, its file.
LOAD = """
import sys
from importlib.util import module_from_spec, spec_from_file_location
spec = spec_from_file_location(*sys.argv[1:])
spec.loader.exec_module(module_from_spec(spec))
"""


def _short_name(ext: Any) -> str:
    """Return "gloo" for ``flashlight_py._native._gloo``."""
    return str(ext.name).rpartition(".")[2].lstrip("_")


def _report(line: str) -> None:
    """Print ``line``; also to the stderr of pip, which hides the output of builds."""
    print(line, flush=True)
    if "PIP_BUILD_TRACKER" not in os.environ:
        return
    path = f"/proc/{os.getppid()}/fd/2"
    with contextlib.suppress(OSError):  # pip has closed it
        shown = os.stat(path)
        # pip would overwrite our lines in a file.
        if stat.S_ISREG(shown.st_mode) or os.path.samestat(shown, os.fstat(1)):
            return
        with open(path, "w") as stderr:
            # In a terminal, pip draws its wheel over the last column.
            print(f"\n    {line}  " if stderr.isatty() else f"    {line}\n", end="", file=stderr)


class Objects:
    """Object files. All cores compile each of them once, and again only after a change.

    If FLASHLIGHT_OBJECTS is set, this folder keeps them for the next build. The name of an object
    contains a digest of its source's name and all flags, so extensions share equal objects.
    """

    def __init__(self, compiler: Any, folder: Path) -> None:
        self._compiler = compiler
        self._folder = Path(os.environ.get("FLASHLIGHT_OBJECTS") or folder / "objects")
        self._folder.mkdir(parents=True, exist_ok=True)
        self._pool = ThreadPoolExecutor(os.cpu_count())
        self._lock = threading.Lock()
        self._made: dict[Path, Future[None]] = {}

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
        """Replace the method ``compile`` of a compiler of setuptools."""
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
        """Join sources in the folders JOINED, because most of their time is spent on headers.

        Copy sources that CFFI has generated, because their folder depends on the kind of build.
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
        """Write a source into the folder of the objects and return its path."""
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

    def report(self, end: threading.Event) -> None:
        """Print the number of compiled files every 3 seconds and at the end."""
        began = time.monotonic()
        is_end = False
        while not is_end:
            is_end = end.wait(3.0)
            ended = sum(future.done() for future in [*self._made.values()])
            seconds = time.monotonic() - began
            _report(f"compiled {ended} of {len(self._made)} files in {seconds:.0f} s")

    @staticmethod
    def _sum(depends: Path) -> str:
        """Return a digest of all files that an object was compiled from."""
        total = hashlib.sha256()
        for name in depends.read_text().replace("\\\n", " ").split()[1:]:
            total.update(Path(name).read_bytes())
        return total.hexdigest()


class BuildExtensions(build_ext):
    """Build the extensions, and load each of them once."""

    extensions: list[Any]

    def finalize_options(self) -> None:
        super().finalize_options()
        # Each extension waits for its objects in a thread. Editable installs do not see it as an
        # option of setup().
        self.parallel = len(self.extensions)

    def build_extensions(self) -> None:
        missing = [package for package in NEEDED if not self._has(package)]
        if missing == ["libgloo-dev"]:
            self.warn("libgloo-dev is missing, so the extension for Gloo is omitted")
            self.extensions = [ext for ext in self.extensions if _short_name(ext) != "gloo"]
        elif missing:
            raise ExecError(
                f"the native code cannot be compiled without {', '.join(missing)}. Install what is"
                f" missing (Debian, Ubuntu: apt-get install {' '.join(missing)}), or set"
                " FLASHLIGHT_WITHOUT_NATIVE=1 to install without native code, many times slower"
            )
        objects, end = Objects(self.compiler, Path(self.build_temp)), threading.Event()
        self.compiler.compile = objects.compile
        reporter = threading.Thread(target=objects.report, args=[end])
        reporter.start()
        try:
            super().build_extensions()
            for ext in self.extensions:
                self._check_that_it_loads(ext)
        finally:
            end.set()
            reporter.join()

    def build_extension(self, ext: Any) -> None:
        try:
            super().build_extension(ext)
        except (CCompilerError, BaseError) as error:
            raise ExecError(
                f"{ext.name} could not be compiled: {error}. {_without(ext)}"
            ) from error

    def _has(self, package: str) -> bool:
        """Compile a program that needs ``package``; return whether this succeeds."""
        header, suffix = NEEDED[package]
        source = Path(self.build_temp, f"needs_{package}{suffix}")
        source.parent.mkdir(parents=True, exist_ok=True)
        source.write_text(f"#include <{header}>\n")
        try:
            self.compiler.compile([str(source)], extra_postargs=FLAGS)
        except (CCompilerError, BaseError):
            return False
        return True

    def _check_that_it_loads(self, ext: Any) -> None:
        """Load the extension in a subprocess, because it may crash; fail if it does not load."""
        path = Path(self.get_ext_fullpath(ext.name)).absolute()
        command = [sys.executable, "-c", LOAD, ext.name, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        path.unlink()  # a build in place must not leave it to a user either
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ExecError(f"{ext.name} was built and does not load: {reason}. {_without(ext)}")


def _without(ext: Any) -> str:
    return (
        f"Set FLASHLIGHT_WITHOUT_{_short_name(ext).upper()}=1 to install flashlight-py without it"
    )


def _is_wanted(name: str) -> bool:
    """Return whether to build the extension ``name``: on Linux, with a compiler, if not omitted."""
    names = "NATIVE", name.upper()
    commands = (os.environ.get(key) or sysconfig.get_config_var(key) or "" for key in ("CC", "CXX"))
    return (
        sys.platform == "linux"
        and any(shutil.which(shlex.split(command)[0]) for command in commands if command)
        and not any(os.environ.get(f"FLASHLIGHT_WITHOUT_{name}") for name in names)
    )


BUILD = runpy.run_path("csrc/build.py")

setup(
    ext_modules=[ext for ext in BUILD["EXTENSIONS"] if _is_wanted(_short_name(ext))],
    # The binding of NCCL is a module in Python.
    cffi_modules=[
        f"csrc/build.py:{name}" for name in BUILD["BINDINGS"] if name == "nccl" or _is_wanted(name)
    ],
    cmdclass={"build_ext": BuildExtensions},
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
)
