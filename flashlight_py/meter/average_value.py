"""The mean of a number over time."""

from __future__ import annotations

import numpy as np

from flashlight_py.device import Array, array_module
from flashlight_py.meter.meter import Meter, State, ratio


class AverageValueMeter(Meter):
    """The weighted mean, the unbiased variance and the total weight of all values added.

    The variance takes weights as reliabilities: with V1 and V2 the sums of weights and of their
    squares, sum(w (x - mean)^2) / (V1 - V2 / V1). Equal weights give the usual n - 1.

    ``value_of`` works on sums of x and x^2, so the variance of synchronised meters loses digits
    where the mean is many times the standard deviation; ``value`` does not, since mean and
    squared deviations are updated one by one (West 1979, doi:10.1145/359146.359153).
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._weight = 0.0
        self._squared_weight = 0.0
        self._mean = 0.0
        self._deviation = 0.0

    def add(self, value: float | Array, weight: float = 1.0) -> None:
        """Add a number, or every element of an array of any shape, with ``weight`` each.

        Raises:
            ValueError: ``weight`` is negative.
        """
        if weight < 0:
            raise ValueError(f"the weight must not be negative, got {weight}")
        if getattr(value, "ndim", 0):
            self._add_array(value, weight)  # type: ignore[arg-type]  # a float has no ndim
        elif weight:
            self._add_moments(weight, weight * weight, float(value), 0.0)

    def _add_array(self, values: Array, weight: float) -> None:
        count = values.size
        if not count or not weight:
            return
        library = array_module(values)
        values = values.astype(np.float64)
        mean = float(library.mean(values))
        deviation = weight * float(library.sum((values - mean) ** 2))
        self._add_moments(weight * count, weight * weight * count, mean, deviation)

    def _add_moments(
        self, weight: float, squared_weight: float, mean: float, deviation: float
    ) -> None:
        """Merge two sets of values by their moments."""
        before = self._weight
        self._weight = before + weight
        self._squared_weight += squared_weight
        delta = mean - self._mean
        self._mean += delta * weight / self._weight
        self._deviation += deviation + delta * delta * before * weight / self._weight

    def state(self) -> State:
        """Return the sums of w, w^2, w x and w x^2."""
        total = self._weight * self._mean
        squares = self._deviation + total * self._mean
        return np.array([self._weight, self._squared_weight, total, squares])

    def value_of(self, state: State) -> tuple[float, float, float]:
        """Return (mean, variance, total weight) of ``state``, four sums with shape (4,)."""
        weight, squared_weight, total, squares = map(float, state)
        mean = ratio(total, weight)
        return _value(weight, squared_weight, mean, max(0.0, squares - mean * total))

    def value(self) -> tuple[float, float, float]:
        """Return (mean, variance, total weight); NaN for what too few values leave undefined."""
        mean = self._mean if self._weight else float("nan")
        return _value(self._weight, self._squared_weight, mean, self._deviation)


def _value(
    weight: float, squared_weight: float, mean: float, deviation: float
) -> tuple[float, float, float]:
    freedom = weight - ratio(squared_weight, weight)
    return mean, ratio(deviation, freedom if freedom > 0 else 0.0), weight
