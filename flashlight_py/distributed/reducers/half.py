"""Compression of arrays to 16 bits per number: float16 and bfloat16.

NumPy casts a number to float16 in 3 ns. If the number is below 6e-5, like most gradients, the cast
takes 100 ns, because it sets a floating-point flag. The casts here work on bits and take 3 to 5 ns.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from flashlight_py.device import Array, array_module, is_cupy
from flashlight_py.distributed.reducers.hook import Bucket, Compression
from flashlight_py.distributed.work import Then, Work

LARGEST = 65504.0
# Number of elements that are processed together, so that they stay in a cache.
_BLOCK = 1 << 14

_MAGNITUDE = np.uint32(0x7FFF_FFFF)
_SMALLEST_NORMAL = np.uint32(0x3880_0000)  # 2**-14, as float32
_HALF = np.uint32(0x3F00_0000)  # 0.5 as float32: the value of its last bit is 2**-24
_REBIAS = np.uint32((127 - 15) << 23)  # difference of the exponent biases


class CastCompression(Compression):
    """A hook that casts to ``dtype`` (16 bits), sums over the ranks, and casts back."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        super().__init__()
        self._dtype = dtype
        self._infinity = int(np.array(np.inf).astype(dtype).view(np.uint16))

    def _start(self, bucket: Bucket) -> Work:
        narrow = self._narrow(bucket.flat)
        self._count(bucket, narrow)
        return Then(bucket.all_reduce(narrow), lambda _: self._widen(narrow, bucket.flat))

    def _narrow(self, flat: Array) -> Array:
        """Round to 16 bits. Finite numbers stay finite. Infinities and NaN do not change."""
        if self._dtype == np.float16 and not is_cupy(flat):
            return to_half(flat)
        with np.errstate(all="ignore"):
            narrow: Array = flat.astype(self._dtype)
        bits = narrow.view(np.uint16)
        overflowed = bits & 0x7FFF == self._infinity  # isinf takes 20 times as long
        if overflowed.any():
            bits[overflowed & array_module(flat).isfinite(flat)] -= 1  # largest finite number
        return narrow

    def _widen(self, narrow: Array, out: Array) -> None:
        if self._dtype == np.float16 and not is_cupy(narrow):
            from_half(narrow, out)
        else:
            out[...] = narrow


class Float16Compression(CastCompression):
    """Sends arrays as float16: half the bytes of float32, a quarter of float64.

    Each value is rounded to 11 bits (a relative error of 2**-11), and sent. The ranks sum and scale
    in float32, and round the result once more. A finite number that is too large for float16 is
    sent as +-65504, the largest float16, so that one outlier cannot make parameters infinite.
    Infinities and NaN are sent unchanged. Numbers below 6e-5 lose digits, and numbers below 3e-8
    become 0. For such gradients, use ``Bfloat16Compression`` or multiply the loss by a constant.

    CuPy arrays are summed and scaled by NCCL, which rounds in its own way.

    Example:
        >>> gradient = np.array([1 / 3, 1e6, -np.inf])
        >>> reducer = fl.CoalescingReducer(scale=1.0, hook=fl.Float16Compression())
        >>> reducer.add(gradient)
        >>> reducer.finalize()
        >>> gradient.tolist()
        [0.333251953125, 65504.0, -inf]
    """

    def __init__(self) -> None:
        super().__init__(np.dtype(np.float16))


class Bfloat16Compression(CastCompression):
    """Sends arrays as bfloat16: half the bytes of float32, a quarter of float64.

    Each value is rounded to 8 bits (a relative error of 2**-8), and sent. The ranks sum and scale
    in float32, and round the result once more. The range is that of float32: float64 numbers beyond
    3.4e38 are sent as the largest number. Infinities and NaN are sent unchanged. Needs ml_dtypes,
    and for CuPy arrays a CuPy with bfloat16.

    Raises:
        ImportError: If ml_dtypes is not installed.
    """

    def __init__(self) -> None:
        try:
            from ml_dtypes import bfloat16
        except ImportError as error:
            raise ImportError(
                f"Bfloat16Compression needs ml_dtypes, which cannot be imported ({error}). "
                "Install it with: pip install 'flashlight-py[bfloat16]', or use Float16Compression"
            ) from error
        super().__init__(np.dtype(bfloat16))

    def _narrow(self, flat: Array) -> Array:
        try:
            return super()._narrow(flat)
        except (TypeError, ValueError) as error:
            if not is_cupy(flat):
                raise
            raise TypeError(
                f"Bfloat16Compression: this CuPy has no bfloat16 ({error}). Use Float16Compression"
            ) from error


def to_half(flat: Array) -> NDArray[np.float16]:
    """Return a one-dimensional array (float32 or float64) rounded to the nearest float16.

    Ties round to even. Float64 is rounded to float32 first. A finite number that is too large
    becomes the largest float16. Infinities and NaN do not change.
    """
    half = np.empty(flat.shape, np.float16)
    bits = half.view(np.uint16)
    with np.errstate(all="ignore"):
        for start in range(0, flat.size, _BLOCK):
            block = flat[start : start + _BLOCK]
            bits[start : start + _BLOCK] = _half_bits(block)
            finite = np.isfinite(block)
            if not finite.all():
                half[start : start + _BLOCK][~finite] = block[~finite]
    return half


def _half_bits(block: Array) -> NDArray[np.uint32]:
    bits = np.clip(block, -LARGEST, LARGEST).astype(np.float32).view(np.uint32)
    magnitude = bits & _MAGNITUDE
    # Below 2**-14, float16 numbers are multiples of 2**-24. Adding 0.5 rounds to such a multiple.
    small = (magnitude.view(np.float32) + np.float32(0.5)).view(np.uint32) - _HALF
    is_small = magnitude < _SMALLEST_NORMAL
    # Round to 11 bits: to the nearest number, and ties to even.
    magnitude += (magnitude >> np.uint32(13)) & np.uint32(1)
    magnitude += np.uint32(0xFFF)
    magnitude -= _REBIAS
    magnitude >>= np.uint32(13)
    rounded: NDArray[np.uint32] = np.where(is_small, small, magnitude)
    return rounded | (bits >> np.uint32(16)) & np.uint32(0x8000)


def from_half(half: NDArray[np.float16], out: Array) -> None:
    np.take(_numbers(out.dtype), half.view(np.uint16), out=out, mode="clip")


@functools.cache
def _numbers(dtype: DTypeLike) -> Array:
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(dtype)
