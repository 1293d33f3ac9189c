"""The step of a network: innovations of means and variances, bounded, applied in place.

With the sums d and e of a backward pass, the variance s and the cap factor c, an element changes
by ``clip(s d, +-sqrt(s) / c)`` in its mean and by ``clip(s^2 e, +-sqrt(s) / c)`` in its variance,
which becomes 1e-5 where it would not be positive. That both have the same bound has no reason in
units; it is what pytagi does, and what its accuracies were measured with.
"""

from __future__ import annotations

import numpy as np

from flashlight_py import kernels
from flashlight_py.device import Array, is_cupy
from flashlight_py.tagi.native import native
from flashlight_py.tagi.states import REAL

FLOOR = np.float32(1e-5)


def cap_factor(batch: int) -> float:
    """Return pytagi's bound for a batch of so many samples: the larger, the smaller the steps."""
    if batch <= 1:
        return 0.1
    return 2.0 if batch < 256 else 3.0


class Step:
    """The step of four flat arrays of one size: means, variances, and the sums for each.

    It keeps what native code is called with: looking at an array takes longer than a small step.
    """

    def __init__(self, mean: Array, variance: Array, mean_sum: Array, variance_sum: Array) -> None:
        self._arrays = (mean, variance, mean_sum, variance_sum)
        self._native = None if is_cupy(mean) else native()
        if self._native is not None:
            from_buffer = self._native.ffi.from_buffer
            self._pointers = [from_buffer("float[]", array) for array in self._arrays]

    def __call__(self, cap: float) -> None:
        """Change means and variances in place."""
        if self._native is not None:
            size = self._arrays[0].size
            self._native.lib.fl_tagi_step(*self._pointers, size, 1 / cap)
        elif is_cupy(self._arrays[0]):
            kernels.capped_step(*self._arrays, 1 / cap)
        else:
            step_in_numpy(*self._arrays, 1 / cap)


def step_in_numpy(
    mean: Array, variance: Array, mean_sum: Array, variance_sum: Array, inverse_cap: float
) -> None:
    """Do what the kernels do, in the same order of operations."""
    bound = np.sqrt(variance) * REAL.type(inverse_cap)
    d = variance * mean_sum
    e = variance * variance * variance_sum
    mean += np.clip(d, -bound, bound)
    variance += np.clip(e, -bound, bound)
    variance[~(variance > 0)] = FLOOR  # what is not a number, too
