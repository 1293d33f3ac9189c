"""all_reduce on GPUs: the contenders, the tables, and the numbers that the package must reach."""

import argparse
import functools
import importlib.util
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.conductor import Conductor, Contender
from harness.environments import PEERS, python_of
from harness.launchers import Library
from harness.report import duration, markdown, size_name
from harness.statistics import Measurement, median
from harness.verdicts import Verdict, at_most

__all__ = ["case_line", "contenders", "host_times", "launch_table", "verdicts"]

OURS, CUPY, CUPYX = "flashlight_py", "raw NCCL (cupy.cuda.nccl)", "cupyx.distributed"
SAME, NCCL4PY = "raw NCCL, same communicator", "nccl4py"
TORCH, TORCH2 = "torch nccl", "torch nccl2"
RAW = (CUPY, SAME)
TITLES = (OURS, SAME, CUPY, CUPYX, NCCL4PY, TORCH, TORCH2)
KB, MB = 1 << 10, 1 << 20
SMALL, LARGE = 64 * KB, 64 * MB  # bytes: the largest small array, the smallest large array
ALLOWED = 3e-6  # seconds of a small array beyond the fastest peer
ALLOWED_LAUNCH = 10e-6  # seconds of the host for a launch beyond raw NCCL
PROBE_SECONDS = 30.0
HostTimes = dict[tuple[int, int], dict[str, float]]


def contenders(options: argparse.Namespace, ranks: int, absent: dict[str, str]) -> list[Contender]:
    """Return this package and its peers. Add a missing peer to ``absent`` with the reason."""
    interpreter = Path(sys.executable)
    roles = {OURS: "flashlight_cuda", CUPY: "cupy_nccl", CUPYX: "cupyx_nccl"}
    if ranks > 1:  # a world of one rank has no communicator
        roles[SAME] = "flashlight_nccl"
    libraries = [Library(title, role, interpreter) for title, role in roles.items()]
    if importlib.util.find_spec("nccl") is None:
        absent[NCCL4PY] = "not installed: pip install nccl4py"
    else:
        libraries.append(Library(NCCL4PY, "nccl4py_nccl", interpreter))
    torch = python_of(PEERS["torch"], options.environments)
    if isinstance(torch, Path):
        libraries.append(Library(TORCH, "torch_cuda", torch))
        if reason := _without_nccl2(torch):
            absent[TORCH2] = reason
        else:
            libraries.append(Library(TORCH2, "torch_cuda", torch, options={"backend": "nccl2"}))
    else:
        absent[TORCH] = absent[TORCH2] = torch
    return [Contender(library.title, library, ranks) for library in libraries]


@functools.cache
def _without_nccl2(python: Path) -> str:
    """Return why the torch of ``python`` has no backend nccl2, or "" if it has one."""
    ask = "import torch; from torch.distributed import is_backend_available as known; "
    ask += "print(torch.__version__, known('nccl2'))"
    try:
        done = subprocess.run(
            [str(python), "-c", ask],
            capture_output=True,
            text=True,
            check=True,
            timeout=PROBE_SECONDS,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"torch could not be asked for nccl2: {error}"
    version, is_available = done.stdout.split()[-2:]
    return "" if is_available == "True" else f"torch {version} has no backend nccl2"


def case_line(measurement: Measurement, launches: Mapping[str, float]) -> str:
    """Return the medians of one case as one line of text, with the host times to launch."""
    cells = []
    for title, seconds in measurement.seconds.items():
        launch = f" (launch {_microseconds(launches[title])})" if title in launches else ""
        cells.append(f"{title} {duration(median(seconds))}{launch}")
    cells += [f"{title} left out: {why}" for title, why in measurement.left_out.items()]
    name = f"{measurement.ranks} ranks, {size_name(measurement.nbytes)}"
    return f"{name}: {'; '.join(cells) or 'nothing measured'}"


def host_times(conductor: Conductor) -> dict[str, float]:
    """Return each contender's seconds for a launch of the last case, of its slowest rank."""
    details = conductor.details.items()
    return {title: max(seconds) for title, seconds in details if None not in seconds}


def launch_table(times: HostTimes) -> str:
    """Return the host's microseconds for one launch, as Markdown."""
    titles = [title for title in TITLES if any(title in measured for measured in times.values())]
    rows = [
        [str(ranks), size_name(nbytes), *(_microseconds(measured.get(title)) for title in titles)]
        for (ranks, nbytes), measured in times.items()
        if measured
    ]
    return markdown(["ranks", "bytes", *titles], rows)


def _microseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:.1f} us"


def verdicts(measurements: Sequence[Measurement], times: HostTimes) -> list[Verdict]:
    """Judge the host time to launch, the time of small arrays and the time of large arrays.

    The bounds are raw NCCL plus ALLOWED_LAUNCH, the fastest peer plus ALLOWED, and raw NCCL.
    """
    launches = {
        f"{ranks} ranks, {size_name(nbytes)}": [_to_raw(seconds)]
        for (ranks, nbytes), seconds in times.items()
        if OURS in seconds and any(title in seconds for title in RAW)
    }
    small, large = (
        {
            f"{m.ranks} ranks, {size_name(m.nbytes)}": ratios(m)
            for m in measurements
            if first <= m.nbytes <= last
        }
        for first, last, ratios in ((0, SMALL, _small), (LARGE, 1 << 40, _large))
    )
    beyond = f"to raw NCCL's plus {ALLOWED_LAUNCH * 1e6:g} us"
    return [
        at_most(f"host time to launch, up to {size_name(SMALL)}, {beyond}", 1.0, launches),
        at_most(f"time up to {size_name(SMALL)}, {BEYOND}", 1.0, small),
        at_most(f"time from {size_name(LARGE)} on, to raw NCCL's", 1.02, large),
    ]


BEYOND = f"to the fastest peer's plus {ALLOWED * 1e6:g} us"


def _to_raw(seconds: Mapping[str, float]) -> float:
    """Return the launch time divided by its bound.

    The faster raw call counts: CuPy's communicator may be of another kind than the package's.
    """
    raw = min(seconds[title] for title in RAW if title in seconds)
    return seconds[OURS] / (raw + ALLOWED_LAUNCH)


def _to_fastest(seconds: Mapping[str, float]) -> float:
    return seconds[OURS] / (min(v for title, v in seconds.items() if title != OURS) + ALLOWED)


def _small(measurement: Measurement) -> list[float]:
    if OURS not in measurement.seconds or len(measurement.seconds) < 2:
        return []
    titles, rounds = list(measurement.seconds), zip(*measurement.seconds.values(), strict=True)
    return [_to_fastest(dict(zip(titles, values, strict=True))) for values in rounds]


def _large(measurement: Measurement) -> list[float]:
    return measurement.ratios(OURS, CUPY)
