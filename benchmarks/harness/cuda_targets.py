"""all_reduce on GPUs: who is measured, what is printed, and the numbers that it is to reach."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.conductor import Conductor, Contender
from harness.environments import PEERS, python_of
from harness.launchers import Library
from harness.report import size_name
from harness.statistics import Measurement
from harness.verdicts import Verdict, at_most

__all__ = ["contenders", "host_times", "launch_table", "verdicts"]

OURS, CUPY, TORCH = "flashlight_py", "cupy.cuda.nccl", "torch nccl"
KB, MB = 1 << 10, 1 << 20
HostTimes = dict[tuple[int, int], dict[str, float]]


def contenders(options: argparse.Namespace, ranks: int, absent: dict[str, str]) -> list[Contender]:
    """Return this package, CuPy's binding and, where it is installed, torch."""
    here = Path(sys.executable)
    libraries = [Library(OURS, "flashlight_cuda", here), Library(CUPY, "cupy_nccl", here)]
    torch = python_of(PEERS["torch"], options.environments)
    if isinstance(torch, Path):
        libraries.append(Library(TORCH, "torch_cuda", torch))
    else:
        absent[TORCH] = torch
    return [Contender(library.title, library, ranks) for library in libraries]


def host_times(conductor: Conductor) -> dict[str, float]:
    """Return each contender's seconds to launch the last case: its slowest rank's."""
    return {title: max(seconds) for title, seconds in conductor.details.items()}


def launch_table(times: HostTimes) -> str:
    """Return the host's microseconds for one launch, as Markdown."""
    titles = [t for t in (OURS, CUPY, TORCH) if any(t in found for found in times.values())]
    lines = [f"| ranks | bytes | {' | '.join(titles)} |", f"|---|---|{'---|' * len(titles)}"]
    for (ranks, nbytes), found in times.items():
        cells = [f"{found[t] * 1e6:.1f} us" if t in found else "-" for t in titles]
        lines.append(f"| {ranks} | {size_name(nbytes)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def verdicts(measurements: Sequence[Measurement], times: HostTimes) -> list[Verdict]:
    """Judge: the launch of 1 KB against the faster peer plus 3 us; large ones against CuPy's."""
    small = {
        f"{ranks} ranks": [found[OURS] / (min(v for t, v in found.items() if t != OURS) + 3e-6)]
        for (ranks, nbytes), found in times.items()
        if nbytes == KB and OURS in found and len(found) > 1
    }
    large = {
        f"{m.ranks} ranks, {size_name(m.nbytes)}": m.ratios(OURS, CUPY)
        for m in measurements
        if m.nbytes >= 64 * MB
    }
    return [
        at_most("host time to launch 1 KB, to the faster peer's plus 3 us", 1.0, small),
        at_most("time of 64 MB and more, to that of cupy.cuda.nccl", 1.02, large),
    ]
