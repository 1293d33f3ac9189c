"""How long something takes."""

from __future__ import annotations

import time

import numpy as np

from flashlight_py.meter.meter import Meter, State, ratio


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
        """Return the seconds, or seconds per unit, of ``state``, three sums with shape (3,)."""
        seconds, units, meters = map(float, state)
        return ratio(seconds, units if self._unit else meters)

    def value(self) -> float:
        """Return the seconds, or seconds per unit (NaN before the first unit)."""
        return self.value_of(self.state())
