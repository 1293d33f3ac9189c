"""Arrays as MPI takes them: bytes in a row, in pieces that its 32-bit counts can tell."""

from __future__ import annotations

import numpy as np

from flashlight_py.device import Array, array_module, is_cupy

__all__ = ["as_bytes", "chunks", "largest", "settle"]

# The largest count of MPI-3's functions. MPI-4 has larger ones, not every library has MPI-4, and
# pieces of 2 GB cost nothing.
_LARGEST = 2**31 - 1


def largest() -> int:
    """Return how many elements or bytes one MPI call may name."""
    return _LARGEST


def as_bytes(array: Array) -> Array:
    """Return the memory of ``array``, which is contiguous, as bytes in a row."""
    flat: Array = array.reshape(-1).view(np.uint8)
    return flat


def chunks(flat: Array) -> list[Array]:
    """Cut ``flat`` into pieces that one MPI call each can move; an empty array is one piece."""
    step = largest()
    return [flat[start : start + step] for start in range(0, max(flat.size, 1), step)]


def settle(array: Array) -> None:
    """Wait until ``array``, if it is on a GPU, holds what the current stream computes."""
    if is_cupy(array):
        array_module(array).cuda.get_current_stream().synchronize()
