"""How far outputs are from their targets."""

from __future__ import annotations

import numpy as np

from flashlight_py.device import Array
from flashlight_py.meter.meter import Meter, State, ratio


class MSEMeter(Meter):
    """The squared error of a call of ``add``, summed over its elements, averaged over the calls.

    That is flashlight's definition; add one sample per call for the mean over samples.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._error = 0.0
        self._calls = 0

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
        self._error += float((difference * difference).sum())
        self._calls += 1

    def state(self) -> State:
        """Return the sum of squared errors and the number of calls."""
        return np.array([self._error, self._calls])

    def value_of(self, state: State) -> float:
        """Return the mean error of ``state``, two sums with shape (2,); NaN without calls."""
        error, calls = map(float, state)
        return ratio(error, calls)

    def value(self) -> float:
        """Return the mean over all calls; NaN without any."""
        return self.value_of(self.state())
