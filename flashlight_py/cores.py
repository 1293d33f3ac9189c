"""Cores, memory and file descriptors of a host, and the number of processes that it can run."""

import functools
import itertools
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from pathlib import Path

ROOT = Path("/")  # tests replace it
# Files of a control group that contain its CPU quota and period, in cgroup version 2 and 1.
_QUOTAS = ("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")
MOST_RANKS = 1 << 17  # maximum number of ranks of a job
# Memory that a process needs at least, and file descriptors reserved for other purposes.
_PROCESS_BYTES, _OTHER_DESCRIPTORS = 4 << 20, 64


def usable_cores() -> int:
    """Return the number of cores that affinity and container quota allow this process to use."""
    return _within_quota(len(affinity()), ROOT)


def affinity() -> AbstractSet[int]:
    """Return the numbers of the cores on which this process may run; without Linux, all cores."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def check_processes(operation: str, count: int, descriptors: int) -> None:
    """Check that this process can start ``count`` processes, with ``descriptors`` open files each.

    Raises:
        ValueError: If memory or file descriptors do not suffice. The text names ``operation``.
    """
    try:
        import resource
    except ImportError:  # Windows; a process that cannot start raises OSError
        return
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # "max" (no limit), or no such file
        memory = min(memory, int((ROOT / "sys/fs/cgroup/memory.max").read_text()))
    text = f"{memory >> 20} MB of memory and needs {_PROCESS_BYTES >> 20}"
    bounds = [(memory // _PROCESS_BYTES, text)]
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY:
        processes = (files - _OTHER_DESCRIPTORS) // descriptors
        bounds.append((processes, f"{files} descriptors (ulimit -n) and needs {descriptors}"))
    limit, reason = min(bounds)
    if count > max(1, limit):
        raise ValueError(
            f"{operation}: expected 1 to {max(1, limit)} processes on this host, which has "
            f"{reason} for each process, got {count}. Start fewer"
        )


def check_folder(name: str) -> None:
    """Raise FileNotFoundError, with ``name`` in the message, if the current folder was deleted."""
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise FileNotFoundError(
            f"{name}: the current folder was deleted, so no process can start. Call os.chdir"
        ) from error


def thread_variables(environ: Mapping[str, str], processes: int, cores: int) -> dict[str, str]:
    """Return environment variables that give each process ``cores // processes`` compute threads.

    Variables that are set in ``environ`` are left out. If OMP_NUM_THREADS is set there, the result
    is empty, because OpenBLAS and MKL follow OMP_NUM_THREADS unless their own variable is set.
    """
    if "OMP_NUM_THREADS" in environ:
        return {}
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return {name: str(max(1, cores // processes)) for name in names if name not in environ}


def fair_share(rank: int, affinities: Sequence[AbstractSet[int]]) -> int:
    """Return the number of compute threads for ``rank``. ``affinities[i]`` has the cores of rank i.

    This is at most the rank's number of cores, and at most an equal share of all ranks' cores.
    """
    together = _within_quota(len(frozenset().union(*affinities)), ROOT)
    return max(1, min(len(affinities[rank]), together // len(affinities)))


@functools.lru_cache(maxsize=2)
def _within_quota(cores: int, root: Path) -> int:
    """Return ``cores``, or the quota of a control group if that is lower.

    A quota of 150 ms of CPU time per 100 ms counts as two cores.
    """
    for group, files in itertools.product(control_groups(root), _QUOTAS):
        with suppress(OSError, ValueError):  # "max" or -1 (no limit), or no such file
            quota, period = map(int, " ".join((group / f).read_text() for f in files).split())
            cores = min(cores, math.ceil(quota / period)) if quota > 0 else cores
    return cores


def control_groups(root: Path) -> Iterator[Path]:
    """Yield folders of this process's control groups and their parents. Some may not exist."""
    with suppress(OSError):
        for names, path in re.findall(":(.*?):(.*)", (root / "proc/self/cgroup").read_text()):
            # Version 2 has one hierarchy. Version 1 has one per named set of controllers.
            for name in {names, *names.split(",")} if names else ("", "unified"):
                mount = root / "sys/fs/cgroup" / name
                # In a container, ``path`` may not exist. The group's folder is then ``mount``.
                yield from (mount / group for group in Path(path.lstrip("/"), "x").parents)
