"""Meters: statistics of a training loop, for one process or over several processes."""

import abc
import math
import time
from typing import Any, Generic, SupportsFloat, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from flashlight_py import kernels
from flashlight_py.device import Array, array_module, is_cupy, to_device
from flashlight_py.structure import Structured

__all__ = ["Meter", "AverageValueMeter", "TimeMeter", "TopKMeter", "CountMeter", "MSEMeter"]

# Sums in float64, of shape (number of sums,).
State: TypeAlias = NDArray[np.float64]
Value = TypeVar("Value")
# Common types of values other than CuPy arrays. A lookup takes a quarter of ``is_cupy``'s time.
_HOST_TYPES = frozenset({int, float, np.ndarray, *np.sctypeDict.values()})


class Meter(Structured, abc.ABC, Generic[Value]):
    """Collects a statistic during training.

    ``state()`` returns only sums. So the element-wise sum of the states of several meters is the
    state of a meter over all their data. ``meter.value_of(sum of every process's meter.state())``
    is the value over all processes. ``value_of`` does not change ``meter``.
    """

    @abc.abstractmethod
    def state(self) -> State:
        """Return the collected sums as a new float64 array of shape (sums,)."""

    @abc.abstractmethod
    def value_of(self, state: State) -> Value:
        """Return the value of ``state``, a sum of states of meters with equal settings."""

    @abc.abstractmethod
    def reset(self) -> None:
        """Discard all collected data."""

    def value(self) -> Value:
        """Return the value of the data since the last ``reset``."""
        return self.value_of(self.state())


class _Sums(Meter[Value]):
    _device_sums: Array | None = None  # CUDA graphs use its address, which must not change

    def __init__(self, number: int) -> None:
        self._sums: State = np.zeros(number)

    def reset(self) -> None:
        self._sums[:] = 0
        if self._device_sums is not None:
            self._device_sums[:] = 0

    def state(self) -> State:
        return self._all_sums().copy()

    def __getstate__(self) -> dict[str, Any]:
        attributes = {name: value for name, value in vars(self).items() if name != "_device_sums"}
        return attributes | {"_sums": self._all_sums()}

    def _sums_on_device(self, value: Any) -> Array:
        """Return the sums on the device of the CuPy array ``value``, for the caller to change."""
        sums = self._device_sums
        if sums is None or sums.device != value.device:
            self._sums[:] = self._all_sums()
            zeros = np.zeros_like(self._sums)
            sums = self._device_sums = to_device(zeros, f"cuda:{value.device.id}")
        return sums

    def _all_sums(self) -> State:
        if self._device_sums is None:
            return self._sums
        return self._merged(to_device(self._device_sums, "cpu"))

    def _merged(self, sums: State) -> State:
        return self._sums + sums

    def _add(self, *terms: Any) -> None:
        sums = self._sums_on_device(terms[0]) if is_cupy(terms[0]) else self._sums
        for index, term in enumerate(terms):
            sums[index] = sums[index] + term


def ratio(part: float, total: float) -> float:
    """Return ``part / total``, or NaN if ``total`` is 0."""
    return part / total if total else float("nan")


