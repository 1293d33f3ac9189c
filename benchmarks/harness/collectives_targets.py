"""The numbers that every verb is to reach beside its peers, and whether measurements do."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from harness.all_reduce_targets import MPI, OURS, TORCH
from harness.report import size_name
from harness.statistics import Measurement
from harness.verdicts import Verdict, at_least

__all__ = ["verdicts"]

KB = 1 << 10


def verdicts(measurements: Sequence[Measurement], absent: Mapping[str, str]) -> list[Verdict]:
    """Judge the measurements; ``absent`` says which peers were not there, and why."""
    ranks = sorted({m.ranks for m in measurements})
    return [
        verdict
        for n in ranks
        for verdict in (
            _faster(measurements, absent, n, MPI, 1.0, lambda m: m.nbytes >= 64 * KB),
            _faster(measurements, absent, n, TORCH, 10.0, lambda m: True),
        )
    ]


def _faster(
    measurements: Sequence[Measurement],
    absent: Mapping[str, str],
    ranks: int,
    peers: Sequence[str],
    bound: float,
    counts: Callable[[Measurement], bool],
) -> Verdict:
    rounds = {
        f"{m.task} {size_name(m.nbytes) if m.nbytes else ''}, {peer}": m.ratios(peer, OURS)
        for m in measurements
        for peer in peers
        if m.ranks == ranks and counts(m)
    }
    missing = ", ".join(f"{peer} is absent" for peer in peers if peer in absent)
    name = "torch gloo, everywhere" if peers is TORCH else "MPI, from 64 KB"
    return at_least(f"{ranks} ranks, every verb, to {name}", bound, rounds, missing)
