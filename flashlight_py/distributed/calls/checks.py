"""Checks of arguments: ranks, rows, timeouts, and overlap of arrays that are written."""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.exceptions import TooHardError
from numpy.lib.array_utils import byte_bounds

from flashlight_py import _native
from flashlight_py.checks import as_integer
from flashlight_py.device import Array, array_module, is_cupy
from flashlight_py.distributed.constants import ReduceOp
from flashlight_py.errors import BackendUnavailableError


def check_rank(size: int, verb: str, name: str, rank: object) -> int:
    """Return ``rank`` as an int. Raises ValueError with ``name`` if no member has this rank."""
    number = None if isinstance(rank, bool) else as_integer(rank)
    if number is None or not 0 <= number < size:
        raise ValueError(
            f"{verb}: {name} must be a rank of this group, 0 to {size - 1}, got {rank!r}"
        )
    return number


def check_seconds(verb: str, timeout: Any) -> float | None:
    """Return ``timeout`` as a float, or None for None. Raises ValueError if it is not positive."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not hasattr(timeout, "__float__") or not timeout > 0:
        raise ValueError(f"{verb}: timeout must be a positive number of seconds, got {timeout!r}")
    return float(timeout)


def check_rows(verb: str, array: Array, rows: Iterable[Any] | None, size: int) -> list[int] | None:
    """Return ``rows`` as ints, or None for equal parts, if ``array`` can be split into them."""
    row_count = array.shape[0] if array.ndim else 0
    if rows is None:
        if array.ndim == 0 or row_count % size:
            raise ValueError(
                f"{verb}: the first dimension must be a multiple of the {size} ranks, got shape "
                f"{array.shape}. Pass rows= for unequal parts."
            )
        return None
    counts = row_counts(verb, rows, size)
    if sum(counts) != row_count or not array.ndim:
        raise ValueError(
            f"{verb}: the sum of rows must be {row_count}, the first dimension of x of shape "
            f"{array.shape}, got rows={counts}"
        )
    return counts


def row_counts(verb: str, rows: Iterable[object], size: int) -> list[int]:
    """Return ``rows`` as ints. Raises ValueError unless they are ``size`` numbers >= 0."""
    values = list(rows)
    integers = [as_integer(value) for value in values if not isinstance(value, bool)]
    counts = [count for count in integers if count is not None and count >= 0]
    if len(values) != size or len(counts) != size:
        raise ValueError(
            f"{verb}: rows must be {size} non-negative integers, one for each rank, got {values}"
        )
    return counts


NUMBERS = (bool, int, float, complex, np.generic)
"""Types of Python's numbers and of NumPy's scalars."""


def as_number(verb: str, x: Any) -> tuple[Array, Callable[[], Any]]:
    """Return ``x`` as an array, and a function that converts the array back to the type of ``x``.

    Python numbers are sent as bool, int64, float64 or complex128. NumPy scalars keep their dtype.
    """
    require_bits(verb, x)
    array = array_module(x).array(x, np.int64 if type(x) is int else None)
    return array, (lambda: array[()]) if isinstance(x, np.generic) else array.item


def require_bits(
    verb: str, x: Any, op: ReduceOp | None = None, scale: float = 1.0, size: int = 1
) -> None:
    """Raise OverflowError if the reduction of a Python int could exceed 64 bits.

    Each rank assumes that all ``size`` ranks pass its number. If no rank raises, the true result
    fits.
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
        detail = f" by {op.name.lower()!r} over {size} ranks" if op is not None else ""
        raise OverflowError(
            f"{verb}: an int must fit into 64 bits before and after the reduction{detail}, got "
            f"{x}. Pass a float, or collect the numbers by all_gather_object."
        )


try:  # The memory bounds of a NumPy array take 0.1 us in native code, and 2 us in NumPy.
    _numpy_bounds: Callable[[Any], tuple[int, int]] = _native.load_extension("fast").bounds
except BackendUnavailableError:
    _numpy_bounds = byte_bounds

# Work limit of NumPy's overlap search (a few ms). For some strides its time is exponential.
_MOST_WORK = 100_000


class OverlapCheck:
    """A check that an array which ``verb`` fills shares no memory with its other arrays.

    If ``outs`` > 0, errors name the first ``outs`` arrays ``out[i]``, and later arrays ``x[i]``.
    """

    def __init__(self, verb: str, outs: int = 0) -> None:
        self._verb, self._outs = verb, outs
        # For each array: start address, index, end address, whether the verb fills it, the array.
        self._arrays: list[tuple[int, int, int, bool, Array]] = []
        self._longest = 0
        self._count = 0

    def add(self, array: Array, writes: bool = True, beside: int = -1) -> None:
        """Add an array. Raises ValueError if it overlaps an earlier array and the verb fills one.

        ``writes``: the verb fills ``array``. ``beside``: index of an array that may be overlapped.
        """
        index, self._count = self._count, self._count + 1
        start, end = bounds(array)
        if start == end:
            return
        arrays = self._arrays
        at = bisect_left(arrays, (end,)) - 1  # last array that begins before ``end``
        while at >= 0 and arrays[at][0] + self._longest > start:
            _, other_index, other_end, other_writes, other = arrays[at]
            may_conflict = other_end > start and (writes or other_writes) and other_index != beside
            if may_conflict and _overlap(array, other):
                raise ValueError(
                    f"{self._verb}: expected arrays with disjoint memory, got {self._name(index)}, "
                    f"which shares memory with {self._name(other_index)}. Pass a copy of one array."
                )
            at -= 1
        insort(arrays, (start, index, end, writes, array))
        self._longest = max(self._longest, end - start)

    def _name(self, index: int) -> str:
        if not self._outs:
            return f"array {index}"
        return f"out[{index}]" if index < self._outs else f"x[{index - self._outs}]"


def bounds(array: Array) -> tuple[int, int]:
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
    """Return whether two arrays share memory. Return True also if the search takes too long."""
    xp = array_module(one)
    if xp is not array_module(other):
        return False
    if is_cupy(one):
        # CuPy has no work limit, and compares only the start addresses of elements. So two arrays
        # of different dtypes count as overlapping if their address ranges overlap.
        return one.dtype != other.dtype or bool(xp.shares_memory(one, other))
    try:
        return bool(xp.shares_memory(one, other, _MOST_WORK))
    except TooHardError:
        return True
