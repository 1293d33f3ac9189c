"""Where arrays lie in one buffer of bytes: one after the other, each at a multiple of 16.

So every element type can be used where it lies, on CPUs and GPUs. csrc/tree/pack.c does the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flashlight_py.device import Array

__all__ = ["aligned", "pack", "size_of", "unpack"]

_ALIGNMENT = 16


def aligned(size: int) -> int:
    """Return how many bytes of a buffer an array of ``size`` bytes takes."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def size_of(arrays: Sequence[Array]) -> int:
    """Return how many bytes a buffer for all of ``arrays`` has."""
    return sum(aligned(array.nbytes) for array in arrays)


def pack(arrays: Sequence[Array], buffer: Array) -> None:
    """Copy ``arrays``, of any layout, into ``buffer`` (uint8), in native byte order."""
    for array, place in _places(arrays, buffer):
        place[...] = array


def unpack(arrays: Sequence[Array], buffer: Array) -> None:
    """Copy ``buffer`` back into ``arrays``."""
    for array, place in _places(arrays, buffer):
        array[...] = place


def _places(arrays: Sequence[Array], buffer: Array) -> Iterator[tuple[Array, Array]]:
    start = 0
    for array in arrays:
        if array.nbytes:
            part = buffer[start : start + array.nbytes]
            yield array, part.view(array.dtype.newbyteorder("=")).reshape(array.shape)
        start += aligned(array.nbytes)
