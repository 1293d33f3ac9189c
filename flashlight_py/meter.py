"""Meters: values gathered while a model trains, alone or summed over processes."""

from __future__ import annotations

import abc
import time
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from flashlight_py.device import Array, array_module, operation

__all__ = ["Meter", "AverageValueMeter", "TimeMeter", "TopKMeter", "CountMeter", "MSEMeter"]

# Sums of float64, with shape (number of sums,).
State: TypeAlias = NDArray[np.float64]
Value_co = TypeVar("Value_co", covariant=True)


class _Valued(Protocol[Value_co]):
    """A meter as type checkers see it: its value is of the type that ``value_of`` returns."""

    def state(self) -> State: ...
    def value_of(self, state: State) -> Value_co: ...


class Meter(abc.ABC):
    """Gathers something while a model trains.

    ``state`` holds sums only: the element-wise sum of the states of several meters is the state
    of one that had seen everything. So what all processes have seen together is
    ``meter.value_of(sum of every process's meter.state())``. The meter itself is left as it is,
    and the same can be asked again at any time.
    """

    @abc.abstractmethod
    def state(self) -> State:
        """Return what was gathered, as a new float64 array of sums with shape (sums,)."""

    @abc.abstractmethod
    def value_of(self, state: State) -> Any:
        """Return the value that belongs to ``state``, a sum of states of meters made alike."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Forget everything."""

    def value(self: _Valued[Value_co]) -> Value_co:
        """Return the value of what was gathered since the last ``reset``."""
        return self.value_of(self.state())


class _Sums(Meter):
    """A meter whose sums are all that it keeps."""

    def __init__(self, number: int) -> None:
        self._sums = np.zeros(number)

    def reset(self) -> None:
        self._sums[:] = 0

    def state(self) -> State:
        """Return the sums, in the order in which ``value_of`` takes them."""
        return self._sums.copy()


def ratio(part: float, whole: float) -> float:
    """Return ``part / whole``, and NaN where there is nothing to divide by."""
    return part / whole if whole else float("nan")


