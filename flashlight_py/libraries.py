"""The shared libraries that this process has loaded."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# How builds of BLAS spell their names: NumPy's wheels first; 64_ is for 64-bit integers.
_SPELLINGS = ("scipy_cblas_{}64_", "cblas_{}64_", "scipy_cblas_{}", "cblas_{}")


class _Info(ctypes.Structure):
    """The first members of a struct dl_phdr_info; see dl_iterate_phdr(3)."""

    _fields_ = (("address", ctypes.c_void_p), ("name", ctypes.c_char_p))


_Note = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Info), ctypes.c_size_t, ctypes.c_void_p)


def paths_of(name: str) -> list[str]:
    """Return the paths of loaded libraries whose file names contain ``name``, NumPy's own first."""
    paths = set[str]()

    def note(info: Any, size: int, data: object) -> int:
        paths.add(os.fsdecode(info.contents.name or b""))
        return 0

    ctypes.CDLL(None).dl_iterate_phdr(_Note(note), None)
    found = [path for path in paths if name in Path(path).name]
    return sorted(found, key=lambda path: ("numpy" not in path, path))


def mapped(name: str) -> Iterator[ctypes.CDLL]:
    """Yield the loaded libraries whose file names contain ``name``, NumPy's own first."""
    for path in paths_of(name):
        if os.path.exists(path):  # else its file was removed since
            yield ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)


def blas(*names: str) -> tuple[Any, ...]:
    """Return whether NumPy's BLAS has 64-bit integers, and its functions' addresses.

    Nothing where it cannot be found.
    """
    for library in mapped("blas"):
        for spelling in _SPELLINGS:
            own = [spelling.format(name) for name in names]
            if all(hasattr(library, name) for name in own):
                found = [ctypes.cast(library[name], ctypes.c_void_p).value for name in own]
                return "64_" in spelling, *found
    return ()
