"""Where the parameters of a network lie: flat, in the order in which a backward pass ends.

A layer knows its own :class:`Parameter` objects. A network gathers those of all layers into
:class:`Bucket` objects: one array of all means, one of all variances, one of what a backward pass
has added up for both. So a step is one call of a kernel, and what other processes add travels as it
lies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from flashlight_py.device import Array, array_module, to_device
from flashlight_py.tagi.capped_step import Step
from flashlight_py.tagi.states import REAL


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
        """Set ``mean`` or ``variance`` in place from as many values, of any shape and dtype.

        Raises:
            AttributeError: ``which`` is a delta, which follows from a backward pass.
            ValueError: a variance is negative or NaN. Nothing was changed.
        """
        if which not in ("mean", "variance"):
            raise AttributeError(f"{which} follows from the sums of a backward pass")
        home: Array = getattr(self, which)
        found = np.asarray(values, REAL)
        if which == "variance" and not (found >= 0).all():
            raise ValueError(f"variances are not negative, got {found.min()}")
        home[...] = array_module(home).asarray(found).reshape(home.shape)


Allocate = Callable[[int], Array]


def on_device(device: str) -> Allocate:
    """Return what makes flat arrays of zeros on ``device``.

    Raises:
        ValueError, BackendUnavailableError: as ``device.to_device``.
    """
    return lambda size: to_device(np.zeros(size, REAL), device)


class Bucket:
    """Parameters whose arrays are parts of flat ones, one after the other.

    Attributes:
        mean, variance: of all of them, flat.
        sums: those of the means, then those of the variances, then ``extra`` elements that
            whoever adds them over processes may use.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        home: Allocate,
        sums: Allocate | None = None,
        extra: int = 0,
    ) -> None:
        self.parameters = tuple(parameters)
        self.size = sum(int(each.mean.size) for each in parameters)
        self.mean, self.variance = home(self.size), home(self.size)
        self.sums = (sums or home)(2 * self.size + extra)
        self.extra = self.sums[2 * self.size :]
        start = 0
        for each in parameters:
            end = start + int(each.mean.size)
            shape = each.mean.shape
            mean, variance = each.mean, each.variance
            each.mean = self.mean[start:end].reshape(shape)
            each.variance = self.variance[start:end].reshape(shape)
            each.put("mean", to_device(mean, "cpu"))
            each.put("variance", to_device(variance, "cpu"))
            each.mean_sum = self.sums[start:end].reshape(shape)
            each.variance_sum = self.sums[self.size + start : self.size + end].reshape(shape)
            start = end
        self._homes = [each.mean for each in parameters]
        self._step = Step(
            self.mean, self.variance, self.sums[: self.size], self.sums[self.size : 2 * self.size]
        )

    def step(self, cap: float) -> None:
        """Change means and variances in place, each by at most ``sqrt(variance) / cap``.

        Raises:
            RuntimeError: parameters have been moved to other buckets since.
        """
        if any(
            each.mean is not home for each, home in zip(self.parameters, self._homes, strict=True)
        ):
            raise RuntimeError(
                "step: another network was made of the same layers since, and their parameters lie "
                "in its memory now; step that one, or make each network of layers of its own"
            )
        self._step(cap)
