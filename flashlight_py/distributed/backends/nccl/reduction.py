"""How arrays are given to NCCL: as the type that it is to see, converted where there is none.

Arrays that are only moved (broadcast, gathers, messages) travel as bytes, whatever their dtype. A
reduction needs a type that NCCL calculates with; some dtypes are seen as another one.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from flashlight_py.device import Array, array_module
from flashlight_py.distributed.constants import ReduceOp

# In the order of ncclDataType_t, as csrc/nccl/nccl.cdef.h declares it.
_NAMES = "int8 uint8 int32 uint32 int64 uint64 float16 float32 float64 bfloat16"
_CODES = {name: code for code, name in enumerate(_NAMES.split())}
BYTES = _CODES["uint8"]

# ncclRedOp_t. The bits of bool are its least and greatest; other bits have no form.
OPS = {ReduceOp.SUM: 0, ReduceOp.PROD: 1, ReduceOp.MAX: 2, ReduceOp.MIN: 3}
OPS |= {ReduceOp.AND: 3, ReduceOp.OR: 2}

_SEEN_AS = {"bool": "uint8", "complex64": "float32", "complex128": "float64"}
# NCCL has no 16-bit integers. Sums and products that wrap in 32 bits are right in the lower 16.
_WIDENED = {"int16": "int32", "uint16": "int32"}


class NcclForm(NamedTuple):
    """How the elements of an array are reduced.

    ``dtype`` is what NCCL calculates with, ``code`` its number of it, ``parts`` how many of these
    one element has, and ``widened`` whether the array must be converted before and after.
    """

    dtype: str
    code: int
    parts: int
    widened: bool

    def seen(self, source: Array, target: Array) -> tuple[Array, Array]:
        """Return what NCCL reads and writes for an array and its result, converted if need be."""
        if not self.widened:
            return source, target
        wide = source.astype(self.dtype)
        if target is source:
            return wide, wide
        return wide, array_module(target).empty(target.shape, self.dtype)


@functools.cache  # a dtype takes 2 us to put its name together
def form_of(dtype: np.dtype[Any], op: ReduceOp) -> NcclForm:
    """Return the form in which elements of ``dtype`` are combined by ``op``.

    Raises:
        TypeError: NCCL cannot do that; says what can.
    """
    name, why_not = dtype.name, ""
    if op is ReduceOp.XOR or (op in (ReduceOp.AND, ReduceOp.OR) and name != "bool"):
        why_not = "it combines numbers, not bits"
    elif dtype.kind == "c" and op is not ReduceOp.SUM:
        why_not = "real and imaginary parts are summed on their own"
    if why_not:
        raise TypeError(
            f"NCCL has no {op.name.lower()} of {name}: {why_not}; reduce on the CPU (x.get()), or "
            "all_gather and combine"
        )
    seen = _SEEN_AS.get(name) or _WIDENED.get(name, name)
    if seen not in _CODES:
        raise TypeError(f"NCCL reduces {', '.join((*_CODES, *_SEEN_AS, *_WIDENED))}; got {name}")
    return NcclForm(seen, _CODES[seen], 2 if dtype.kind == "c" else 1, name in _WIDENED)