class AverageValueMeter(_Sums[tuple[float, float, float]]):
    """Weighted mean, unbiased variance and total weight of all added values.

    A weight says how reliable a value is. Let V1 be the sum of the weights and V2 the sum of the
    squared weights. The variance is sum(w (x - mean)^2) / (V1 - V2 / V1). If all weights are
    1, this divisor is n - 1.

    ``value`` uses a mean and squared deviations that are updated value by value (West 1979,
    doi:10.1145/359146.359153). ``value_of`` uses sums of x and x^2, so the variance over several
    processes loses digits if the mean is much larger than the standard deviation.
    """

    def __init__(self) -> None:
        super().__init__(4)  # sums of weights and squared weights, mean, squared deviations
        self.reset()

    def add(self, value: SupportsFloat | Array, weight: float = 1.0) -> None:
        """Add a number, or every element of an array of any shape, each with ``weight``.

        A Variable counts as its array. Adding a CuPy array does not wait for the device.

        Raises:
            ValueError: If ``weight`` is negative.
        """
        if weight <= 0:
            if weight < 0:
                raise ValueError(f"AverageValueMeter.add: weight must be at least 0, got {weight}")
            return
        value = getattr(value, "array", value)  # the array of a Variable
        on_device = type(value) not in _HOST_TYPES and is_cupy(value)
        is_array = getattr(value, "ndim", 0) > 0  # torch's ``size`` is a method, so use ndim
        count: int = value.size if is_array else 1  # type: ignore[union-attr]
        if not count:
            return
        mean: Any = value
        squares: Any = 0.0
        if is_array and (count > 1 or not on_device):
            values = value.astype(np.float64)  # type: ignore[union-attr]  # a float has no ndim
            mean = values.mean()
            squares = ((values - mean) ** 2).sum()
        if on_device:
            kernels.add_moments(self._sums_on_device(value), mean, squares, weight, count)
            return
        sums: Any = self._sums
        previous = sums
        if type(sums) is np.ndarray:  # Python numbers are three times as fast as NumPy scalars
            previous, mean = sums.tolist(), float(mean)
            squares = float(squares) if is_array else squares
        # Combine mean and squared deviations of the previous values and the new values.
        weight_before, added_weight, delta = previous[0], weight * count, mean - previous[2]
        total = weight_before + added_weight
        spread = weight * squares + delta * delta * weight_before * added_weight / total
        sums[3] = previous[3] + spread
        sums[2] = previous[2] + delta * added_weight / total
        sums[1] = previous[1] + weight * weight * count
        sums[0] = total

    def state(self) -> State:
        """Return the sums of w, w^2, w x and w x^2."""
        weight, squared_weight, mean, deviation = self._all_sums().tolist()
        total = weight * mean
        return np.array([weight, squared_weight, total, deviation + total * mean])

    def _merged(self, sums: State) -> State:
        merged, weight_before, added_weight = self._sums + sums, self._sums[0], sums[0]
        if added_weight:
            delta = sums[2] - self._sums[2]
            merged[3] += delta * delta * weight_before * added_weight / merged[0]
            merged[2] = self._sums[2] + delta * added_weight / merged[0]
        return merged

    def value_of(self, state: State) -> tuple[float, float, float]:
        """Return (mean, variance, total weight) of ``state``, an array of four sums."""
        weight, squared_weight, total, squares = map(float, state)
        mean = ratio(total, weight)
        return _value(weight, squared_weight, mean, max(0.0, squares - mean * total))

    def value(self) -> tuple[float, float, float]:
        """Return (mean, variance, total weight). With too few values, mean or variance is NaN."""
        weight, squared_weight, mean, deviation = self._all_sums().tolist()
        return _value(weight, squared_weight, mean if weight else float("nan"), deviation)


def _value(
    weight: float, squared_weight: float, mean: float, deviation: float
) -> tuple[float, float, float]:
    freedom = weight - ratio(squared_weight, weight)
    return mean, ratio(deviation, freedom if freedom > 0 else 0.0), weight


class CountMeter(_Sums[list[int]]):
    """Counts of ``num`` categories.

    Raises:
        ValueError: If ``num`` < 1.
    """

    def __init__(self, num: int) -> None:
        if num < 1:
            raise ValueError(f"CountMeter: num must be at least 1, got {num}")
        super().__init__(num)

    def add(self, category: int, count: int = 1) -> None:
        """Add ``count`` to ``category``.

        Raises:
            IndexError: If ``category`` is not in [0, number of categories).
        """
        if not 0 <= category < len(self._sums):
            raise IndexError(f"category must be in [0, {len(self._sums)}), got {category}")
        self._sums[category] = self._sums[category] + count

    def value_of(self, state: State) -> list[int]:
        """Return the count of each category in ``state``, which has shape (categories,)."""
        return [round(count) for count in state.tolist()]


class MSEMeter(_Sums[float]):
    """Sum of squared errors of one call of ``add``, averaged over all calls."""

    def __init__(self) -> None:
        super().__init__(2)

    def add(self, output: Array, target: Array) -> None:
        """Add the sum of squared differences of two arrays of the same shape, in float64.

        Raises:
            ValueError: If the shapes differ.
        """
        if output.shape != target.shape:
            raise ValueError(
                f"MSEMeter.add: shapes must be equal, got {output.shape} and {target.shape}"
            )
        difference = output.astype(np.float64) - target
        self._add((difference * difference).sum(), 1)

    def value_of(self, state: State) -> float:
        """Return the mean error per call, or NaN without calls. ``state`` is [error, calls]."""
        error, calls = map(float, state)
        return ratio(error, calls)


