"""Whether arrays that are to be written together lie apart from each other."""

from __future__ import annotations

import functools
from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Any

from numpy.exceptions import TooHardError

from flashlight_py import _native
from flashlight_py.device import Array, array_module, is_cupy
from flashlight_py.errors import BackendUnavailableError

# Solutions that NumPy tries, of what is as hard as any puzzle for some strides: some milliseconds.
# Arrays that indexing makes need few.
_MOST_WORK = 100_000


class Apart:
    """The arrays that are passed to ``verb``: those that it writes share no memory with others.

    Two that do would be written twice, or read while they are written.
    """

    __captured_state__ = ()

    def __init__(self, verb: str) -> None:
        self._verb = verb
        # Where they begin, their places in the order, where they end, whether they are written.
        self._known: list[tuple[int, int, int, bool, Array]] = []
        self._longest = 0
        self._count = 0

    def add(self, array: Array, writes: bool = True) -> None:
        """Take one more; few of those before it are looked at, if they lie apart.

        Raises:
            ValueError: it shares memory with one before it.
        """
        place, self._count = self._count, self._count + 1
        start, end = _bounds(array)
        if start == end:
            return
        known = self._known
        at = bisect_left(known, (end,)) - 1  # the last one that begins before the end
        while at >= 0 and known[at][0] + self._longest > start:
            _, other_place, other_end, other_writes, other = known[at]
            if other_end > start and (writes or other_writes) and _overlap(array, other):
                raise ValueError(
                    f"{self._verb}: array {place} shares memory with array {other_place} before it "
                    "(or is the same one twice), and would be written twice; pass arrays that "
                    "lie apart, or a copy of one"
                )
            at -= 1
        insort(known, (start, place, end, writes, array))
        self._longest = max(self._longest, end - start)


def _bounds(array: Array) -> tuple[int, int]:
    """Return the addresses between which all elements lie, the second one beyond."""
    start = _address(array)
    if array.flags.c_contiguous or not array.size:
        return start, start + array.nbytes
    end = start + array.itemsize
    for extent, stride in zip(array.shape, array.strides, strict=True):
        reach = (extent - 1) * stride
        start, end = start + min(reach, 0), end + max(reach, 0)
    return start, end


def _overlap(one: Array, other: Array) -> bool:
    """Return whether they share memory; also where it would take too long to find out."""
    xp = array_module(one)
    if xp is not array_module(other):
        return False
    if is_cupy(one):
        # CuPy takes no limit of work: it compares where elements begin, on the device. That shows
        # nothing of elements of another width, and the ends of these two overlap already.
        return one.dtype != other.dtype or bool(xp.shares_memory(one, other))
    try:
        return bool(xp.shares_memory(one, other, _MOST_WORK))
    except TooHardError:
        return True


def _address(array: Any) -> int:
    return int(array.data.ptr if is_cupy(array) else _numpy_address()(array))


@functools.cache
def _numpy_address() -> Callable[[Any], int]:
    """Return what finds where a NumPy array lies: 0.1 us natively, 1 us by NumPy."""
    try:
        native: Callable[[Any], int] = _native.load("fast").address
    except BackendUnavailableError:
        return lambda array: int(array.ctypes.data)
    return native
