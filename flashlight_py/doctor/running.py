"""A short all_reduce on each path, in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashlight_py import _native
from flashlight_py.cores import thread_variables, usable_cores
from flashlight_py.doctor import mpi
from flashlight_py.doctor.finding import Finding, State
from flashlight_py.doctor.gpu import usable_gpus
from flashlight_py.errors import BackendUnavailableError
from flashlight_py.launch.failures import Tail, is_consequence
from flashlight_py.launch.ranks import rank_variables

__all__ = ["LARGE_BYTES", "SMALL_BYTES", "Way", "look", "tried"]

SMALL_BYTES, LARGE_BYTES = 4, 4 << 20

_RANK_MAIN = "flashlight_py.doctor.rank_main"
_REMEDY = "docs/errors.md says what such errors mean; docs/mpi.md is about MPI"


@dataclass(frozen=True)
class Way:
    """One way to move arrays: how many ranks try it, and by which ``BACKEND``.

    ``absent`` says why it cannot be expected to work here; ``hosts`` are how many hosts the ranks
    are to take themselves to be on; ``starter`` is the ``mpirun`` that starts them.
    """

    name: str
    ranks: int
    backend: str = "auto"
    absent: str = ""
    hosts: int = 1
    starter: tuple[str, ...] = ()
    device: str = "cpu"


def look(timeout: float) -> Iterator[Finding]:
    """Try each way, for ``timeout`` seconds at most; those that cannot work here are told of."""
    for way in _ways():
        yield Finding(way.name, State.MISSING, way.absent) if way.absent else tried(way, timeout)


def _ways() -> Iterator[Way]:
    shm, gloo = _missing("shm"), _missing("gloo")
    yield Way("single", 1)
    yield Way("shm", 2, "shm", shm)
    yield Way("gloo", 2, "gloo", gloo)
    yield Way("hierarchical", 4, absent=shm or gloo, hosts=2)
    yield Way("mpi", 2, "mpi", mpi.absence(), starter=tuple(mpi.mpirun_command(2) or ()))
    gpus = usable_gpus()
    absent = "" if gpus > 1 else f"needs two GPUs with CuPy and NCCL, {gpus} can be used here"
    yield Way("nccl", 2, "nccl", absent, device="cuda")


def _missing(extension: str) -> str:
    try:
        _native.load(extension)
    except BackendUnavailableError:
        return f"the extension {extension} is missing"
    return ""


def tried(way: Way, timeout: float) -> Finding:
    """Start the ranks of ``way``, wait for ``timeout`` seconds at most, and tell what came out."""
    with tempfile.TemporaryDirectory(prefix="flashlight-doctor-") as folder:
        ends = time.monotonic() + timeout
        processes = [
            _started(way, command, variables)
            for command, variables in _commands(way, Path(folder), timeout)
        ]
        try:
            outputs = [_output(process, ends) for process in processes]
        finally:
            _end(processes)
    codes = [process.returncode for process in processes]
    if any(codes) or any(output is None for output in outputs):
        return _failed(way, codes, outputs, timeout)
    return _finding_of(way, str(outputs[0]))


def _commands(
    way: Way, folder: Path, timeout: float
) -> Iterator[tuple[list[str], Mapping[str, str]]]:
    """Yield the command and the variables of each process to start."""
    told = json.dumps({"BACKEND": way.backend, "TIMEOUT": timeout})
    sizes = [str(size) for size in (SMALL_BYTES, LARGE_BYTES)]
    program = [sys.executable, "-m", _RANK_MAIN, told, way.device, *sizes]
    if way.starter:
        yield [*way.starter, *program], {}
        return
    for rank in range(way.ranks):
        variables = rank_variables(rank, way.ranks, str(folder / "meet"))
        host = str(rank * way.hosts // way.ranks)
        yield program, {**variables, "FLASHLIGHT_MEMORY_DOMAIN": f"doctor-{host}"}


def _started(
    way: Way, command: Sequence[str], variables: Mapping[str, str]
) -> subprocess.Popen[str]:
    threads = thread_variables(os.environ, way.ranks, usable_cores())
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, **threads, **variables},
        start_new_session=True,
    )


def _output(process: subprocess.Popen[str], ends: float) -> str | None:
    """Return what ``process`` has written; None: it has not ended in time."""
    try:
        return process.communicate(timeout=max(0.0, ends - time.monotonic()))[0]
    except subprocess.TimeoutExpired:
        return None


def _end(processes: Sequence[subprocess.Popen[str]]) -> None:
    """Kill what is left of each process's session."""
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _finding_of(way: Way, output: str) -> Finding:
    """Tell of a way whose ranks have ended well what rank 0 told, among whatever else it wrote."""
    told = _told(output)
    if told is None:
        return Finding(way.name, State.FAILED, f"exit code 0: {_last_words(output)[-1]}", _REMEDY)
    if told["ranks"] != way.ranks:
        met = f"{told['ranks']} of {way.ranks} ranks have met; is mpirun of another MPI?"
        return Finding(way.name, State.FAILED, met, _REMEDY)
    return Finding(way.name, State.OK, _speed(told))


def _told(output: str) -> dict[str, Any] | None:
    """Return the last object of JSON that stands in a line of ``output``."""
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                return dict(json.loads(line))
    return None


def _failed(
    way: Way, codes: Sequence[int], outputs: Sequence[str | None], timeout: float
) -> Finding:
    """Tell of the first rank that failed, of itself if one did; else that time was up."""
    failed = [
        (code, _last_words(output))
        for code, output in zip(codes, outputs, strict=True)
        if output is not None and code != 0
    ]
    if not failed:
        return Finding(way.name, State.FAILED, f"has not ended within {timeout:g} s", _REMEDY)
    code, words = min(failed, key=lambda each: is_consequence(each[1]))
    return Finding(way.name, State.FAILED, f"exit code {code}: {words[-1]}", _REMEDY)


def _last_words(output: str) -> list[str]:
    """Return what the last chain of tracebacks ended with, else the last line."""
    tail, last = Tail(), "it wrote nothing"
    for line in filter(str.strip, output.splitlines()):
        tail.read(line.encode())
        last = line
    return tail.errors or [last]


def _speed(told: Mapping[str, Any]) -> str:
    small, large = told["seconds"]
    times = f"{_duration(small)} and {_duration(large)}"
    if told["ranks"] == 1:
        return f"{times}; one rank, nothing moves"
    rate = LARGE_BYTES / large / 1e9
    return f"{times} ({rate:.2g} GB/s); {told['ranks']} ranks, {told['path']}"


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"
