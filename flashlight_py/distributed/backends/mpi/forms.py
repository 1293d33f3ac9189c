"""In which form the library itself can reduce arrays of a dtype, and how they get there and back.

What it cannot, or not so that all ranks get the same bits, has no form: ``reduction.py`` then
combines it here. Minima and maxima of floats travel as integers in the same order, because MPI's
comparison makes the result depend on the order of ranks where there is a NaN or a zero of the other
sign. 16-bit floats are summed as float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashlight_py.device import Array, is_cupy
from flashlight_py.distributed.calls.arrays import scale_in_place
from flashlight_py.distributed.constants import ReduceOp

_TYPES = {
    **{np.dtype(f"int{bits}"): f"INT{bits}_T" for bits in (8, 16, 32, 64)},
    **{np.dtype(f"uint{bits}"): f"UINT{bits}_T" for bits in (8, 16, 32, 64)},
    np.dtype("float32"): "FLOAT",
    np.dtype("float64"): "DOUBLE",
    np.dtype("longdouble"): "LONG_DOUBLE",
    np.dtype("complex64"): "C_FLOAT_COMPLEX",
    np.dtype("complex128"): "C_DOUBLE_COMPLEX",
    np.dtype("clongdouble"): "C_LONG_DOUBLE_COMPLEX",
}


_BITWISE = {ReduceOp.AND: "BAND", ReduceOp.OR: "BOR", ReduceOp.XOR: "BXOR"}


@dataclass(frozen=True)
class Form:
    """An MPI datatype and operation.

    ``encode(array)`` returns what MPI reduces: the array's own memory, or a new array.
    ``decode(carrier, out, scale)`` turns what MPI has made of it into ``out``, scaled.
    """

    type: Any
    op: Any
    encode: Callable[[Array], Array]
    decode: Callable[[Array, Array, float], None]


def form_of(mpi: Any, array: Array, op: ReduceOp) -> Form | None:
    """Return the form for reducing arrays like ``array`` by ``op``, if there is one."""
    if is_cupy(array):
        return None
    kind, extreme = array.dtype.kind, op in (ReduceOp.MIN, ReduceOp.MAX)
    if kind in "biu":
        return _integer_form(mpi, array, op)
    return _extreme_form(mpi, array, op) if extreme else _arithmetic_form(mpi, array, op)


def _integer_form(mpi: Any, array: Array, op: ReduceOp) -> Form:
    """Return integers as they are, but unsigned for sums and products, which wrap around.

    Of 8 and 16 bits some libraries (Open MPI, by AVX) make sums that saturate: they go as 32.
    """
    does, bits = getattr(mpi, _BITWISE.get(op, op.name)), array.itemsize * 8
    if op not in (ReduceOp.SUM, ReduceOp.PROD):
        same = np.dtype(np.uint8) if array.dtype.kind == "b" else array.dtype
        return Form(_type(mpi, same), does, lambda a: a.view(same), _decode_plain)
    if bits < 32:
        return Form(mpi.UINT32_T, does, lambda a: a.astype(np.uint32), _decode_narrowed)
    unsigned = np.dtype(f"uint{bits}")
    return Form(_type(mpi, unsigned), does, lambda a: a.view(unsigned), _decode_plain)


def _arithmetic_form(mpi: Any, array: Array, op: ReduceOp) -> Form | None:
    does = getattr(mpi, op.name)
    if array.itemsize == 2:
        return Form(mpi.FLOAT, does, lambda a: a.astype(np.float32), _decode_rounded)
    if array.dtype.kind == "c" and op is ReduceOp.PROD:
        return None  # the library may round a * b and b * a differently, where it fuses them
    return Form(_type(mpi, array.dtype), does, _same, _decode_plain)


def _type(mpi: Any, dtype: np.dtype[Any]) -> Any:
    return getattr(mpi, _TYPES[dtype])


def _same(array: Array) -> Array:
    return array


def _decode_plain(carrier: Array, out: Array, scale: float) -> None:
    """The carrier has the dtype of ``out``, and mostly its memory too."""
    values = carrier.view(out.dtype)
    if not np.may_share_memory(values, out):
        out[...] = values.reshape(out.shape)
    scale_in_place(out, scale)


def _decode_narrowed(carrier: Array, out: Array, scale: float) -> None:
    out[...] = carrier.astype(out.dtype).reshape(out.shape)
    scale_in_place(out, scale)


def _decode_rounded(carrier: Array, out: Array, scale: float) -> None:
    if scale != 1.0:
        carrier *= np.float32(scale)
    out[...] = carrier.reshape(out.shape)


def _extreme_form(mpi: Any, array: Array, op: ReduceOp) -> Form | None:
    bits = array.itemsize * 8
    if bits > 64:
        return None
    signed = np.dtype(f"int{bits}")
    limits = np.iinfo(signed)
    nan = limits.min if op is ReduceOp.MIN else limits.max  # a NaN wins

    def encode(array: Array) -> Array:
        keys = _mirrored(array.view(signed), bits)
        keys[np.isnan(array)] = nan
        return keys

    def decode(carrier: Array, out: Array, scale: float) -> None:
        out[...] = _mirrored(carrier, bits).view(out.dtype).reshape(out.shape)
        scale_in_place(out, scale)

    return Form(_type(mpi, signed), getattr(mpi, op.name), encode, decode)


def _mirrored(integers: Array, bits: int) -> Array:
    """Turn the bits of IEEE floats into integers of the same order; applied twice, it is undone.

    Of negative floats all bits but the sign are flipped: the larger they are, the smaller.

    Example:
        >>> floats = np.array([-2.0, -0.0, 0.0, 1.0], np.float32)
        >>> bool(np.all(np.diff(_mirrored(floats.view(np.int32), 32)) > 0))
        True
    """
    flipped: Array = integers ^ ((integers >> (bits - 1)) & np.iinfo(integers.dtype).max)
    return flipped
