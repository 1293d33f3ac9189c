"""The shared libraries that this process has mapped."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

_MAPS = Path("/proc/self/maps")


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
