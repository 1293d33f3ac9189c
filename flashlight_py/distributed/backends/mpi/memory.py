"""Arrays as MPI takes them: bytes in a row, in pieces that its 32-bit counts can express."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from flashlight_py.device import Array, array_module, is_cupy

# The largest count of MPI-3's functions. MPI-4 has larger ones, not every library has MPI-4, and
# pieces of 2 GB cost nothing.
_LARGEST_BYTES = 2**31 - 1


def largest() -> int:
    """Return how many bytes one MPI call may move."""
    return _LARGEST_BYTES


def chunks(flat: Array) -> list[Array]:
    """Cut ``flat`` into pieces that one MPI call each can move; an empty array is one piece."""
    step = max(1, largest() // flat.itemsize)
    return [flat[start : start + step] for start in range(0, max(flat.size, 1), step)]


def settle(array: Array) -> None:
    """Wait until ``array``, if it is on a GPU, holds what the current stream computes."""
    if is_cupy(array):
        array_module(array).cuda.get_current_stream().synchronize()


def on_device(array: Array | None, steps: Generator[None, None, Any]) -> Generator[None, None, Any]:
    """Return ``steps``, each taken with the GPU of ``array``, if it is on one, as the current one.

    Whichever thread takes a step: MPI and CuPy both go by the thread's current device.
    """
    return steps if array is None or not is_cupy(array) else _each_on_device(array, steps)


def _each_on_device(array: Any, steps: Generator[None, None, Any]) -> Generator[None, None, Any]:
    device = array_module(array).cuda.Device(array.device.id)
    try:
        while True:
            with device:
                try:
                    next(steps)
                except StopIteration as end:
                    return end.value
            yield
    finally:
        steps.close()
