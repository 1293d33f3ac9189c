"""Memory without a name that a process and those it has started map, and arrays in it."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from flashlight_py.device import Array

_ALIGNMENT = 64


class Place(NamedTuple):
    """The place of an array in a memory: its first byte, its shape and dtype."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[np.generic]


def lay_out(arrays: Iterable[Array]) -> tuple[list[Place], int]:
    """Return places for arrays like these, one after the other, and how many bytes they take.

    Raises:
        TypeError: an array holds Python objects.
    """
    arrays = list(arrays)
    if any(array.dtype.hasobject for array in arrays):
        raise TypeError("an array of Python objects cannot lie in memory that processes share")
    sizes = (-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays)
    offsets = list(accumulate(sizes, initial=0))
    places = [Place(at, a.shape, a.dtype) for at, a in zip(offsets, arrays, strict=False)]
    return places, offsets[-1]


class Memory:
    """Bytes that grow as needed; who has inherited the descriptor ``fd`` makes it with that.

    Raises:
        OSError: the system has no more memory.
    """

    def __init__(self, fd: int | None = None) -> None:
        self.fd = os.memfd_create("flashlight workers") if fd is None else fd
        os.set_inheritable(self.fd, False)
        self._map: mmap.mmap | None = None

    def put(self, arrays: Sequence[Array]) -> list[Place]:
        """Write ``arrays`` over whatever was there; return where they lie."""
        places, size = lay_out(arrays)
        self.reserve(size)
        for view, array in zip(self.views(places), arrays, strict=True):
            view[...] = array
        return places

    def reserve(self, size: int) -> None:
        """Make it at least ``size`` bytes; the new ones are zeros."""
        if size > os.fstat(self.fd).st_size:
            os.posix_fallocate(self.fd, 0, size)

    def views(self, places: Iterable[Place]) -> list[Array]:
        """Return the arrays at ``places``: not copies, and valid for as long as they are used."""
        return [self._view(place) for place in places]

    def _view(self, place: Place) -> Array:
        kind = place.dtype
        size = math.prod(place.shape) * kind.itemsize
        if not size:
            return np.empty(place.shape, kind)
        end = place.offset + size
        if self._map is None or len(self._map) < end:
            self._map = mmap.mmap(self.fd, 0)  # the old one goes with the last array in it
        return np.ndarray(place.shape, kind, self._map, place.offset)

    def close(self) -> None:
        """Let go of it; arrays stay."""
        os.close(self.fd)
        self._map = None
