"""What the environment of a rank says: its place, where to meet, how many threads to use."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

__all__ = ["rank_variables", "thread_variables", "usable_cores"]

_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def rank_variables(rank: int, size: int, file: str) -> dict[str, str]:
    """Return what tells ``distributed_init`` that this is ``rank`` of ``size``, on one host."""
    place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    return {**{name: str(value) for name, value in place.items()}, "FLASHLIGHT_FILE": file}


def thread_variables(environ: Mapping[str, str], processes: int, cores: int) -> dict[str, str]:
    """Return the settings with which ``processes`` share ``cores``; what the user set stands.

    OpenBLAS and MKL follow OMP_NUM_THREADS where they have no setting of their own.
    """
    if "OMP_NUM_THREADS" in environ:
        return {}
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    share = str(max(1, cores // processes))
    return {name: share for name in names if name not in environ}


def usable_cores() -> int:
    """Return how many cores this process may use: by its affinity, and by a container's quota."""
    cores = len(os.sched_getaffinity(0))
    if not _CPU_QUOTA.exists():
        return cores
    return min(cores, cores_of_quota(_CPU_QUOTA.read_text()) or cores)


def cores_of_quota(cpu_max: str) -> int | None:
    """Return the cores that cgroup 2's ``cpu.max`` amounts to; None: no limit.

    ``150000 100000``: 150 ms of processor time in each 100 ms, rounded up to two cores.
    """
    quota, _, period = cpu_max.partition(" ")
    return math.ceil(int(quota) / int(period)) if quota.isdecimal() else None
