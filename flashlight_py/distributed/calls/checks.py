"""Checks of arguments: ranks, rows and timeouts; arrays that are to be written lie apart."""

from __future__ import annotations

import math
import operator
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.exceptions import TooHardError
from numpy.lib.array_utils import byte_bounds

from flashlight_py import _native
from flashlight_py.device import Array, array_module, is_cupy
from flashlight_py.distributed.constants import ReduceOp
from flashlight_py.errors import BackendUnavailableError


def whole(value: object) -> int | None:
    """Return an integer of any kind, also NumPy's, as an int; None for anything else."""
    if type(value) is int:
        return value
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def whole_number(what: str, name: str, value: object, least: int = 0) -> int:
    """Return ``value``, the argument ``name`` of ``what``, as an int of at ``least`` so much."""
    number = None if isinstance(value, bool) else whole(value)
    if number is None:
        raise TypeError(f"{what}: {name} must be an integer, got {type(value).__name__}")
    if number < least:
        raise ValueError(f"{what}: {name} must be at least {least}, got {number}")
    return number


def check_rank(size: int, verb: str, name: str, rank: object) -> int:
    """Return ``rank``, the argument called ``name``, as an int: a rank of a group of ``size``."""
    number = None if isinstance(rank, bool) else whole(rank)
    if number is None or not 0 <= number < size:
        raise ValueError(
            f"{verb}: {name} must be a rank of this group, 0 to {size - 1}; got {rank!r}"
        )
    return number


def check_seconds(verb: str, timeout: Any) -> float | None:
    """Return a positive ``timeout`` in seconds as a float, None as it is."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not hasattr(timeout, "__float__") or not timeout > 0:
        raise ValueError(f"{verb}: timeout must be a positive number of seconds: {timeout!r}")
    return float(timeout)


def check_rows(
    verb: str, array: Array, rows: Iterable[object] | None, size: int
) -> list[int] | None:
    """Return ``rows`` as ints that cut the first dimension of ``array`` into ``size`` parts.

    None stands for equal parts.
    """
    have = array.shape[0] if array.ndim else 0
    if rows is None:
        if array.ndim == 0 or have % size:
            raise ValueError(
                f"{verb}: the first dimension must be a multiple of the {size} ranks, got shape "
                f"{array.shape}; unequal parts need rows="
            )
        return None
    counts = each_rank(verb, rows, size)
    if sum(counts) != have or not array.ndim:
        raise ValueError(
            f"{verb}: rows must say for each of the {size} ranks how many of the rows of x (shape "
            f"{array.shape}) it gets, {have} in all; got {counts}"
        )
    return counts


def each_rank(verb: str, rows: Iterable[object], size: int) -> list[int]:
    """Return ``rows`` as ints, one for each rank and none of them negative."""
    given = list(rows)
    counts = [count for n in given if (count := whole(n)) is not None and not isinstance(n, bool)]
    if len(given) != size or len(counts) != size or min(counts) < 0:
        raise ValueError(
            f"{verb}: rows must say, in integers, for each of the {size} ranks how many rows it "
            f"gets; got {given}"
        )
    return counts


NUMBERS = (bool, int, float, complex, np.generic)
"""Python's numbers, and NumPy's scalars."""


def as_number(verb: str, x: Any) -> tuple[Array, Callable[[], Any]]:
    """Return ``x`` as an array, and what makes a number of the kind of ``x`` of it again.

    Python's numbers travel as bool, int64, float64 and complex128, NumPy's scalars as they are.
    """
    require_bits(verb, x)
    array = array_module(x).array(x, np.int64 if type(x) is int else None)
    return array, (lambda: array[()]) if isinstance(x, np.generic) else array.item


def require_bits(
    verb: str, x: Any, op: ReduceOp | None = None, scale: float = 1.0, size: int = 1
) -> None:
    """Reject a Python int whose reduction could pass 64 bits: NumPy's would wrap around.

    Each rank checks its own number as if all ``size`` ranks had the same; then no sum passes.
    """
    if type(x) is not int:
        return
    largest = abs(x)
    if op is ReduceOp.SUM:
        largest *= size
    elif op is ReduceOp.PROD:
        largest **= size
    if isinstance(scale, int | float) and math.isfinite(scale):
        largest = math.ceil(largest * abs(int(scale)))
    if largest >= 2**63:
        of = f" of {size} ranks by {op.name.lower()!r}" if op is not None else ""
        raise OverflowError(
            f"{verb}: {x}, an int, travels in 64 bits, and its reduction{of} could pass them; pass "
            "a float, or the digits by all_gather_object"
        )


try:  # the addresses of a NumPy array: 0.1 us natively, 2 us by NumPy
    _numpy_bounds: Callable[[Any], tuple[int, int]] = _native.load("fast").bounds
except BackendUnavailableError:
    _numpy_bounds = byte_bounds

# Limit on NumPy's search for an overlap, which takes exponential time for some strides: some ms.
_MOST_WORK = 100_000


class Apart:
    """The arrays that are passed to ``verb``: those that it writes share no memory with others."""

    def __init__(self, verb: str, outs: int = 0) -> None:
        """The first ``outs`` arrays belong to ``out``, the others to ``x``."""
        self._verb, self._outs = verb, outs
        # Where they begin, their places in the order, where they end, whether they are written.
        self._known: list[tuple[int, int, int, bool, Array]] = []
        self._longest = 0
        self._count = 0

    def add(self, array: Array, writes: bool = True, beside: int = -1) -> None:
        """Add an array and compare it with its neighbours in memory.

        It may share memory with the array number ``beside``.
        """
        place, self._count = self._count, self._count + 1
        start, end = _bounds(array)
        if start == end:
            return
        known = self._known
        at = bisect_left(known, (end,)) - 1  # the last one that begins before the end
        while at >= 0 and known[at][0] + self._longest > start:
            _, other_place, other_end, other_writes, other = known[at]
            is_near = other_end > start and (writes or other_writes) and other_place != beside
            if is_near and _overlap(array, other):
                raise ValueError(
                    f"{self._verb}: {self._name(place)} shares memory with "
                    f"{self._name(other_place)} before it (or is the same one twice), and would be "
                    "written twice; pass arrays that lie apart, or a copy of one"
                )
            at -= 1
        insort(known, (start, place, end, writes, array))
        self._longest = max(self._longest, end - start)

    def _name(self, place: int) -> str:
        if not self._outs:
            return f"array {place}"
        return f"out[{place}]" if place < self._outs else f"x[{place - self._outs}]"


def _bounds(array: Array) -> tuple[int, int]:
    """Return the addresses between which all elements lie, the second one beyond."""
    if type(array) is np.ndarray:
        return _numpy_bounds(array)
    start = int(array.data.ptr if is_cupy(array) else array.ctypes.data)  # type: ignore[attr-defined]
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
