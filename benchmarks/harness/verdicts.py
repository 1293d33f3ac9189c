"""Was a number reached? A verdict has the target, what was measured where, and yes or no."""

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
    """``reached`` is None where nothing could be measured; ``measured`` then says why."""

    target: str
    needed: str
    measured: str
    reached: bool | None


def at_least(target: str, bound: float, rounds: Mapping[str, Rounds], missing: str = "") -> Verdict:
    """Judge that the median of every entry is ``bound`` or more; the lowest one is shown.

    Args:
        target: what is judged.
        bound: the smallest ratio that is good enough.
        rounds: the ratios of each round, by what they were measured at.
        missing: what could not be measured, and why.
    """
    return _judge(target, f">= {bound:g}x", bound, 1, rounds, missing)


def at_most(
    target: str,
    bound: float,
    rounds: Mapping[str, Rounds],
    missing: str = "",
    show: Show = _times,
) -> Verdict:
    """Judge that the median of every entry is ``bound`` or less; the highest one is shown.

    ``show`` writes a number; where they are no ratios, as seconds.
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
