"""Medians of rounds, and ratios within rounds.

All contenders of a round run within about a second, so other load slows all of them equally. The
ratio within a
round is therefore steadier than either time, and the median of these ratios is steadier than the
ratio of two
medians.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Measurement", "median", "ratios"]

Seconds = Sequence[float]


@dataclass
class Measurement:
    """One case: the call, and the seconds per call of each contender in each round."""

    task: str
    dtype: str
    nbytes: int
    ranks: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def ratios(self, of: str, to: str) -> list[float]:
        """Return the time of ``of`` divided by the time of ``to`` per round; empty if one is
        missing."""
        return ratios(self.seconds, of, to)


def median(values: Seconds) -> float:
    """Return the median.

    Raises:
        statistics.StatisticsError: If there are no values.
    """
    return statistics.median(values)


def ratios(seconds: Mapping[str, Seconds], of: str, to: str) -> list[float]:
    """Return the time of ``of`` divided by the time of ``to`` per round.

    Above 1, ``to`` is faster. The list is empty if one of them was not measured.
    """
    if of not in seconds or to not in seconds:
        return []
    return [a / b for a, b in zip(seconds[of], seconds[to], strict=True)]
