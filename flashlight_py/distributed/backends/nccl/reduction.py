"""How arrays are given to NCCL: as the type that it is to see, converted where there is none.

Arrays that are only moved (broadcast, gathers, messages) travel as bytes, whatever their dtype. A
reduction needs a type that NCCL calculates with; some dtypes are seen as another one.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashlight_py.device import Array, array_module
from flashlight_py.distributed.calls.arrays import scale_in_place
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


@dataclass(frozen=True)
class NcclForm:
    """How the elements of an array are reduced.

    ``dtype`` is what NCCL calculates with, ``code`` its number of it, ``parts`` how many of these
    one element has, and ``widened`` whether the array must be converted before and after.
    """

    dtype: str
    code: int
    parts: int
    widened: bool


@functools.cache
def form_of(dtype: str, op: ReduceOp) -> NcclForm:
    """Return the form in which elements of the dtype of that name are combined by ``op``.

    Raises:
        TypeError: NCCL cannot do that; says what can.
    """
    if op is ReduceOp.XOR or (op in (ReduceOp.AND, ReduceOp.OR) and dtype != "bool"):
        raise TypeError(
            f"NCCL has no {op.name.lower()} of {dtype}: it combines numbers, not bits; reduce on "
            "the CPU (x.get()), or all_gather and combine"
        )
    is_complex = dtype.startswith("complex")
    if is_complex and op is not ReduceOp.SUM:
        raise TypeError(
            f"NCCL has no {op.name.lower()} of {dtype}: real and imaginary parts are summed on "
            "their own; reduce on the CPU (x.get()), or all_gather and combine"
        )
    seen = _SEEN_AS.get(dtype) or _WIDENED.get(dtype, dtype)
    if seen not in _CODES:
        raise TypeError(f"NCCL reduces {', '.join((*_CODES, *_SEEN_AS, *_WIDENED))}; got {dtype}")
    return NcclForm(seen, _CODES[seen], 2 if is_complex else 1, dtype in _WIDENED)


class ReducedArray:
    """``target = scale * (op over the ranks' source)``; ``target`` may be ``source`` itself.

    Arrays that must be converted are converted on ``stream``, in order with the collective, and
    belong to that stream.
    """

    def __init__(
        self, stream: Any, source: Array, target: Array, op: ReduceOp, scale: float
    ) -> None:
        self.form = _form(source.dtype, op)
        self.source, self.room = source, target
        self._stream, self._target = stream, target
        # NCCL multiplies the terms of a sum on their way, and nothing else.
        self.factor = scale if op is ReduceOp.SUM else 1.0
        self._scale = 1.0 if op is ReduceOp.SUM else scale
        self.computes = self.form.widened or self._scale != 1.0  # before or after the call

    def convert(self) -> None:
        """Convert to the type that NCCL calculates with; for before the call."""
        if self.form.widened:
            source, target = self.source, self._target
            with self._stream:
                self.source = self.room = source.astype(self.form.dtype)
                if target is not source:
                    self.room = array_module(target).empty(target.shape, self.form.dtype)

    def finish(self) -> None:
        """Convert back, and scale what NCCL cannot scale; for after the call."""
        if not self.computes:
            return
        with self._stream:
            if self.form.widened:
                self._target[...] = self.room
            scale_in_place(self._target, self._scale)


@functools.cache
def plain_form(dtype: np.dtype[Any], op: ReduceOp, scale: float) -> NcclForm | None:
    """Return the form in which NCCL reduces an array as it is; None: it has to be computed too."""
    form = _form(dtype, op)
    return None if form.widened or (op is not ReduceOp.SUM and scale != 1.0) else form


@functools.cache
def _form(dtype: np.dtype[Any], op: ReduceOp) -> NcclForm:
    return form_of(dtype.name, op)  # the name takes NumPy 2 us to put together
