"""Trace of GPU kernels, and the time during which reductions overlap other kernels.

torch's profiler (CUPTI) records every kernel of the process, also kernels that other libraries
launch. Open the trace
in a browser at ui.perfetto.dev or chrome://tracing.
"""

import gzip
import importlib.util
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from flashlight_py.trace.profiling import covered

__all__ = ["overlap_of", "record"]


def record(step: Callable[[], object], steps: int, file: Path) -> dict[str, float] | str:
    """Call ``step`` several times, and write the trace of the GPU to ``file`` (ends in .json.gz).

    Returns:
        The result of :func:`overlap_of` per step, or the reason why there is no trace. The steps
        run
        in any case, because they communicate with other ranks.
    """
    profile = _begin()
    for _ in range(steps):
        step()
    if isinstance(profile, str):
        return profile
    try:
        profile.__exit__(None, None, None)
        profile.export_chrome_trace(str(file))
        with gzip.open(file, "rt") as text:
            overlap = overlap_of(json.load(text)["traceEvents"])
    except Exception as error:  # noqa: BLE001 (the benchmark goes on without a trace)
        return f"torch's profiler failed: {type(error).__name__}: {error}"
    return {name: seconds / steps for name, seconds in overlap.items()}


def _begin() -> Any:
    """Return torch's profiler, which records from now on, or the reason why it cannot record."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed; its profiler records the kernels"
    try:
        import torch

        torch.cuda.init()  # without it the profiler leaves CUDA out
        profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        profile.__enter__()
    except Exception as error:  # noqa: BLE001  (as above)
        return f"torch's profiler does not begin: {type(error).__name__}: {error}"
    return profile


def overlap_of(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return the seconds in which the GPU reduced, computed, and did both at the same time.

    Args:
        events: Events of a trace in Chrome's format. Kernels have the category "kernel", begin at
            "ts"
            and take "dur", both in microseconds.
    """
    kinds: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for event in events:
        if event.get("cat") == "kernel":  # in integer nanoseconds
            begin, took = (round(1e3 * float(event[name])) for name in ("ts", "dur"))
            kinds["nccl" in event["name"].lower()].append((begin, begin + took))
    reducing, computing = covered(kinds[True]), covered(kinds[False])
    both = reducing + computing - covered(kinds[True] + kinds[False])
    spans = {"reducing": reducing, "computing": computing, "both at once": both}
    return {name: nanoseconds / 1e9 for name, nanoseconds in spans.items()}
