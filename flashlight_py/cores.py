"""The processor cores and the memory of a host, and how many processes they are enough for."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

__all__ = ["MOST_RANKS", "check_processes", "fair_share", "thread_variables", "usable_cores"]

_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
MOST_RANKS = 1 << 17  # of a job on any number of hosts
# The least memory of a process, in bytes; descriptors that are left for other purposes.
_PROCESS_BYTES, _OTHER_DESCRIPTORS = 4 << 20, 64


def usable_cores() -> int:
    """Return how many cores this process may use: by its affinity, and by a container's quota."""
    return _within_quota(len(os.sched_getaffinity(0)))


def check_processes(what: str, count: int, descriptors: int) -> None:
    """Check that this process can start ``count`` others, with ``descriptors`` open for each.

    Raises:
        ValueError: the host has too little memory, or the limit of descriptors is too low.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if _MEMORY_LIMIT.exists() and (limit := _MEMORY_LIMIT.read_text().strip()).isdecimal():
        memory = min(memory, int(limit))
    bounds = [(memory // _PROCESS_BYTES, f"{memory >> 20} MB of memory, {_PROCESS_BYTES >> 20}")]
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY:
        rest = (files - _OTHER_DESCRIPTORS) // descriptors
        bounds.append((rest, f"{files} descriptors (ulimit -n), {descriptors}"))
    most, why = min(bounds)
    if count > max(1, most):
        raise ValueError(
            f"{what}: expected 1 to {max(1, most)} processes on this host, which has {why} for "
            f"each, got {count}; start fewer"
        )


def thread_variables(environ: Mapping[str, str], processes: int, cores: int) -> dict[str, str]:
    """Return the settings with which ``processes`` share ``cores``; values that the user set stand.

    OpenBLAS and MKL follow OMP_NUM_THREADS where they have no setting of their own.
    """
    if "OMP_NUM_THREADS" in environ:
        return {}
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    share = str(max(1, cores // processes))
    return {name: share for name in names if name not in environ}


def fair_share(rank: int, affinities: Sequence[AbstractSet[int]]) -> int:
    """Return how many threads ``rank`` may compute with, given the cores that each rank may use.

    Ranks that a launcher has bound to cores of their own use these; those that may use all of a
    host divide them; at least 1.

    Example:
        >>> fair_share(0, [{0, 1, 2, 3}, {0, 1, 2, 3}]), fair_share(0, [{0, 1}, {2, 3}])
        (2, 2)
    """
    together = _within_quota(len(frozenset().union(*affinities)))
    return max(1, min(len(affinities[rank]), together // len(affinities)))


def _within_quota(cores: int) -> int:
    if not _CPU_QUOTA.exists():
        return cores
    return min(cores, cores_of_quota(_CPU_QUOTA.read_text()) or cores)


def cores_of_quota(cpu_max: str) -> int | None:
    """Return the cores that cgroup 2's ``cpu.max`` amounts to; None: no limit.

    ``150000 100000``: 150 ms of processor time in each 100 ms, rounded up to two cores.
    """
    quota, _, period = cpu_max.partition(" ")
    return math.ceil(int(quota) / int(period)) if quota.isdecimal() else None