class TimeMeter(_Sums[float]):
    """A stopwatch in seconds, initially stopped. With ``unit`` its value is seconds per unit.

    The value over several processes is the mean of their seconds. With ``unit`` it is the sum of
    their seconds divided by the sum of their units.
    """

    def __init__(self, unit: bool = False) -> None:
        self._unit = unit
        super().__init__(2)  # seconds and units
        self._resumed = np.full(1, np.nan)  # time of the last start; NaN while stopped
        self.reset()

    def reset(self) -> None:
        super().reset()
        self._resumed[0] = np.nan

    def resume(self) -> None:
        """Start the time. Does nothing if it is running."""
        if math.isnan(self._resumed[0]):
            self._resumed[0] = time.perf_counter()

    def stop(self) -> None:
        """Stop the time. Does nothing if it is stopped."""
        self._sums[0] += self._running()
        self._resumed[0] = np.nan

    def inc_unit(self, num: int = 1) -> None:
        """Add ``num`` units, such as batches or samples."""
        self._sums[1] += num

    def stop_and_inc_unit(self, num: int = 1) -> None:
        """Stop the time and add ``num`` units."""
        self.stop()
        self.inc_unit(num)

    def set(self, value: float, num: int = 1) -> None:
        """Replace the collected data by ``value`` seconds and ``num`` units."""
        self._sums[:] = value, num

    def _running(self) -> float:
        resumed = self._resumed.item()
        return 0.0 if math.isnan(resumed) else time.perf_counter() - resumed

    def state(self) -> State:
        """Return [seconds so far, units, 1]. In a sum of states, the last number counts meters."""
        seconds, units = self._sums.tolist()
        return np.array([seconds + self._running(), units, 1.0])

    def value_of(self, state: State) -> float:
        """Return seconds, or seconds per unit. ``state`` is [seconds, units, meters]."""
        seconds, units, meters = map(float, state)
        return ratio(seconds, units if self._unit else meters)


class TopKMeter(_Sums[float]):
    """Percentage of samples whose target is among the ``k`` highest scores.

    A target counts if fewer than ``k`` classes have a higher score, so ties count. NaN is higher
    than every number. A target with a NaN score never counts.

    Raises:
        ValueError: If ``k`` < 1.
    """

    def __init__(self, k: int) -> None:
        if k < 1:
            raise ValueError(f"TopKMeter: k must be at least 1, got {k}")
        super().__init__(2)
        self._k = k

    def add(self, output: Array, target: Array) -> None:
        """Add a batch: scores of shape (batch, classes), integer targets of shape (batch,).

        Adding CuPy arrays does not wait for the device. If such a target is not in [0, classes), no
        error is raised, and the value is NaN until the next ``reset``.

        Raises:
            ValueError: If the shapes do not match, there are fewer than ``k`` classes, or a target
                is not an integer in [0, classes).
        """
        fits = output.ndim == 2 and target.ndim == 1 and len(output) == len(target)
        if not fits or target.dtype.kind not in "iu":
            raise ValueError(
                "TopKMeter.add: expected scores of shape (batch, classes) and integer targets of "
                f"shape (batch,), got {output.shape} and {target.dtype} {target.shape}"
            )
        classes = output.shape[1]
        if classes < self._k:
            raise ValueError(f"TopKMeter.add: expected at least {self._k} classes, got {classes}")
        xp, on_device = array_module(output), is_cupy(target)
        is_valid = (target >= 0) & (target < classes)
        if on_device:
            target = xp.where(is_valid, target, 0)
        elif not is_valid.all():
            raise ValueError(
                f"targets must be in [0, {classes}), got {int(target.min())} to {int(target.max())}"
            )
        scores = xp.take_along_axis(output, target[:, None], axis=1)
        correct = (~(output <= scores)).sum(axis=1) < self._k
        if on_device:
            correct = xp.where(is_valid, correct.astype(np.float64), np.nan)
        self._add(correct.sum(), len(target))

    def value_of(self, state: State) -> float:
        """Return the percentage, or NaN without samples. ``state`` is [correct, samples]."""
        correct, total = map(float, state)
        return 100 * ratio(correct, total)
