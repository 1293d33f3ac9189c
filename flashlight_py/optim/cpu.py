"""The native kernels of optimizers, and the sum of the squares of a gradient."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from flashlight_py import _native
from flashlight_py.device import Array, is_cupy


@functools.cache
def native() -> Any | None:
    """Return the module of the kernels, or None, with a warning, where it is missing."""
    return _native.optional("optim", "optimizers step in NumPy, some ten times slower")


BLOCK = 65536  # elements


def sum_of_squares(grad: Array) -> float:
    """Return the sum of the squares of all elements, in float64. Blocks until it is computed.

    In blocks of 65,536 elements, in which element ``i`` is added to sum ``i % 16``, in order; at
    last the 16 sums are added, one after the other. So NumPy arrays have the same sum everywhere.
    """
    if is_cupy(grad):
        wide = grad.astype(np.float64).reshape(-1)
        return float(wide.dot(wide))
    module = native()
    if module is not None and (sum_ := module.sum_of_squares(grad)) is not None:
        return float(sum_)
    return reference_sum(grad)


def sums_of_squares(grad: Array, mine: slice = slice(None)) -> list[float]:
    """Return the sum of squares of each block of 65,536 elements; of those in ``mine`` alone.

    Added up in order they are the same whoever has computed which. An array on a GPU is one block.
    """
    if is_cupy(grad):
        return [sum_of_squares(grad)]
    flat = grad.reshape(-1)
    starts = range(0, flat.size, BLOCK)[mine]
    return [sum_of_squares(flat[start : start + BLOCK]) for start in starts]


def reference_sum(grad: Array) -> float:
    """Return the sum of squares in the words of NumPy, to the bit that of csrc/optim."""
    flat, sums = grad.reshape(-1), np.zeros(16)
    for start in range(0, flat.size, BLOCK):
        squares = np.zeros((min(BLOCK, flat.size - start) + 15) // 16 * 16)
        block = flat[start : start + BLOCK]
        np.multiply(block, block, out=squares[: block.size], dtype=np.float64)
        sums += np.add.reduce(squares.reshape(-1, 16), axis=0)
    return float(np.add.accumulate(sums)[-1])
