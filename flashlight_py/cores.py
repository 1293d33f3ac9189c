"""The processor cores and the memory of a host, and how many processes they are enough for."""

from __future__ import annotations

import itertools
import math
import os
import re
import resource
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

__all__ = ["MOST_RANKS", "check_processes", "fair_share", "thread_variables", "usable_cores"]

ROOT = Path("/")  # of /proc and /sys; tests have others
# Of control groups: the controller between the colons of /proc/self/cgroup (version 2 has one
# hierarchy for all), where the groups are, and the files with a quota and its period.
_QUOTAS = [
    ("", "sys/fs/cgroup", "cpu.max"),
    ("", "sys/fs/cgroup/unified", "cpu.max"),
    ("cpu", "sys/fs/cgroup/cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us"),
    ("cpu", "sys/fs/cgroup/cpu,cpuacct", "cpu.cfs_quota_us", "cpu.cfs_period_us"),
]
_MEMORY_LIMIT = Path("/sys/fs/cgroup/memory.max")
Row: TypeAlias = tuple[str, ...]
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
    """Return ``cores``, or fewer if a control group has less: 150 ms in each 100 ms are two."""
    for group, (_, _, *files) in control_groups(ROOT, _QUOTAS):
        with suppress(OSError, ValueError):  # no limit ("max", -1), or no such file
            quota, period = map(int, " ".join((group / f).read_text() for f in files).split())
            cores = min(cores, math.ceil(quota / period)) if quota > 0 else cores
    return cores


def control_groups(root: Path, rows: Iterable[Row]) -> Iterator[tuple[Path, Row]]:
    """Yield the control groups that this process is in, and those above, for each of ``rows``.

    A row begins with a controller and where its groups are.
    """
    try:
        text = (root / "proc/self/cgroup").read_text()
    except OSError:
        return
    for (names, path), row in itertools.product(re.findall(":(.*?):(.*)", text), rows):
        controller, mount, *_ = row
        # A container may see its own group alone, where the mount is, by a longer path.
        for group in (root / mount / path.lstrip("/") / "x").parents:
            if controller in names.split(",") and group.is_relative_to(root / mount):
                yield group, row
