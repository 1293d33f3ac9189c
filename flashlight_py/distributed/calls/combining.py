"""The meaning of verbs: one rank's result from all arrays, as NumPy (or CuPy) computes it.

Tests compare every backend with it, and a backend whose library lacks a verb does it so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from flashlight_py.device import Array, array_module
from flashlight_py.distributed import verbs
from flashlight_py.distributed.calls.arrays import LOGICAL, UFUNCS, scale_in_place
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.constants import ReduceOp
from flashlight_py.distributed.verbs import Verb


def combined(arrays: Sequence[Array], op: ReduceOp, scale: float = 1.0) -> Array:
    """Return ``scale`` times ``arrays``, combined in their order, as a new array.

    16-bit floats are combined in float32 and rounded once; integers wrap around; an average is
    divided by the number of arrays.
    """
    if op is ReduceOp.AVG:
        op, scale = ReduceOp.SUM, scale / len(arrays)
    dtype, xp = arrays[0].dtype, array_module(arrays[0])
    narrow = is_narrow(dtype)
    terms = [array.astype(np.float32) for array in arrays] if narrow else list(arrays)
    if op in LOGICAL:
        op, terms = LOGICAL[op], [array != 0 for array in arrays]  # of one alone too
    fold = functools.partial(functools.reduce, getattr(xp, UFUNCS[op.name.lower()].__name__))
    with np.errstate(all="ignore"):  # infinities come as they come
        total = xp.array(fold(terms))
        scale_in_place(total, scale)
        result: Array = total.astype(dtype, copy=False)
    return result


def is_narrow(dtype: np.dtype[Any]) -> bool:
    """Return whether arrays of ``dtype``, a float of 16 bits, are combined in float32."""
    return dtype.itemsize == 2 and dtype.kind not in "iu"


def factors(dtype: np.dtype[Any], op: ReduceOp, scale: float) -> tuple[float, float]:
    """Return by what the results of the hosts are multiplied, and by what that of all of them.

    Numbers that leave a host in 16 bits are made smaller before they are rounded: a mean does not
    overflow on its way.
    """
    first = is_narrow(dtype) and op is ReduceOp.SUM and abs(scale) <= 1
    return (scale, 1.0) if first else (1.0, scale)


def cut(rows: Any, counts: Sequence[int]) -> list[Any]:
    """Return ``rows`` in consecutive parts; ``counts`` has the number of rows of each."""
    return [rows[start:end] for start, end in pairwise(accumulate(counts, initial=0))]


def joined(arrays: Sequence[Array]) -> Array:
    """Return ``arrays`` one after the other; one without dimensions is one row."""
    rows = [array.reshape(1) if array.ndim == 0 else array for array in arrays]
    whole: Array = array_module(rows[0]).concatenate(rows)
    return whole


def _part(array: Array, rank: int, size: int, rows: Sequence[int] | None = None) -> Array:
    part: Array = cut(array, [len(array) // size] * size if rows is None else rows)[rank]
    return part


MEANINGS: dict[Verb, Callable[[Sequence[Any], int, Call], Any]] = {
    verbs.ALL_REDUCE: lambda xs, rank, call: combined(xs, call.op, call.scale),
    verbs.REDUCE: lambda xs, rank, call: combined(xs, call.op, call.scale),
    verbs.SCAN: lambda xs, rank, call: combined(xs[: rank + 1], call.op, call.scale),
    verbs.EXSCAN: lambda xs, rank, call: combined(xs[:rank], call.op, call.scale),
    verbs.REDUCE_SCATTER: lambda xs, rank, call: combined(
        [_part(x, rank, len(xs), call.rows) for x in xs], call.op, call.scale
    ),
    verbs.BROADCAST: lambda xs, rank, call: xs[call.root],
    verbs.ALL_GATHER: lambda xs, rank, call: joined(xs),
    verbs.GATHER: lambda xs, rank, call: joined(xs),
    verbs.SCATTER: lambda xs, rank, call: _part(xs[call.root], rank, len(xs), call.rows),
    verbs.ALL_TO_ALL: lambda xs, rank, call: joined([_part(x, rank, len(xs)) for x in xs]),
}
"""Of each verb that has one, the result of a rank that gets it: of the arrays of all ranks, the
rank and its call. Parts are equal, or of the same ``rows`` on all ranks."""
