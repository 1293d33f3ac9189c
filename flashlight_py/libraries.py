"""The shared libraries that this process has mapped."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_MAPS = Path("/proc/self/maps")
# How builds of BLAS spell their names: NumPy's wheels first; 64_ is for 64-bit integers.
_SPELLINGS = ("scipy_cblas_{}64_", "cblas_{}64_", "scipy_cblas_{}", "cblas_{}")


def mapped(name: str) -> Iterator[ctypes.CDLL]:
    """Yield those whose file name contains ``name``; none where the system does not say.

    NumPy's own come first, of several that bring the same library.
    """
    lines = _MAPS.read_text(errors="surrogateescape").splitlines() if _MAPS.exists() else []
    paths = {line.split(maxsplit=5)[-1] for line in lines if name in line}
    found = [path for path in paths if name in Path(path).name]
    for path in sorted(found, key=lambda path: ("numpy" not in path, path)):
        if os.path.exists(path):  # else replaced since, and mapped as "... (deleted)"
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
