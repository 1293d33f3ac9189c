"""A short all_reduce on each path, in processes of their own, each of which runs this module.

``python -m flashlight_py.doctor.trial_run BACKEND DEVICE HOSTS SECONDS`` is one rank: it joins a
world, reduces some arrays and checks the sums; rank 0 prints one line of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from flashlight_py import distributed as fl
from flashlight_py.device import to_device
from flashlight_py.doctor import Finding, Health, mpi
from flashlight_py.launch.failures import Tail

SMALL_BYTES, LARGE_BYTES = 4, 4 << 20
TITLE = f"all_reduce of {SMALL_BYTES} B and {LARGE_BYTES >> 20} MB, float32"

_MODULE = "flashlight_py.doctor.trial_run"
_SIZES, _ROUNDS = {SMALL_BYTES: 50, LARGE_BYTES: 5}, 5  # how often each is reduced in a round
_GRACE_SECONDS = 10.0
_REMEDY = "docs/errors.md says what such errors mean; docs/mpi.md is about MPI"


class Way(NamedTuple):
    """One way to move arrays: how many ranks try it, and by which ``BACKEND``.

    ``needs`` are the findings without which it cannot be expected to work here; ``hosts`` are how
    many hosts the ranks are to take themselves to be on; ``starter`` is the command that starts
    them, by default the launcher's.
    """

    name: str
    ranks: int
    backend: str = "auto"
    needs: tuple[str, ...] = ()
    hosts: int = 1
    device: str = "cpu"
    starter: tuple[str, ...] = ()


_WAYS = (
    Way("single", 1),
    Way("shm", 2, "shm", ("shm",)),
    Way("gloo", 2, "gloo", ("gloo",)),
    Way("hierarchical", 4, needs=("shm", "gloo"), hosts=2),
    Way("mpi", 2, "mpi", ("library", "mpirun")),
    Way("nccl", 2, "nccl", ("CuPy", "NCCL", "cuda:1"), device="cuda"),
)


def look(timeout: float, found: Iterable[Finding]) -> Iterator[Finding]:
    """Try each way, for ``timeout`` seconds at most, unless what it needs was not ``found``."""
    mpirun = mpi.mpirun_command(2)  # also one that is of another MPI, as it seems, is tried
    there = {each.what for each in found if each.state is Health.OK}
    there |= {"mpirun"} if mpirun else set()
    for way in _WAYS:
        absent = [need for need in way.needs if need not in there]
        if absent:
            yield Finding(way.name, Health.MISSING, f"needs what is not here: {', '.join(absent)}")
        else:
            starter = tuple(mpirun or ()) if way.backend == "mpi" else ()
            yield tried(way._replace(starter=starter), timeout)


def tried(way: Way, timeout: float) -> Finding:
    """Start the ranks of ``way``, wait for ``timeout`` seconds at most, and report the result."""
    launcher = (sys.executable, "-m", "flashlight_py.launch", "-n", str(way.ranks), "-m")
    started = (*way.starter, sys.executable, "-m") if way.starter else launcher
    program = (_MODULE, way.backend, way.device, str(way.hosts), str(timeout))
    with subprocess.Popen(
        [*started, *program],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            return Finding(way.name, Health.FAILED, f"has not ended within {timeout:g} s", _REMEDY)
        finally:
            _end(process)
    result, tail, last = None, Tail(), "it wrote nothing"
    for line in filter(str.strip, output.splitlines()):
        tail.read(line.encode())
        last = line
        with contextlib.suppress(ValueError):  # no brace, or no JSON after it
            result = dict(json.loads(line[line.index("{") :]))  # rank 0's is the last
    if process.returncode or result is None:
        # What the launcher reports, or the last traceback ended with.
        problem = f"exit code {process.returncode}: {(tail.errors or [last])[-1]}"
        return Finding(way.name, Health.FAILED, problem, _REMEDY)
    if result["ranks"] != way.ranks:
        problem = f"{result['ranks']} of {way.ranks} ranks have met; is mpirun of another MPI?"
        return Finding(way.name, Health.FAILED, problem, _REMEDY)
    small, large = result["seconds"]
    rate = f" ({LARGE_BYTES / large / 1e9:.2g} GB/s)" if way.ranks > 1 else ""
    path = f"{way.ranks} ranks, {result['path']}" if way.ranks > 1 else "one rank, nothing moves"
    detail = f"{_duration(small)} and {_duration(large)}{rate}; {path}"
    return Finding(way.name, Health.OK, detail)


def _end(process: subprocess.Popen[str]) -> None:
    """Let a launcher that is there still end its ranks, and kill what is left of its session."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


def main(backend: str, device: str, hosts: str, timeout: str) -> None:
    """Be one rank; ``hosts`` is how many the ranks are to take themselves to be on."""
    if int(hosts) > 1:
        host = int(os.environ["RANK"]) * int(hosts) // int(os.environ["WORLD_SIZE"])
        os.environ["FLASHLIGHT_MEMORY_DOMAIN"] = f"doctor-{host}"
    fl.distributed_init(params={"BACKEND": backend, "TIMEOUT": float(timeout)})
    place = fl.use_local_device() if device == "cuda" else device
    seconds = [_seconds(place, nbytes, times) for nbytes, times in _SIZES.items()]
    path = fl.describe().splitlines()[1 if device == "cpu" else -1].partition(": ")[2]
    if fl.get_world_rank() == 0:
        print(json.dumps({"seconds": seconds, "ranks": fl.get_world_size(), "path": path}))
    fl.distributed_shutdown()


def _seconds(device: str, nbytes: int, times: int) -> float:
    """Return the seconds that a reduction of ``nbytes`` takes, in the best of some rounds."""
    array = to_device(np.ones(nbytes // 4, np.float32), device)
    fl.all_reduce(array)
    if not bool((array == fl.get_world_size()).all()):
        raise RuntimeError(f"the sum of {fl.get_world_size()} ones is {array}")
    array[...] = 0
    rounds = []
    for _ in range(_ROUNDS):
        fl.barrier()
        start = time.perf_counter()
        for _ in range(times):
            fl.all_reduce(array)
        fl.sync_distributed()
        rounds.append((time.perf_counter() - start) / times)
    return min(rounds)


if __name__ == "__main__":
    main(*sys.argv[1:])
