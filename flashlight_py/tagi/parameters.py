"""The parameters of a network: how they begin, where they lie, and their bounded step.

A layer knows its own :class:`Parameter` objects. A network gathers those of all layers into
:class:`ParameterBucket` objects, in the order in which a backward pass ends: one array of all
means, one of all variances, one of the sums that a backward pass has made for both. So a step is
one call of a kernel, and sums of other processes travel as they lie.
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

FLOOR = np.float32(1e-5)  # of variances that a step would not leave positive
METHODS = ("He", "Xavier")


class Parameter:
    """An array of independent Gaussian parameters, and the sums of the last backward pass.

    Attributes:
        mean, variance: any shape, float32.
        mean_sum: what the pass adds up for the mean, over the batch. Times ``variance`` it is the
            innovation of the mean.
        variance_sum: the same for the variance: times ``variance ** 2``.
    """

    __slots__ = ("mean", "mean_sum", "variance", "variance_sum")

    def __init__(self, mean: Array, variance: Array) -> None:
        self.mean = np.ascontiguousarray(mean, REAL)
        self.variance = np.ascontiguousarray(variance, REAL)
        self.mean_sum = np.zeros_like(self.mean)
        self.variance_sum = np.zeros_like(self.mean)

    @property
    def mean_delta(self) -> Array:
        """The innovation of the mean in the next step, before it is bounded; a new array."""
        return self.variance * self.mean_sum

    @property
    def variance_delta(self) -> Array:
        """The innovation of the variance in the next step, before it is bounded; a new array."""
        return self.variance * self.variance * self.variance_sum

    def put(self, which: str, values: Array) -> None:
        """Set ``mean`` or ``variance`` in place from as many values, of any shape and dtype."""
        if which not in ("mean", "variance"):
            raise AttributeError(f"{which} follows from the sums of a backward pass")
        home: Array = getattr(self, which)
        found = np.asarray(values, REAL)
        if which == "variance" and not (found >= 0).all():
            raise ValueError(f"variances are not negative, got {found.min()}")
        home[...] = array_module(home).asarray(found).reshape(home.shape)


def spread(method: str, fan_in: int, fan_out: int) -> float:
    """Return the standard deviation of the means: ``sqrt(1 / fan_in)`` by He, ``sqrt(2 / (fan_in +
    fan_out))`` by Xavier.
    """
    if method not in METHODS:
        raise ValueError(f"init_method must be one of {', '.join(METHODS)}, got {method!r}")
    return math.sqrt(1 / fan_in if method == "He" else 2 / (fan_in + fan_out))


def gaussian(shape: tuple[int, ...], deviation: float, gain: float) -> Parameter:
    """Draw means from N(0, ``deviation``); the variances are ``(gain * deviation) ** 2``."""
    mean = generator().standard_normal(shape, REAL) * REAL.type(deviation)
    return Parameter(mean, np.full(shape, (gain * deviation) ** 2, REAL))


Allocate = Callable[[int], Array]


def on_device(device: str) -> Allocate:
    """Return a function that makes flat arrays of zeros on ``device``."""
    return lambda size: to_device(np.zeros(size, REAL), device)


class ParameterBucket:
    """Parameters whose arrays are parts of flat ones, one after the other.

    Attributes:
        mean, variance: of all of them, flat.
        sums: those of the means, then those of the variances, then ``extra`` elements that
            whoever adds them over processes may use.
    """

    def __init__(
        self, parameters: Sequence[Parameter], home: Allocate, sums: Allocate | None = None,
        extra: int = 0,
    ) -> None:  # fmt: skip
        self.parameters = tuple(parameters)
        self.size = sum(int(each.mean.size) for each in parameters)
        self.mean, self.variance = home(self.size), home(self.size)
        self.sums = (sums or home)(2 * self.size + extra)
        self.extra = self.sums[2 * self.size :]
        start = 0
        for each in parameters:
            end, shape = start + int(each.mean.size), each.mean.shape
            mean, variance = each.mean, each.variance
            each.mean = self.mean[start:end].reshape(shape)
            each.variance = self.variance[start:end].reshape(shape)
            each.put("mean", to_device(mean, "cpu"))
            each.put("variance", to_device(variance, "cpu"))
            each.mean_sum = self.sums[start:end].reshape(shape)
            each.variance_sum = self.sums[self.size + start : self.size + end].reshape(shape)
            start = end
        self._homes = [each.mean for each in parameters]
        # Means, variances, and the sums for each; looking at an array for native code takes longer
        # than a small step, so pointers are kept.
        of_means, of_variances = self.sums[: self.size], self.sums[self.size : 2 * self.size]
        self._arrays = (self.mean, self.variance, of_means, of_variances)
        self._native = native_for(self.mean)
        if self._native is not None:
            self._pointers = [floats(self._native, array) for array in self._arrays]

    def step(self, cap: float) -> None:
        """Change means and variances in place, each by at most ``sqrt(variance) / cap``.

        With the sums d and e of a backward pass and the variance s, an element changes by ``clip(s
        d, +-sqrt(s) / cap)`` in its mean and by ``clip(s^2 e, +-sqrt(s) / cap)`` in its variance,
        which becomes 1e-5 where it would not be positive. That both have the same bound has no
        reason in units; it is what pytagi does, and what its accuracies were measured with.

        Raises:
            RuntimeError: parameters have been moved to other buckets since.
        """
        pairs = zip(self.parameters, self._homes, strict=True)
        if any(each.mean is not home for each, home in pairs):
            raise RuntimeError(
                "step: another network was made of the same layers since, and their parameters lie "
                "in its memory now; step that one, or make each network of layers of its own"
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
    """Do what the kernels do, in the same order of operations."""
    bound = np.sqrt(variance) * REAL.type(inverse_cap)
    d = variance * mean_sum
    e = variance * variance * variance_sum
    mean += np.clip(d, -bound, bound)
    variance += np.clip(e, -bound, bound)
    variance[~(variance > 0)] = FLOOR  # what is not a number, too


def cap_factor(batch: int) -> float:
    """Return pytagi's bound for a batch of so many samples: the larger, the smaller the steps."""
    if batch <= 1:
        return 0.1
    return 2.0 if batch < 256 else 3.0
