"""The contract of a meter, and what makes it fit for several processes."""

from __future__ import annotations

import abc
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

# Sums of float64, with shape (number of sums,).
State: TypeAlias = NDArray[np.float64]


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

    def value(self) -> Any:
        """Return the value of what was gathered since the last ``reset``."""
        return self.value_of(self.state())


def ratio(part: float, whole: float) -> float:
    """Return ``part / whole``, and NaN where there is nothing to divide by."""
    return part / whole if whole else float("nan")
