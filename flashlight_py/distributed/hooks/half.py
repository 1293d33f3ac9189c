"""NumPy arrays to float16 and back, by their bits.

NumPy's own casts take some 100 ns for each number that is small in float16 (below 6e-5, where most
gradients are), as it sets a floating-point flag for it, and 3 ns for the others; these take 3 to 5.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import DTypeLike, NDArray

from flashlight_py.device import Array

__all__ = ["LARGEST", "from_half", "to_half"]

LARGEST = 65504.0
# Elements of a block that stays in a cache while it is worked on.
_BLOCK = 1 << 14

_MAGNITUDE = np.uint32(0x7FFF_FFFF)
_SMALLEST_NORMAL = np.uint32(0x3880_0000)  # 2**-14, as float32
_HALF = np.uint32(0x3F00_0000)  # 0.5, whose last place is 2**-24: that of small float16
_REBIAS = np.uint32((127 - 15) << 23)  # between the exponents of both


def to_half(flat: Array) -> NDArray[np.float16]:
    """Return an array of one dimension, float32 or float64, rounded to the nearest float16.

    Ties go to even; float64 is rounded to float32 before. What is finite and too large becomes
    the largest number, infinities and NaN stay.
    """
    half = np.empty(flat.shape, np.float16)
    bits = half.view(np.uint16)
    with np.errstate(invalid="ignore", under="ignore"):
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
    # Adding 0.5 leaves in the last places what a small float16 consists of, rounded.
    small = (magnitude.view(np.float32) + np.float32(0.5)).view(np.uint32) - _HALF
    is_small = magnitude < _SMALLEST_NORMAL
    # Half of the last place less 1, and 1 if that place is odd: to nearest, ties to even.
    magnitude += (magnitude >> np.uint32(13)) & np.uint32(1)
    magnitude += np.uint32(0xFFF)
    magnitude -= _REBIAS
    magnitude >>= np.uint32(13)
    rounded: NDArray[np.uint32] = np.where(is_small, small, magnitude)
    return rounded | (bits >> np.uint32(16)) & np.uint32(0x8000)


def from_half(half: NDArray[np.float16], out: Array) -> None:
    """Write the numbers of ``half`` into ``out``, of the same shape, float32 or float64."""
    np.take(_numbers(out.dtype), half.view(np.uint16), out=out, mode="clip")


@functools.cache
def _numbers(dtype: DTypeLike) -> Array:
    """Return what each of the 65536 bit patterns stands for."""
    return np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(dtype)
