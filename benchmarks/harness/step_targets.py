"""The numbers that a training step is to reach, and whether measurements reach them."""

from __future__ import annotations

from collections.abc import Mapping

from harness.statistics import Measurement
from harness.verdicts import Verdict, at_least, at_most

__all__ = [
    "DDP",
    "EXAMPLE",
    "HAND_WRITTEN",
    "OURS",
    "on_ranks",
    "overlap_verdict",
    "ranks_text",
    "verdicts",
]

HAND_WRITTEN, OURS = "hand-written NumPy", "flashlight_py"
EXAMPLE, DDP = "flashlight_py, distributed", "torch DDP on gloo"


def on_ranks(title: str, ranks: int) -> str:
    """Return the title of a contender on several ranks."""
    return f"{title}, {ranks_text(ranks)}"


def ranks_text(ranks: int) -> str:
    """Return "1 rank", "2 ranks"."""
    return f"{ranks} rank{'s' if ranks > 1 else ''}"


def verdicts(steps: Measurement, absent: Mapping[str, str]) -> list[Verdict]:
    """Judge the example's step; ``absent`` says which peers were not there, and why."""
    two = on_ranks(EXAMPLE, 2)
    # Two ranks do half of an epoch's steps each.
    epochs = [2 * ratio for ratio in steps.ratios(on_ranks(EXAMPLE, 1), two)]
    from_plain = [2 * ratio for ratio in steps.ratios(OURS, two)]
    torch = {"a step": steps.ratios(on_ranks(DDP, 2), two)}
    missing = ", ".join(f"{title} is absent" for title in absent if "torch" in title)
    one = {"a step": steps.ratios(OURS, HAND_WRITTEN)}
    return [
        at_most("1 process, against hand-written NumPy", 1.9, one),
        at_least("2 ranks, an epoch of the example against 1 rank's", 1.8, {"an epoch": epochs}),
        at_least("the same against a process without hooks", 1.8, {"an epoch": from_plain}),
        at_least("2 ranks, against torch DDP on gloo", 25, torch, missing),
    ]


def overlap_verdict(steps: Measurement, alone: str, overlapped: str) -> Verdict:
    """Judge how much longer a step of several ranks takes than one rank's."""
    rounds = {"a step": steps.ratios(overlapped, alone)}
    return at_most(f"{overlapped}, against {alone}", 1.15, rounds)
