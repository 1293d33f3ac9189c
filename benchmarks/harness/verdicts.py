"""Verdicts: the target, the measured values, and whether the target was reached."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from harness.statistics import median

__all__ = ["Rounds", "Show", "Verdict", "at_least", "at_most"]

Rounds = Sequence[float]
Show = Callable[[float], str]


def _times(ratio: float) -> str:
    return f"{ratio:.3g}x"


@dataclass(frozen=True)
class Verdict:
    """A verdict. ``reached`` is None if nothing could be measured; then ``measured`` is the
    reason."""

    target: str
    needed: str
    measured: str
    reached: bool | None


def at_least(target: str, bound: float, rounds: Mapping[str, Rounds], missing: str = "") -> Verdict:
    """Require that the median of every entry is at least ``bound``; the lowest median is shown.

    Args:
        target: Name of the target.
        bound: Smallest ratio that reaches the target.
        rounds: Ratios of the rounds, by label.
        missing: The measurements that failed, with the reasons.
    """
    return _judge(target, f">= {bound:g}x", bound, 1, rounds, missing)


def at_most(
    target: str,
    bound: float,
    rounds: Mapping[str, Rounds],
    missing: str = "",
    show: Show = _times,
) -> Verdict:
    """Require that the median of every entry is at most ``bound``; the highest median is shown.

    ``show`` formats a number. Values that are no ratios are shown in seconds.
    """
    return _judge(target, f"<= {show(bound)}", bound, -1, rounds, missing, show)


def _judge(
    target: str,
    needed: str,
    bound: float,
    sign: int,
    rounds: Mapping[str, Rounds],
    missing: str,
    show: Show = _times,
) -> Verdict:
    medians = {where: median(values) for where, values in rounds.items() if values}
    if not medians:
        return Verdict(target, needed, f"not measured: {missing or 'left out'}", None)
    worst = min(medians, key=lambda where: sign * medians[where])
    span = " to ".join(
        show(end).removesuffix("x") for end in (min(rounds[worst]), max(rounds[worst]))
    )
    measured = f"{show(medians[worst])} ({worst}; rounds {span})"
    missed = sum(sign * value < sign * bound for value in medians.values())
    if missed:
        measured += f"; missed by {missed} of {len(medians)}"
    if missing:
        measured += f"; not measured: {missing}"
    return Verdict(target, needed, measured, not missed)
