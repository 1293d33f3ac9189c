"""Sums and counts of float16, which counts no further than 2,048 and ends at 65,504.

What adds up many elements, or divides by how many there are, does so in float32 and rounds once.
"""

from __future__ import annotations

import numpy as np

from flashlight_py.device import Array

_FLOAT16 = "e"  # NumPy's letter; comparing dtypes takes longer, and steps are short


def widened(array: Array) -> Array:
    """Return a float16 array as float32, and any other as it is."""
    return array.astype(np.float32) if array.dtype.char == _FLOAT16 else array


def narrowed(result: Array, like: Array) -> Array:
    """Return ``result`` as float16 where ``like`` is, else as it is."""
    return result.astype(like.dtype) if like.dtype.char == _FLOAT16 else result


def total(array: Array, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> Array:
    """Return the sum over ``axis``: that of float16 as float32, to be cast by the caller."""
    wide = np.float32 if array.dtype.char == _FLOAT16 else None
    found: Array = array.sum(axis=axis, keepdims=keepdims, dtype=wide)
    return found
