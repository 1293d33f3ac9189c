"""The processor cores and the memory of a host, and how many processes they are enough for."""

from __future__ import annotations

import itertools
import math
import os
import re
import resource
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path

ROOT = Path("/")  # of /proc and /sys; tests have others
# The files of a control group with its quota and the period of that: of version 2, and of 1.
_QUOTAS = ("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")
MOST_RANKS = 1 << 17  # of a job on any number of hosts
# The least memory of a process, in bytes; descriptors that are left for other purposes.
_PROCESS_BYTES, _OTHER_DESCRIPTORS = 4 << 20, 64


def usable_cores() -> int:
    """Return how many cores this process may use: by its affinity, and by a container's quota."""
    return _within_quota(len(os.sched_getaffinity(0)))


def check_processes(what: str, count: int, descriptors: int) -> None:
    """Check that this process can start ``count`` others, with ``descriptors`` open for each.

    Raises ValueError if the host has too little memory, or the limit of descriptors is too low.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no limit ("max"), or no such file
        memory = min(memory, int((ROOT / "sys/fs/cgroup/memory.max").read_text()))
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


def check_folder(name: str) -> None:
    """Raise FileNotFoundError if the current folder was deleted: no process can start in it."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{name}: the current folder, where processes would start, was deleted; call os.chdir"
        ) from error


def thread_variables(environ: Mapping[str, str], processes: int, cores: int) -> dict[str, str]:
    """Return the variables with which ``processes`` share ``cores``, without the user's variables.

    OpenBLAS and MKL follow OMP_NUM_THREADS if they have no variable of their own.
    """
    if "OMP_NUM_THREADS" in environ:
        return {}
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    share = str(max(1, cores // processes))
    return {name: share for name in names if name not in environ}


def fair_share(rank: int, affinities: Sequence[AbstractSet[int]]) -> int:
    """Return how many threads ``rank`` may compute with, given the cores that each rank may use.

    A rank that is bound to cores uses these; ranks that may use the same cores divide them.
    """
    together = _within_quota(len(frozenset().union(*affinities)))
    return max(1, min(len(affinities[rank]), together // len(affinities)))


def _within_quota(cores: int) -> int:
    """Return ``cores``, or fewer if a control group has less: 150 ms in each 100 ms are two."""
    for group, files in itertools.product(control_groups(ROOT), _QUOTAS):
        with suppress(OSError, ValueError):  # no limit ("max", -1), or no such file
            quota, period = map(int, " ".join((group / f).read_text() for f in files).split())
            cores = min(cores, math.ceil(quota / period)) if quota > 0 else cores
    return cores


def control_groups(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control groups and their parents; some may be missing."""
    with suppress(OSError):
        for names, path in re.findall(":(.*?):(.*)", (root / "proc/self/cgroup").read_text()):
            # Version 2 has one hierarchy. Version 1 has one per set of controllers, which it names.
            for name in {names, *names.split(",")} if names else ("", "unified"):
                mount = root / "sys/fs/cgroup" / name
                # A container may see its own group alone, as the mount, by a longer path.
                groups = (mount / path.lstrip("/") / "x").parents
                yield from (group for group in groups if group.is_relative_to(mount))
