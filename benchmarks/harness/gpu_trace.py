"""What a GPU did when: a trace of kernels, and for how long reductions ran beside others.

torch's profiler records it, which is CUPTI: it sees every kernel of the process, whoever launched
it. The trace can be opened in a browser at ui.perfetto.dev, or chrome://tracing.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["overlap_of", "record"]

Interval = tuple[float, float]


def record(step: Callable[[], object], steps: int, file: Path) -> dict[str, float] | str:
    """Call ``step`` so often, and write what the GPU did to ``file`` (ends in .json.gz).

    Returns:
        What :func:`overlap_of` finds, per step; or why there is no trace. The steps are made in any
        case: other ranks take part in them.
    """
    if importlib.util.find_spec("torch") is None:
        for _ in range(steps):
            step()
        return "torch, whose profiler records kernels, is not installed"
    import torch

    torch.cuda.init()  # without it the profiler leaves CUDA out
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(steps):
            step()
    profile.export_chrome_trace(str(file))
    with gzip.open(file, "rt") as text:
        found = overlap_of(json.load(text)["traceEvents"])
    return {name: seconds / steps for name, seconds in found.items()}


def overlap_of(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return for how many seconds the GPU reduced, computed, and did both at the same time.

    Args:
        events: of a trace in Chrome's format: kernels have the category "kernel", begin at "ts" and
            take "dur", both in microseconds.
    """
    kinds: dict[bool, list[Interval]] = {True: [], False: []}
    for event in events:
        if event.get("cat") == "kernel":
            begin = float(event["ts"])
            kinds["nccl" in event["name"].lower()].append((begin, begin + float(event["dur"])))
    reduced, computed = _merged(kinds[True]), _merged(kinds[False])
    return {
        "reducing": _length(reduced) / 1e6,
        "computing": _length(computed) / 1e6,
        "both at once": _common(reduced, computed) / 1e6,
    }


def _merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same times without overlap, in order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def _common(some: list[Interval], others: list[Interval]) -> float:
    """Return the length of what two lists of merged intervals have in common."""
    total, i, j = 0.0, 0, 0
    while i < len(some) and j < len(others):
        begin, end = max(some[i][0], others[j][0]), min(some[i][1], others[j][1])
        total += max(0.0, end - begin)
        if some[i][1] < others[j][1]:
            i += 1
        else:
            j += 1
    return total
