"""Parameters of a network: initial values, memory layout, and the bounded step.

Each layer has :class:`Parameter` objects. A network gathers them in :class:`ParameterBucket`
objects, in the order in which a backward pass computes their deltas. A bucket has three arrays: all
means, all variances, and all sums of deltas over the batch. A step is therefore one kernel call,
and the sums are sent to other processes without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from flashlight_py import kernels
from flashlight_py.device import Array, array_module, is_cupy, to_device
from flashlight_py.random import generator
from flashlight_py.tagi.native import floats, native_for
from flashlight_py.tagi.states import REAL

FLOOR = np.float32(1e-5)  # replaces variances that a step would make zero or negative
METHODS = ("He", "Xavier")


class Parameter:
    """An array of independent Gaussian parameters, and sums that a backward pass computes.

    Attributes:
        mean, variance: Float32 arrays of one shape.
        mean_sum, variance_sum: Sums of deltas over the batch. A step changes the mean by ``variance
            * mean_sum`` and the variance by ``variance ** 2 * variance_sum``, both bounded.
    """

    __slots__ = ("mean", "mean_sum", "variance", "variance_sum")

    def __init__(self, mean: Array, variance: Array) -> None:
        self.mean = np.ascontiguousarray(mean, REAL)
        self.variance = np.ascontiguousarray(variance, REAL)
        self.mean_sum = np.zeros_like(self.mean)
        self.variance_sum = np.zeros_like(self.mean)

    @property
    def mean_delta(self) -> Array:
        """Change of the mean in the next step, before it is bounded; a new array."""
        return self.variance * self.mean_sum

    @property
    def variance_delta(self) -> Array:
        """Change of the variance in the next step, before it is bounded; a new array."""
        return self.variance * self.variance * self.variance_sum

    def put(self, moment: str, values: Array) -> None:
        """Set ``mean`` or ``variance`` in place from values of the same size and any shape."""
        if moment not in ("mean", "variance"):
            raise AttributeError(f"{moment} is read-only: a backward pass computes it")
        target: Array = getattr(self, moment)
        array = np.asarray(values, REAL)
        if moment == "variance" and not (array >= 0).all():
            raise ValueError(f"variances must be at least 0, got {array.min()}")
        target[...] = array_module(target).asarray(array).reshape(target.shape)


def spread(method: str, fan_in: int, fan_out: int) -> float:
    """Return the standard deviation of initial means for ``method``, "He" or "Xavier"."""
    if method not in METHODS:
        raise ValueError(f"init_method must be one of {', '.join(METHODS)}, got {method!r}")
    return math.sqrt(1 / fan_in if method == "He" else 2 / (fan_in + fan_out))


def gaussian(shape: tuple[int, ...], deviation: float, gain: float) -> Parameter:
    """Draw means with standard deviation ``deviation``; variances ``(gain * deviation) ** 2``."""
    mean = generator().standard_normal(shape, REAL) * REAL.type(deviation)
    return Parameter(mean, np.full(shape, (gain * deviation) ** 2, REAL))


Allocate = Callable[[int], Array]


def zeros_on(device: str) -> Allocate:
    """Return a function that makes flat arrays of zeros on ``device``."""
    return lambda size: to_device(np.zeros(size, REAL), device)


class ParameterBucket:
    """Parameters whose arrays are consecutive views of flat arrays.

    Attributes:
        mean, variance: Flat arrays of all parameters.
        sums: All ``mean_sum``, then all ``variance_sum``, then ``extra`` elements, in which
            data-parallel training stores the number of samples.
    """

    def __init__(
        self, parameters: Sequence[Parameter], allocate: Allocate, sums: Allocate | None = None,
        extra: int = 0,
    ) -> None:  # fmt: skip
        self.parameters = tuple(parameters)
        self.size = sum(int(parameter.mean.size) for parameter in parameters)
        self.mean, self.variance = allocate(self.size), allocate(self.size)
        self.sums = (sums or allocate)(2 * self.size + extra)
        self.extra = self.sums[2 * self.size :]
        start = 0
        for parameter in parameters:
            end, shape = start + int(parameter.mean.size), parameter.mean.shape
            mean, variance = parameter.mean, parameter.variance
            parameter.mean = self.mean[start:end].reshape(shape)
            parameter.variance = self.variance[start:end].reshape(shape)
            parameter.put("mean", to_device(mean, "cpu"))
            parameter.put("variance", to_device(variance, "cpu"))
            parameter.mean_sum = self.sums[start:end].reshape(shape)
            parameter.variance_sum = self.sums[self.size + start : self.size + end].reshape(shape)
            start = end
        self._homes = [parameter.mean for parameter in parameters]
        # Views of the sums. Pointers to the four arrays are stored, because making pointers takes
        # longer than a small step.
        of_means, of_variances = self.sums[: self.size], self.sums[self.size : 2 * self.size]
        self._arrays = (self.mean, self.variance, of_means, of_variances)
        self._native = native_for(self.mean)
        if self._native is not None:
            self._pointers = [floats(self._native, array) for array in self._arrays]

    def step(self, cap: float) -> None:
        """Change means and variances in place, each by at most ``sqrt(variance) / cap``.

        With d = ``mean_sum``, e = ``variance_sum`` and the variance s, the mean changes by ``clip(s
        d, +-sqrt(s) / cap)`` and the variance by ``clip(s^2 e, +-sqrt(s) / cap)``. A variance that
        would not be positive becomes 1e-5. Both bounds are equal although their units differ:
        pytagi's published accuracies were measured with these bounds.

        Raises:
            RuntimeError: If the parameters were moved to other buckets.
        """
        pairs = zip(self.parameters, self._homes, strict=True)
        if any(parameter.mean is not home for parameter, home in pairs):
            raise RuntimeError(
                "step: another network was created with the same layers and owns their parameters. "
                "Step that network, or create each network with new layers"
            )
        if self._native is not None:
            self._native.lib.fl_tagi_step(*self._pointers, self.size, 1 / cap)
        elif is_cupy(self.mean):
            kernels.capped_step(*self._arrays, 1 / cap)
        else:
            step_in_numpy(*self._arrays, 1 / cap)


def step_in_numpy(
    mean: Array, variance: Array, mean_sum: Array, variance_sum: Array, inverse_cap: float
) -> None:
    """Take the step of :meth:`ParameterBucket.step` with the kernels' order of operations."""
    bound = np.sqrt(variance) * REAL.type(inverse_cap)
    d = variance * mean_sum
    e = variance * variance * variance_sum
    mean += np.clip(d, -bound, bound)
    variance += np.clip(e, -bound, bound)
    variance[~(variance > 0)] = FLOOR  # also NaN


def cap_factor(batch: int) -> float:
    """Return the divisor ``cap`` of a step's bound for ``batch`` samples, as in pytagi."""
    if batch <= 1:
        return 0.1
    return 2.0 if batch < 256 else 3.0
