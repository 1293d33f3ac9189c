"""Sending arrays in half precision."""

from __future__ import annotations

import numpy as np

from flashlight_py.device import Array, is_cupy
from flashlight_py.distributed.hooks.cast import CastCompression
from flashlight_py.distributed.hooks.half import LARGEST, from_half, to_half

__all__ = ["Float16Compression"]


class Float16Compression(CastCompression):
    """Sends arrays as float16: half the bytes of float32, a quarter of float64.

    Each value is rounded to 11 bits before it is sent (a relative error of 2**-11), summed over
    the ranks and scaled in float32, and rounded so once more. Nothing is scaled before. What is
    finite and too large for float16 is sent as +-65504, its largest number, so that one outlier
    cannot make parameters infinite; infinities and NaN are sent as they are, for whoever looks for
    them. Below 6e-5 digits are lost, below 3e-8 everything: for such gradients, take
    ``Bfloat16Compression`` or multiply the loss by a constant.

    CuPy arrays are summed by NCCL, which scales and sums in its own way.

    Example:
        >>> gradient = np.array([1 / 3, 1e6, -np.inf])
        >>> reducer = fl.CoalescingReducer(scale=1.0, hook=fl.Float16Compression())
        >>> reducer.add(gradient)
        >>> reducer.finalize()
        >>> gradient.tolist()
        [0.333251953125, 65504.0, -inf]
    """

    def __init__(self) -> None:
        super().__init__(np.dtype(np.float16), LARGEST)

    def _narrow(self, flat: Array) -> Array:
        return super()._narrow(flat) if is_cupy(flat) else to_half(flat)

    def _widen(self, narrow: Array, out: Array) -> None:
        if is_cupy(narrow):
            super()._widen(narrow, out)
        else:
            from_half(narrow, out)
