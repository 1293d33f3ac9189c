"""Checks of the available memory before a large allocation.

Linux lets a process allocate more memory than exists, and kills a process when it writes too much.
"""

from __future__ import annotations

import errno
import functools
import itertools
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from flashlight_py.cores import control_groups
from flashlight_py.device import Array
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.verbs import BARRIER

ROOT = Path("/")  # parent of /proc and /sys; tests replace it

# Number of bytes (all ranks of a host) below which no check is made. A check takes 0.1 ms.
LITTLE = 64 << 20
# Fraction of the available memory that remains free for other needs.
_RESERVE = 1 / 20
# Bytes that are allocated after one check. Other processes may allocate meanwhile.
_CHUNK_BYTES = 256 << 20

# For control groups of version 2 and 1: file of the limit, file of the used bytes, and prefix of
# names in memory.stat.
_FILES = [
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
]


def available(ranks: int = 1) -> tuple[int, str]:
    """Return the number of bytes that this process may still allocate, and the limiting resource.

    The memory of the machine is divided by ``ranks``, the number of processes that each allocate as
    much. The limits of control groups are not divided. File caches count as free. Free swap counts
    too, but not for control groups.
    """
    free: list[tuple[int, str]] = _if_known(_of_machine, ranks)
    for limit in _limits(ROOT):
        free += _if_known(_of_group, *limit)
    return min(free, default=(sys.maxsize, "no limit is known"))


def require_memory(nbytes: int, purpose: str, ranks: int = 1) -> None:
    """Raise MemoryError with ``purpose`` if ``ranks`` processes cannot get ``nbytes`` each."""
    if nbytes * ranks < LITTLE:
        return
    if nbytes >= 16 * LITTLE:  # read the limits again (1 ms)
        _limits.cache_clear()
    free, limit = available(ranks)
    if nbytes > free * (1 - _RESERVE):
        raise MemoryError(
            f"{purpose}: {nbytes:,} bytes are needed, and {max(free, 0):,} are available "
            f"({limit}), of which {_RESERVE:.0%} stay free. Use less memory, start fewer ranks on "
            "this host, or give the job more memory (docker run --memory, srun --mem)"
        )


def ordinary_empty(shape: tuple[int, ...], dtype: np.dtype[Any], ranks: int = 1) -> Array:
    """Return ``numpy.empty``. Raise MemoryError if the host has too little for ``ranks`` arrays."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes * ranks >= LITTLE:  # no text is built for small arrays
        require_memory(nbytes, f"an array of {dtype} {shape}", ranks)
    return np.empty(shape, dtype)


def shared_arrays(backend: Backend, shape: tuple[int, ...], dtype: np.dtype[Any]) -> list[Array]:
    """Return the new, uninitialised arrays of all ranks, in memory that all ranks map. Collective.

    If the ranks of ``backend`` share no memory, return a list with one ordinary array. If memory is
    short, only this rank raises MemoryError, and the caller must notify the other ranks.
    """
    if backend.shared_by_all is not None:
        return backend.shared_by_all(shape, dtype)  # type: ignore[no-any-return]
    backend.start(Call(BARRIER, part_of="shared_empty")).wait()
    return [ordinary_empty(shape, dtype)]


def shared_array(backend: Backend, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    arrays = shared_arrays(backend, shape, dtype)
    return arrays[backend.rank if len(arrays) > 1 else 0]


def reserve(fd: int, nbytes: int, purpose: str) -> None:
    """Extend the file in memory ``fd`` to ``nbytes``, and allocate its pages.

    Without this, the kernel could kill a process that writes to the file. Raises MemoryError like
    ``require_memory``, and OSError if the file system is too small. The file then does not change.
    """
    before = os.fstat(fd).st_size
    if hasattr(os, "fstatvfs"):
        system = os.fstatvfs(fd)
        free = system.f_bavail * system.f_frsize if system.f_blocks else nbytes
        if nbytes - before > free:
            raise OSError(errno.ENOSPC, f"{purpose}: {nbytes:,} bytes are needed, {free:,} free")
    try:
        for start in range(before, nbytes, _CHUNK_BYTES):
            require_memory(nbytes - start, purpose)
            count = min(_CHUNK_BYTES, nbytes - start)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, start, count)
            else:
                os.lseek(fd, start, os.SEEK_SET)
                os.write(fd, bytes(count))
    except BaseException:
        os.ftruncate(fd, before)
        raise


def _of_machine(ranks: int) -> tuple[int, str]:
    table = _numbers(ROOT / "proc/meminfo")
    nbytes = 1024 * (int(table["MemAvailable:"]) + int(table.get("SwapFree:", 0)))
    shared = f", by each of {ranks} ranks" if ranks > 1 else ""
    return nbytes // ranks, f"MemAvailable of /proc/meminfo{shared}"


def _of_group(group: Path, limit: int, name: str, used: str, caches: str) -> tuple[int, str]:
    stat = _numbers(group / "memory.stat")
    cached = sum(int(stat.get(f"{caches}{kind}_file", 0)) for kind in ("inactive", "active"))
    return limit - int((group / used).read_text()) + cached, f"{name} of the control group {group}"


@functools.lru_cache(maxsize=1)
def _limits(root: Path) -> list[tuple[Path, int, str, str, str]]:
    """Return the control groups of this process whose limit is below the memory of the machine."""
    machine = _if_known(lambda: 1024 * int(_numbers(root / "proc/meminfo")["MemTotal:"]))
    limits = []
    for group, (name, used, caches) in itertools.product(control_groups(root), _FILES):
        values = _if_known(lambda file: int(file.read_text()), group / name)
        limits += [(group, limit, name, used, caches) for limit in values]
    return [limit for limit in limits if limit[1] < min(machine, default=sys.maxsize)]


def _numbers(path: Path) -> dict[str, str]:
    return dict(itertools.pairwise(path.read_text().split()))


def _if_known(read: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return ``[read(*arguments)]``, or [] if the value cannot be read."""
    try:
        return [read(*arguments)]
    # A file or a line may be missing, and a limit may be "max". Such a value counts as no limit: an
    # error on only one rank would block the other ranks.
    except (OSError, ValueError, KeyError, IndexError):
        return []
