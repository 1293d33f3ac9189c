"""The processor cores of a process, and how the ranks of a host share them."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path

__all__ = ["fair_share", "thread_variables", "usable_cores"]

_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> int:
    """Return how many cores this process may use: by its affinity, and by a container's quota."""
    return _within_quota(len(os.sched_getaffinity(0)))


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
