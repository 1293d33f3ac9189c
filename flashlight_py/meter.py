"""Meters: values gathered while a model trains, alone or summed over processes."""

import abc
import math
import time
from typing import Any, Protocol, SupportsFloat, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from flashlight_py import kernels
from flashlight_py.device import Array, array_module, is_cupy, to_device
from flashlight_py.structure import Structured

__all__ = ["Meter", "AverageValueMeter", "TimeMeter", "TopKMeter", "CountMeter", "MSEMeter"]

# Sums of float64, with shape (number of sums,).
State: TypeAlias = NDArray[np.float64]
Value_co = TypeVar("Value_co", covariant=True)
# Types that are no CuPy arrays. A look-up here takes a quarter of the time of ``is_cupy``.
_HOST_TYPES = frozenset({int, float, np.ndarray, *np.sctypeDict.values()})


class _Valued(Protocol[Value_co]):
    """A meter as type checkers see it: its value is of the type that ``value_of`` returns."""

    def state(self) -> State: ...
    def value_of(self, state: State) -> Value_co: ...


class Meter(Structured, abc.ABC):
    """Gathers something while a model trains.

    ``state`` holds sums only: the element-wise sum of the states of several meters is the state of
    one that had seen everything. So what all processes have seen together is ``meter.value_of(sum
    of every process's meter.state())``, which changes no meter.
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
    """A meter with one array of sums on the host, and one on the device for CuPy arrays."""

    _device_sums: Array | None = None  # at one address per device, to which CUDA graphs write

    def __init__(self, number: int) -> None:
        self._sums: State = np.zeros(number)

    def reset(self) -> None:
        self._sums[:] = 0
        if self._device_sums is not None:
            self._device_sums[:] = 0

    def state(self) -> State:
        return self._all_sums().copy()

    def __getstate__(self) -> dict[str, Any]:
        held = {name: value for name, value in vars(self).items() if name != "_device_sums"}
        return held | {"_sums": self._all_sums()}

    def _sums_on_device(self, value: Any) -> Array:
        """Return the sums on the device of ``value``, a CuPy array, to be changed in place."""
        sums = self._device_sums
        if sums is None or sums.device != value.device:
            self._sums[:] = self._all_sums()
            zeros = np.zeros_like(self._sums)
            sums = self._device_sums = to_device(zeros, f"cuda:{value.device.id}")
        return sums

    def _all_sums(self) -> State:
        """Return the sums of the host merged with those of the device."""
        if self._device_sums is None:
            return self._sums
        return self._merged(to_device(self._device_sums, "cpu"))

    def _merged(self, sums: State) -> State:
        return self._sums + sums

    def _add(self, *terms: Any) -> None:
        sums = self._sums_on_device(terms[0]) if is_cupy(terms[0]) else self._sums
        for place, term in enumerate(terms):
            sums[place] = sums[place] + term


def ratio(part: float, whole: float) -> float:
    """Return ``part / whole``, and NaN where there is nothing to divide by."""
    return part / whole if whole else float("nan")


class AverageValueMeter(_Sums):
    """The weighted mean, the unbiased variance and the total weight of all values added.

    The variance takes weights as reliabilities: with V1 and V2 the sums of weights and of their
    squares, sum(w (x - mean)^2) / (V1 - V2 / V1). With equal weights it is the usual n - 1.

    ``value_of`` works on sums of x and x^2, so the variance of synchronised meters loses digits if
    the mean is many times the standard deviation; ``value`` updates mean and squared deviations one
    by one instead (West 1979, doi:10.1145/359146.359153).
    """

    def __init__(self) -> None:
        super().__init__(4)  # of weights and of their squares, mean, squared deviations
        self.reset()

    def add(self, value: SupportsFloat | Array, weight: float = 1.0) -> None:
        """Add a number, or every element of an array of any shape, with ``weight`` each.

        A variable counts as its array. A CuPy array is added without waiting for the device.

        Raises:
            ValueError: ``weight`` is negative.
        """
        if weight <= 0:
            if weight < 0:
                raise ValueError(f"the weight must not be negative, got {weight}")
            return
        value = getattr(value, "array", value)  # of a Variable
        on_device = type(value) not in _HOST_TYPES and is_cupy(value)
        is_array = getattr(value, "ndim", 0) > 0  # torch's ``size`` is a method
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
        known = sums
        if type(sums) is np.ndarray:  # Python's numbers take a third of the time of NumPy's
            known, mean = sums.tolist(), float(mean)
            squares = float(squares) if is_array else squares
        # Two sets of values are merged by their moments.
        before, more, delta = known[0], weight * count, mean - known[2]
        total = before + more
        spread = weight * squares + delta * delta * before * more / total
        sums[3] = known[3] + spread
        sums[2] = known[2] + delta * more / total
        sums[1] = known[1] + weight * weight * count
        sums[0] = total

    def state(self) -> State:
        """Return the sums of w, w^2, w x and w x^2."""
        weight, squared_weight, mean, deviation = self._all_sums().tolist()
        total = weight * mean
        return np.array([weight, squared_weight, total, deviation + total * mean])

    def _merged(self, sums: State) -> State:
        merged, before, more = self._sums + sums, self._sums[0], sums[0]
        if more:
            delta = sums[2] - self._sums[2]
            merged[3] += delta * delta * before * more / merged[0]
            merged[2] = self._sums[2] + delta * more / merged[0]
        return merged

    def value_of(self, state: State) -> tuple[float, float, float]:
        """Return (mean, variance, total weight) of ``state``, four sums with shape (4,)."""
        weight, squared_weight, total, squares = map(float, state)
        mean = ratio(total, weight)
        return _value(weight, squared_weight, mean, max(0.0, squares - mean * total))

    def value(self) -> tuple[float, float, float]:
        """Return (mean, variance, total weight); NaN for what too few values leave undefined."""
        weight, squared_weight, mean, deviation = self._all_sums().tolist()
        return _value(weight, squared_weight, mean if weight else float("nan"), deviation)


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

    def add(self, category: int, count: int = 1) -> None:
        """Add ``count`` to ``category``.

        Raises:
            IndexError: ``category`` is not in [0, number of categories).
        """
        if not 0 <= category < len(self._sums):
            raise IndexError(f"category must be in [0, {len(self._sums)}), got {category}")
        self._sums[category] = self._sums[category] + count

    def value_of(self, state: State) -> list[int]:
        """Return the count of each category in ``state``, which has shape (categories,)."""
        return [round(count) for count in state.tolist()]


class MSEMeter(_Sums):
    """The squared error of a call of ``add``, summed over its elements, averaged over the calls.

    One sample per call gives the mean over samples.
    """

    def __init__(self) -> None:
        super().__init__(2)

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
        self._add((difference * difference).sum(), 1)

    def value_of(self, state: State) -> float:
        """Return the mean over all calls, NaN without any, of the sum of errors and the calls."""
        error, calls = map(float, state)
        return ratio(error, calls)


class TimeMeter(_Sums):
    """A stopwatch in seconds, which starts stopped; with ``unit`` the seconds per unit counted.

    Of several synchronised meters: the mean of their seconds, or all seconds over all units.
    """

    def __init__(self, unit: bool = False) -> None:
        self._unit = unit
        super().__init__(2)  # seconds and units
        self._resumed = np.full(1, np.nan)  # when; not a number while the time is halted
        self.reset()

    def reset(self) -> None:
        super().reset()
        self._resumed[0] = np.nan

    def resume(self) -> None:
        """Let the time run; nothing happens if it does."""
        if math.isnan(self._resumed[0]):
            self._resumed[0] = time.perf_counter()

    def stop(self) -> None:
        """Halt the time; nothing happens if it is."""
        self._sums[0] += self._running()
        self._resumed[0] = np.nan

    def inc_unit(self, num: int = 1) -> None:
        """Count ``num`` more units, such as batches or samples."""
        self._sums[1] += num

    def stop_and_inc_unit(self, num: int = 1) -> None:
        """Halt the time and count ``num`` more units."""
        self.stop()
        self.inc_unit(num)

    def set(self, value: float, num: int = 1) -> None:
        """Replace what was gathered by ``value`` seconds and ``num`` units."""
        self._sums[:] = value, num

    def _running(self) -> float:
        resumed = self._resumed.item()
        return 0.0 if math.isnan(resumed) else time.perf_counter() - resumed

    def state(self) -> State:
        """Return the seconds so far (also of a time that runs), the units, and 1 meter."""
        seconds, units = self._sums.tolist()
        return np.array([seconds + self._running(), units, 1.0])

    def value_of(self, state: State) -> float:
        """Return the seconds, or seconds per unit (NaN before the first unit), of three sums."""
        seconds, units, meters = map(float, state)
        return ratio(seconds, units if self._unit else meters)


class TopKMeter(_Sums):
    """The share, in percent, of samples whose target is among the ``k`` highest scores.

    A target counts if fewer than ``k`` classes have a higher score, so ties are in its favour. A
    NaN is higher than everything, and as the target's own score it never counts.

    Raises:
        ValueError: ``k`` < 1.
    """

    def __init__(self, k: int) -> None:
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        super().__init__(2)
        self._k = k

    def add(self, output: Array, target: Array) -> None:
        """Add a batch: scores of shape (batch, classes), integer targets of shape (batch,).

        CuPy arrays are added without waiting for the device: a target of theirs that is not in [0,
        classes) makes the value NaN until the next ``reset``, and no error is raised.

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
        xp, on_device = array_module(output), is_cupy(target)
        known = (target >= 0) & (target < classes)
        if on_device:
            target = xp.where(known, target, 0)
        elif not known.all():
            raise ValueError(
                f"targets must be in [0, {classes}), got {int(target.min())} to {int(target.max())}"
            )
        scores = xp.take_along_axis(output, target[:, None], axis=1)
        correct = (~(output <= scores)).sum(axis=1) < self._k
        if on_device:
            correct = xp.where(known, correct.astype(np.float64), np.nan)
        self._add(correct.sum(), len(target))

    def value_of(self, state: State) -> float:
        """Return the percentage, NaN without samples, of the numbers of correct ones and of all."""
        correct, total = map(float, state)
        return 100 * ratio(correct, total)
