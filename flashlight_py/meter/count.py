"""How often each of some categories came."""

from __future__ import annotations

import numpy as np

from flashlight_py.meter.meter import Meter, State


class CountMeter(Meter):
    """One count for each of ``num`` categories.

    Raises:
        ValueError: ``num`` < 1.
    """

    def __init__(self, num: int) -> None:
        if num < 1:
            raise ValueError(f"the number of categories must be at least 1, got {num}")
        self._counts = np.zeros(num, np.int64)

    def reset(self) -> None:
        """Forget everything."""
        self._counts[:] = 0

    def add(self, category: int, count: int = 1) -> None:
        """Add ``count`` to ``category``.

        Raises:
            IndexError: ``category`` is not in [0, number of categories).
        """
        if not 0 <= category < len(self._counts):
            raise IndexError(f"category must be in [0, {len(self._counts)}), got {category}")
        self._counts[category] += count

    def state(self) -> State:
        """Return the counts, with shape (categories,)."""
        return self._counts.astype(np.float64)

    def value_of(self, state: State) -> list[int]:
        """Return the counts of ``state``, which has shape (categories,)."""
        return [round(count) for count in state.tolist()]

    def value(self) -> list[int]:
        """Return the count of each category."""
        return self.value_of(self.state())
