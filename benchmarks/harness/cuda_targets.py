"""all_reduce on GPUs: who is measured, what is printed, and the numbers that it is to reach."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.conductor import Conductor, Contender
from harness.environments import PEERS, python_of
from harness.launchers import Library
from harness.report import markdown, size_name
from harness.statistics import Measurement
from harness.verdicts import Verdict, at_most

__all__ = ["contenders", "host_times", "launch_table", "verdicts"]

OURS, CUPY, CUPYX = "flashlight_py", "raw NCCL (cupy.cuda.nccl)", "cupyx.distributed"
TORCH = "torch nccl"
KB, MB = 1 << 10, 1 << 20
SMALL, LARGE = 64 * KB, 64 * MB  # bytes: up to the one, and from the other on
ALLOWED = 3e-6  # seconds beyond the fastest peer, for what a small array costs
HostTimes = dict[tuple[int, int], dict[str, float]]


def contenders(options: argparse.Namespace, ranks: int, absent: dict[str, str]) -> list[Contender]:
    """Return this package, CuPy's two ways to NCCL and, where it is installed, torch."""
    here = Path(sys.executable)
    roles = {OURS: "flashlight_cuda", CUPY: "cupy_nccl", CUPYX: "cupyx_nccl"}
    libraries = [Library(title, role, here) for title, role in roles.items()]
    torch = python_of(PEERS["torch"], options.environments)
    if isinstance(torch, Path):
        libraries.append(Library(TORCH, "torch_cuda", torch))
    else:
        absent[TORCH] = torch
    return [Contender(library.title, library, ranks) for library in libraries]


def host_times(conductor: Conductor) -> dict[str, float]:
    """Return the seconds that a launch of the last case took each contender's slowest rank."""
    known = {title: seconds for title, seconds in conductor.details.items() if None not in seconds}
    return {title: max(seconds) for title, seconds in known.items()}


def launch_table(times: HostTimes) -> str:
    """Return the host's microseconds for one launch, as Markdown."""
    titles = [t for t in (OURS, CUPY, CUPYX, TORCH) if any(t in found for found in times.values())]
    rows = [
        [str(ranks), size_name(nbytes), *(_microseconds(found.get(title)) for title in titles)]
        for (ranks, nbytes), found in times.items()
        if found
    ]
    return markdown(["ranks", "bytes", *titles], rows)


def _microseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:.1f} us"


def verdicts(measurements: Sequence[Measurement], times: HostTimes) -> list[Verdict]:
    """Judge small arrays against the fastest peer plus ALLOWED, large ones against raw NCCL."""
    launches = {
        f"{ranks} ranks, {size_name(nbytes)}": [_to_fastest(found)]
        for (ranks, nbytes), found in times.items()
        if OURS in found and len(found) > 1
    }
    small, large = (
        {
            f"{m.ranks} ranks, {size_name(m.nbytes)}": ratios(m)
            for m in measurements
            if first <= m.nbytes <= last
        }
        for first, last, ratios in ((0, SMALL, _small), (LARGE, 1 << 40, _large))
    )
    return [
        at_most(f"host time to launch, up to {size_name(SMALL)}, {BEYOND}", 1.0, launches),
        at_most(f"time up to {size_name(SMALL)}, {BEYOND}", 1.0, small),
        at_most(f"time from {size_name(LARGE)} on, to raw NCCL's", 1.02, large),
    ]


BEYOND = f"to the fastest peer's plus {ALLOWED * 1e6:g} us"


def _to_fastest(seconds: Mapping[str, float]) -> float:
    return seconds[OURS] / (min(v for title, v in seconds.items() if title != OURS) + ALLOWED)


def _small(measurement: Measurement) -> list[float]:
    if OURS not in measurement.seconds or len(measurement.seconds) < 2:
        return []
    titles, rounds = list(measurement.seconds), zip(*measurement.seconds.values(), strict=True)
    return [_to_fastest(dict(zip(titles, values, strict=True))) for values in rounds]


def _large(measurement: Measurement) -> list[float]:
    return measurement.ratios(OURS, CUPY)
