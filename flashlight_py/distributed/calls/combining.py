"""The definition of each verb: a function from the arrays of all ranks to a rank's result.

Tests compare every backend with these functions. A backend uses them for verbs that its library
lacks.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from flashlight_py.device import Array, array_module
from flashlight_py.distributed import verbs
from flashlight_py.distributed.calls.arrays import LOGICAL, UFUNCS, dtype_code, scale_in_place
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.constants import ReduceOp


def combined(arrays: Sequence[Array], op: ReduceOp, scale: float = 1.0) -> Array:
    """Return a new array: ``arrays`` combined in order, times ``scale``.

    16-bit floats are combined in float32 and rounded once. Integers wrap around. For an average,
    the sum is divided by the number of arrays.
    """
    if op is ReduceOp.AVG:
        op, scale = ReduceOp.SUM, scale / len(arrays)
    dtype, xp = arrays[0].dtype, array_module(arrays[0])
    terms = [array.astype(np.float32) for array in arrays] if is_narrow(dtype) else list(arrays)
    if op in LOGICAL:
        op, terms = LOGICAL[op], [array != 0 for array in arrays]  # needed even for one array
    fold = functools.partial(functools.reduce, getattr(xp, UFUNCS[op.name.lower()].__name__))
    with np.errstate(all="ignore"):  # no warnings for infinities
        total = xp.array(fold(terms))
        scale_in_place(total, scale)
        result: Array = total.astype(dtype, copy=False)
    return result


def combine_natively(
    native: Any, arrays: Sequence[Array], op: ReduceOp, scale: float, out: Array
) -> None:
    """Write ``combined(arrays, op, scale)`` to ``out`` by an extension. All arrays are packed."""
    ffi, code = native.ffi, dtype_code(op.name.lower(), out.dtype)
    sources = ffi.new("const void *[]", [ffi.from_buffer(array) for array in arrays])
    target = ffi.from_buffer("char[]", out.view(np.uint8), require_writable=True)
    native.lib.fl_reduce(code, op, scale, target, sources, len(arrays), out.size)


def is_narrow(dtype: np.dtype[Any]) -> bool:
    return dtype.itemsize == 2 and dtype.kind not in "iu"


def factors(dtype: np.dtype[Any], op: ReduceOp, scale: float) -> tuple[float, float]:
    """Split ``scale`` into a factor for each host's result and a factor for the final result.

    A 16-bit mean is scaled on each host, because the sum over all hosts could overflow.
    """
    first = is_narrow(dtype) and op is ReduceOp.SUM and abs(scale) <= 1
    return (scale, 1.0) if first else (1.0, scale)


def split_rows(rows: Any, counts: Sequence[int]) -> list[Any]:
    return [rows[start:end] for start, end in pairwise(accumulate(counts, initial=0))]


def views(flat: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    parts = split_rows(flat, [math.prod(shape) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def store_each(arrays: Iterable[Array], values: Iterable[Array]) -> None:
    """Copy each of ``values`` to its array, unless they are one object."""
    for array, value in zip(arrays, values, strict=True):
        if array is not value:
            array[...] = value


def concatenated(arrays: Sequence[Array]) -> Array:
    """Concatenate ``arrays`` along the first dimension. An array without dimensions is one row."""
    rows = [array.reshape(1) if array.ndim == 0 else array for array in arrays]
    # Without ``dtype``, NumPy removes the holes of a structured dtype.
    concatenated: Array = array_module(rows[0]).concatenate(rows, dtype=rows[0].dtype)
    return concatenated


def _part(array: Array, rank: int, size: int, rows: Sequence[int] | None = None) -> Array:
    part: Array = split_rows(array, [len(array) // size] * size if rows is None else rows)[rank]
    return part


RESULTS: dict[verbs.Verb, Callable[[Sequence[Any], int, Call], Any]] = {
    verbs.ALL_REDUCE: lambda xs, rank, call: combined(xs, call.op, call.scale),
    verbs.REDUCE: lambda xs, rank, call: combined(xs, call.op, call.scale),
    verbs.SCAN: lambda xs, rank, call: combined(xs[: rank + 1], call.op, call.scale),
    verbs.EXSCAN: lambda xs, rank, call: combined(xs[:rank], call.op, call.scale),
    verbs.REDUCE_SCATTER: lambda xs, rank, call: combined(
        [_part(x, rank, len(xs), call.rows) for x in xs], call.op, call.scale
    ),
    verbs.BROADCAST: lambda xs, rank, call: xs[call.root],
    verbs.ALL_GATHER: lambda xs, rank, call: concatenated(xs),
    verbs.GATHER: lambda xs, rank, call: concatenated(xs),
    verbs.SCATTER: lambda xs, rank, call: _part(xs[call.root], rank, len(xs), call.rows),
    verbs.ALL_TO_ALL: lambda xs, rank, call: concatenated([_part(x, rank, len(xs)) for x in xs]),
}
"""For each verb with a result: a function that computes a rank's result from the arrays of all
ranks, the rank and its call. Parts must be equal, or ``rows`` must be the same on all ranks."""
