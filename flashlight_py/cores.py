"""Cores, memory and descriptors of a host, and the number of processes that they allow."""

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

ROOT = Path("/")  # parent of /proc and /sys; tests replace it
# Files with the quota and the period of a control group, in version 2 and in version 1.
_QUOTAS = ("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")
MOST_RANKS = 1 << 17  # maximum number of ranks of a job, over all hosts
# Minimum memory per process in bytes, and descriptors reserved for other purposes.
_PROCESS_BYTES, _OTHER_DESCRIPTORS = 4 << 20, 64


def usable_cores() -> int:
    """Return the number of cores that affinity and the container's quota allow to this process."""
    return _within_quota(len(os.sched_getaffinity(0)))


def check_processes(operation: str, count: int, descriptors: int) -> None:
    """Check that this process can start ``count`` processes, with ``descriptors`` open for each.

    Raises:
        ValueError: If the host has too little memory, or if the limit of descriptors is too low.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # no limit ("max"), or no such file
        memory = min(memory, int((ROOT / "sys/fs/cgroup/memory.max").read_text()))
    bounds = [(memory // _PROCESS_BYTES, f"{memory >> 20} MB of memory, {_PROCESS_BYTES >> 20}")]
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY:
        processes = (files - _OTHER_DESCRIPTORS) // descriptors
        bounds.append((processes, f"{files} descriptors (ulimit -n), {descriptors}"))
    limit, reason = min(bounds)
    if count > max(1, limit):
        raise ValueError(
            f"{operation}: expected 1 to {max(1, limit)} processes on this host, which has "
            f"{reason} for each, got {count}. Start fewer processes"
        )


def check_folder(name: str) -> None:
    """Raise FileNotFoundError if the current folder was deleted. No process can start in it."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{name}: the current folder was deleted, and processes start there. Call os.chdir"
        ) from error


def thread_variables(environ: Mapping[str, str], processes: int, cores: int) -> dict[str, str]:
    """Return variables that divide ``cores`` among ``processes``, except variables in ``environ``.

    The result is empty if ``environ`` has OMP_NUM_THREADS. OpenBLAS and MKL follow OMP_NUM_THREADS
    unless their own variable is set.
    """
    if "OMP_NUM_THREADS" in environ:
        return {}
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    share = str(max(1, cores // processes))
    return {name: share for name in names if name not in environ}


def fair_share(rank: int, affinities: Sequence[AbstractSet[int]]) -> int:
    """Return the number of compute threads for ``rank``. ``affinities[i]`` has the cores of rank i.

    A rank that is bound to its own cores uses all of them. Ranks with common cores divide them.
    """
    together = _within_quota(len(frozenset().union(*affinities)))
    return max(1, min(len(affinities[rank]), together // len(affinities)))


def _within_quota(cores: int) -> int:
    """Return ``cores``, or fewer if a control group has a lower quota.

    A quota of 150 ms per 100 ms counts as two cores.
    """
    for group, files in itertools.product(control_groups(ROOT), _QUOTAS):
        with suppress(OSError, ValueError):  # no limit ("max", -1), or no such file
            quota, period = map(int, " ".join((group / f).read_text() for f in files).split())
            cores = min(cores, math.ceil(quota / period)) if quota > 0 else cores
    return cores


def control_groups(root: Path) -> Iterator[Path]:
    """Yield the folders of this process's control groups and their parents; some may be missing."""
    with suppress(OSError):
        for names, path in re.findall(":(.*?):(.*)", (root / "proc/self/cgroup").read_text()):
            # Version 2 has one hierarchy. Version 1 has a hierarchy per named set of controllers.
            for name in {names, *names.split(",")} if names else ("", "unified"):
                mount = root / "sys/fs/cgroup" / name
                # In a container, ``mount`` may be this process's group, but ``path`` is the host's.
                groups = (mount / path.lstrip("/") / "x").parents
                yield from (group for group in groups if group.is_relative_to(mount))
