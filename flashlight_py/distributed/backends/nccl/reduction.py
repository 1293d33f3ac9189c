"""Conversion of arrays to types that NCCL can reduce.

Broadcasts, gathers and messages send every dtype as bytes. A reduction needs a type that NCCL
supports, so some dtypes are reinterpreted or converted.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from flashlight_py.device import Array, array_module
from flashlight_py.distributed.constants import ReduceOp

# Names of dtypes in the order of ncclDataType_t (csrc/nccl/nccl.cdef.h).
_NAMES = "int8 uint8 int32 uint32 int64 uint64 float16 float32 float64 bfloat16"
_CODES = {name: code for code, name in enumerate(_NAMES.split())}
BYTES = _CODES["uint8"]

# Values of ncclRedOp_t. For bool, AND is MIN and OR is MAX; NCCL has no bitwise operations.
OPS = {ReduceOp.SUM: 0, ReduceOp.PROD: 1, ReduceOp.MAX: 2, ReduceOp.MIN: 3}
OPS |= {ReduceOp.AND: 3, ReduceOp.OR: 2}

_REDUCED_AS = {"bool": "uint8", "complex64": "float32", "complex128": "float64"}
# NCCL has no 16-bit integers. In 32 bits, the lower 16 bits of sums and products are correct.
_WIDENED = {"int16": "int32", "uint16": "int32"}


class NcclForm(NamedTuple):
    """The type in which the elements of an array are reduced.

    NCCL reduces ``dtype``, which has NCCL's number ``code``. One element of the array consists of
    ``parts`` elements of ``dtype``. If ``widened``, the array is converted to ``dtype`` and back.
    """

    dtype: str
    code: int
    parts: int
    widened: bool

    def convert(self, source: Array, target: Array) -> tuple[Array, Array]:
        """Return the source and target arrays for NCCL, converted if ``widened``."""
        if not self.widened:
            return source, target
        wide = source.astype(self.dtype)
        if target is source:
            return wide, wide
        return wide, array_module(target).empty(target.shape, self.dtype)


@functools.cache  # building the name of a dtype takes 2 us
def form_of(dtype: np.dtype[Any], op: ReduceOp) -> NcclForm:
    """Return the form in which NCCL reduces elements of ``dtype`` with ``op``.

    Raises TypeError, which lists alternatives, if NCCL cannot reduce such elements.
    """
    name, reason = dtype.name, ""
    if op is ReduceOp.XOR or (op in (ReduceOp.AND, ReduceOp.OR) and name != "bool"):
        reason = "NCCL combines numbers, not bits"
    elif dtype.kind == "c" and op is not ReduceOp.SUM:
        reason = "NCCL can only sum real and imaginary parts"
    if reason:
        raise TypeError(
            f"NCCL has no {op.name.lower()} of {name}: {reason}. Reduce on the CPU (x.get()), or "
            "use all_gather and combine the arrays"
        )
    reduced = _REDUCED_AS.get(name) or _WIDENED.get(name, name)
    if reduced not in _CODES:
        raise TypeError(f"NCCL needs {', '.join((*_CODES, *_REDUCED_AS, *_WIDENED))}, got {name}")
    return NcclForm(reduced, _CODES[reduced], 2 if dtype.kind == "c" else 1, name in _WIDENED)
