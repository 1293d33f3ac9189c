"""Builds the native extensions; everything else is in pyproject.toml.

An extension that cannot be built does not fail the installation: the package works without it,
and the reason and the remedy are stored beside the place where it would have been, for the error
that is raised when it is asked for.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import BaseError, CCompilerError

NEEDED = {
    "gloo": "Gloo's headers and library (Debian, Ubuntu: apt-get install libgloo-dev) and ",
    "shm": "",
    "fast": "",
    "tree": "",
}
AGAIN = "pip install --force-reinstall --no-deps --no-cache-dir ."


def _short_name(ext: Any) -> str:
    """Return "gloo" for ``flashlight_py._native._gloo``."""
    return str(ext.name).rpartition(".")[2].lstrip("_")


class BuildOptionalExtensions(build_ext):
    """Build each extension, or leave the reason why it is missing."""

    extensions: list[Any]

    def build_extension(self, ext: Any) -> None:
        note = self._note(ext)
        note.unlink(missing_ok=True)
        reason = self._why_not(ext)
        if reason is None:
            return
        Path(self.get_ext_fullpath(ext.name)).unlink(missing_ok=True)  # one from an earlier build
        note.parent.mkdir(parents=True, exist_ok=True)
        remedy = f"Install {NEEDED[_short_name(ext)]}a C++17 compiler, then install again: {AGAIN}"
        note.write_text(f"{reason}. {remedy}\n", encoding="utf-8", errors="backslashreplace")
        self.warn(f"{ext.name} is left out: {reason}")

    def _why_not(self, ext: Any) -> str | None:
        skip = f"FLASHLIGHT_WITHOUT_{_short_name(ext).upper()}"
        if os.environ.get(skip):
            return f"{skip} was set when flashlight-py was built"
        try:
            super().build_extension(ext)
        except (CCompilerError, BaseError) as error:
            return f"it could not be compiled when flashlight-py was built ({error})"
        return None

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


def numpy_extension(name: str, sources: list[str], depends: list[str]) -> Extension:
    """Return an extension that reads NumPy arrays by itself; also abi3."""
    import numpy

    return Extension(
        f"flashlight_py._native._{name}",
        sources=sources,
        depends=depends,
        include_dirs=[numpy.get_include()],
        define_macros=[("Py_LIMITED_API", "0x030A0000")],
        extra_compile_args=["-O3", "-fvisibility=hidden"],
        py_limited_api=True,
    )


FAST = numpy_extension(
    "fast",
    ["csrc/fast/fast.c", "csrc/fast/describe.c"],
    [
        *(f"csrc/fast/{name}.h" for name in ("fast", "place", "ring")),
        *("csrc/common/types.cdef.h", "csrc/shm/shm.cdef.h"),
    ],
)
TREE = numpy_extension(
    "tree",
    [f"csrc/tree/{name}.c" for name in ("digest", "module", "pack", "walk")],
    [f"csrc/tree/{name}.h" for name in ("memo", "text", "tree")],
)

setup(
    ext_modules=[FAST, TREE],
    cffi_modules=[f"csrc/{name}/build_{name}.py:ffi" for name in ("gloo", "shm", "nccl")],
    cmdclass={"build_ext": BuildOptionalExtensions},
    options={
        "bdist_wheel": {"py_limited_api": "cp310"},
        "build_ext": {"parallel": os.cpu_count()},
    },
)
