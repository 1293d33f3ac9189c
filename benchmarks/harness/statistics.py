"""What rounds say: medians, and ratios taken round by round.

In a round everybody runs within a second or so, so that what else the machine does then slows
all of them alike. The ratio of a round is therefore steadier than either of its times, and the
median of the rounds' ratios steadier than the ratio of two medians.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Measurement", "median", "ratios"]

Seconds = Sequence[float]


@dataclass
class Measurement:
    """One case: what was called, and what each contender took in each round, in seconds a call."""

    task: str
    dtype: str
    nbytes: int
    ranks: int
    seconds: dict[str, list[float]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def ratios(self, of: str, to: str) -> list[float]:
        """Return, per round, how often ``to``'s time fits in ``of``'s; empty if one is missing."""
        return ratios(self.seconds, of, to)


def median(values: Seconds) -> float:
    """Return the median.

    Raises:
        statistics.StatisticsError: there are no values.
    """
    return statistics.median(values)


def ratios(seconds: Mapping[str, Seconds], of: str, to: str) -> list[float]:
    """Return the time of ``of`` divided by that of ``to``, round by round.

    Above 1, ``to`` is the faster one. Empty if one of them was not measured.
    """
    if of not in seconds or to not in seconds:
        return []
    return [a / b for a, b in zip(seconds[of], seconds[to], strict=True)]
