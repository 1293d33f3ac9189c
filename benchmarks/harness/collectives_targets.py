"""Targets of every verb next to its peers, and the verdicts on the measurements."""

from collections.abc import Mapping, Sequence

from harness.all_reduce_targets import MPI, OURS, TORCH
from harness.report import size_name
from harness.statistics import Measurement, median
from harness.verdicts import Rounds, Verdict, at_least

__all__ = ["label", "verdicts"]

# Least ratio to the fastest peer, by the number of ranks. 4 ranks share two cores.
EVERY_ROW = {2: 1.0, 4: 0.8}
# The contender of this package for several arrays, by the kind of the task.
LOOP = f"{OURS}, loop"
SEVERALLY = {"loop": LOOP, "contiguous": f"{OURS}, contiguous"}


def label(measurement: Measurement) -> str:
    """Return the label of a row: a verb and its size, or the number of open messages."""
    verb, nbytes = measurement.task, measurement.nbytes
    if verb.startswith("open messages"):
        return f"{nbytes // 4:,} {verb}"
    return f"{verb}, {size_name(nbytes)}" if nbytes else verb


def verdicts(measurements: Sequence[Measurement], absent: Mapping[str, str]) -> list[Verdict]:
    """Judge the measurements. ``absent`` contains the missing peers and the reasons."""
    judged = []
    for ranks in sorted({m.ranks for m in measurements}):
        some = [m for m in measurements if m.ranks == ranks]
        for name, peers, bound in (
            ("the better MPI", MPI, EVERY_ROW.get(ranks, 0.8)),
            ("torch gloo", TORCH, 10.0),
        ):
            missing = ", ".join(f"{peer} is absent" for peer in peers if peer in absent)
            rows = dict(row for m in some if (row := _row(m, peers)))
            judged.append(at_least(f"{ranks} ranks, every row, to {name}", bound, rows, missing))
            if peers is MPI and ranks > 2:
                summary = {f"{len(rows)} rows": [median(rounds) for rounds in rows.values()]}
                target = f"{ranks} ranks, the median row, to {name}"
                judged.append(at_least(target, 1.0, summary, missing))
        for title in (OURS, SEVERALLY["contiguous"]):
            rows = {label(m): ratios for m in some if (ratios := m.ratios(LOOP, title))}
            if rows:
                judged.append(at_least(f"{ranks} ranks, {title}, to a loop", 1.0, rows))
    return judged


def _row(measurement: Measurement, peers: Sequence[str]) -> tuple[str, Rounds] | None:
    """Return the ratios to the fastest of ``peers`` and its name, or None if no peer was
    measured."""
    if OURS in measurement.left_out and any(peer in measurement.seconds for peer in peers):
        return f"{label(measurement)}, {OURS} was left out", [0.0]
    ratios = {peer: measurement.ratios(peer, OURS) for peer in peers}
    measured = [peer for peer in peers if ratios[peer]]
    if not measured:
        return None
    best = min(measured, key=lambda peer: median(ratios[peer]))
    return f"{label(measurement)}, {best}", ratios[best]