class AverageValueMeter(Meter):
    """The weighted mean, the unbiased variance and the total weight of all values added.

    The variance takes weights as reliabilities: with V1 and V2 the sums of weights and of their
    squares, sum(w (x - mean)^2) / (V1 - V2 / V1). With equal weights it is the usual n - 1.

    ``value_of`` works on sums of x and x^2, so the variance of synchronised meters loses digits
    where the mean is many times the standard deviation; ``value`` does not, since mean and
    squared deviations are updated one by one (West 1979, doi:10.1145/359146.359153).
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._weight = self._squared_weight = self._mean = self._deviation = 0.0

    @operation
    def add(self, value: float | Array, weight: float = 1.0) -> None:
        """Add a number, or every element of an array of any shape, with ``weight`` each.

        Raises:
            ValueError: ``weight`` is negative.
        """
        if weight < 0:
            raise ValueError(f"the weight must not be negative, got {weight}")
        is_array = getattr(value, "ndim", 0) > 0  # torch's ``size`` is a method
        count: int = value.size if is_array else 1  # type: ignore[union-attr]
        if not count or not weight:
            return
        if is_array:
            values = value.astype(np.float64)  # type: ignore[union-attr]  # a float has no ndim
            mean = float(values.mean())
            deviation = weight * float(((values - mean) ** 2).sum())
        else:
            mean, deviation = float(value), 0.0
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


class CountMeter(_Sums):
    """One count for each of ``num`` categories.

    Raises:
        ValueError: ``num`` < 1.
    """

    def __init__(self, num: int) -> None:
        if num < 1:
            raise ValueError(f"the number of categories must be at least 1, got {num}")
        super().__init__(num)

    @operation
    def add(self, category: int, count: int = 1) -> None:
        """Add ``count`` to ``category``.

        Raises:
            IndexError: ``category`` is not in [0, number of categories).
        """
        if not 0 <= category < len(self._sums):
            raise IndexError(f"category must be in [0, {len(self._sums)}), got {category}")
        self._sums[category] += count

    def value_of(self, state: State) -> list[int]:
        """Return the count of each category in ``state``, which has shape (categories,)."""
        return [round(count) for count in state.tolist()]


class MSEMeter(_Sums):
    """The squared error of a call of ``add``, summed over its elements, averaged over the calls.

    That is flashlight's definition; add one sample per call for the mean over samples.
    """

    def __init__(self) -> None:
        super().__init__(2)

    @operation
    def add(self, output: Array, target: Array) -> None:
        """Add the sum of squared differences of two arrays of the same shape, in float64.

        Raises:
            ValueError: the shapes differ.
        """
        if output.shape != target.shape:
            raise ValueError(
                f"MSEMeter compares arrays of one shape, got {output.shape} and {target.shape}"
            )
        difference = output.astype(np.float64) - target
        self._sums += float((difference * difference).sum()), 1

    def value_of(self, state: State) -> float:
        """Return the mean over all calls, NaN without any, of the sum of errors and the calls."""
        error, calls = map(float, state)
        return ratio(error, calls)


class TimeMeter(Meter):
    """A stopwatch in seconds, which starts stopped; with ``unit`` the seconds per unit counted.

    The value of several synchronised meters is the mean of their seconds, or with ``unit`` all
    seconds over all units.
    """

    def __init__(self, unit: bool = False) -> None:
        self._unit = unit
        self.reset()

    def reset(self) -> None:
        """Stop, and forget seconds and units."""
        self._seconds = 0.0
        self._units = 0
        self._resumed: float | None = None

    def resume(self) -> None:
        """Let the time run; nothing happens if it does."""
        if self._resumed is None:
            self._resumed = time.perf_counter()

    def stop(self) -> None:
        """Halt the time; nothing happens if it is."""
        self._seconds += self._running()
        self._resumed = None

    def inc_unit(self, num: int = 1) -> None:
        """Count ``num`` more units, such as batches or samples."""
        self._units += num

    def stop_and_inc_unit(self, num: int = 1) -> None:
        """Halt the time and count ``num`` more units."""
        self.stop()
        self.inc_unit(num)

    def set(self, value: float, num: int = 1) -> None:
        """Replace what was gathered by ``value`` seconds and ``num`` units."""
        self._seconds, self._units = value, num

    def _running(self) -> float:
        return 0.0 if self._resumed is None else time.perf_counter() - self._resumed

    def state(self) -> State:
        """Return the seconds so far (also of a time that runs), the units, and 1 meter."""
        return np.array([self._seconds + self._running(), self._units, 1.0])

    def value_of(self, state: State) -> float:
        """Return the seconds, or seconds per unit (NaN before the first unit), of three sums."""
        seconds, units, meters = map(float, state)
        return ratio(seconds, units if self._unit else meters)


class TopKMeter(_Sums):
    """The share, in percent, of samples whose target is among the ``k`` highest scores.

    A target counts if fewer than ``k`` classes have a higher score than it, so ties are in its
    favour and the result depends on no order. A NaN is higher than everything, and as the
    target's own score it never counts.

    Raises:
        ValueError: ``k`` < 1.
    """

    def __init__(self, k: int) -> None:
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        super().__init__(2)
        self._k = k

    @operation
    def add(self, output: Array, target: Array) -> None:
        """Add a batch: scores of shape (batch, classes), integer targets of shape (batch,).

        Raises:
            ValueError: the shapes do not fit, there are fewer than ``k`` classes, or a target is
                no integer in [0, classes).
        """
        fits = output.ndim == 2 and target.ndim == 1 and len(output) == len(target)
        if not fits or target.dtype.kind not in "iu":
            raise ValueError(
                "TopKMeter takes scores of shape (batch, classes) and integer targets of shape "
                f"(batch,); got {output.shape} and {target.dtype} {target.shape}"
            )
        classes = output.shape[1]
        if classes < self._k:
            raise ValueError(f"the top {self._k} of {classes} classes were asked for")
        if len(target) and (int(target.min()) < 0 or int(target.max()) >= classes):
            raise ValueError(
                f"targets must be in [0, {classes}), got {int(target.min())} to {int(target.max())}"
            )
        scores = array_module(output).take_along_axis(output, target[:, None], axis=1)
        higher = (~(output <= scores)).sum(axis=1)
        self._sums += int((higher < self._k).sum()), len(target)

    def value_of(self, state: State) -> float:
        """Return the percentage, NaN without samples, of the numbers of correct ones and of all."""
        correct, total = map(float, state)
        return 100 * ratio(correct, total)
