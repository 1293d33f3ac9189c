"""The available memory, which is asked before much of it is taken.

The kernel promises more memory than there is, and ends any process once too much is written.
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
from typing import Any, Protocol, runtime_checkable

import numpy as np

from flashlight_py.cores import control_groups
from flashlight_py.device import Array
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.verbs import BARRIER

ROOT = Path("/")  # of /proc and /sys; tests have others

# Bytes of all ranks of a host that need no question, which takes 0.1 ms.
LITTLE = 64 << 20
# Of what there is this much stays free: processes need some for what they do.
_KEPT = 1 / 20
# What is reserved between two questions, as others may take memory meanwhile.
_PIECE = 256 << 20

# The files of a control group with its limit and its use, and a prefix of its caches: of version 2
# and of version 1.
_FILES = [
    ("memory.max", "memory.current", ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
]


@runtime_checkable
class SharesMemory(Protocol):
    """A backend that makes arrays for ``shared_arrays``."""

    def shared_by_all(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> list[Array]: ...


def available(ranks: int = 1) -> tuple[int, str]:
    """Return how many bytes this process may still take, and what limits them, in words.

    Each of ``ranks`` on this machine may take as many, each in its own control group. Caches of
    files count as free, and swap too, except for the limits of control groups.
    """
    free: list[tuple[int, str]] = _known(_of_machine, ranks)
    for limit in _limits(ROOT):
        free += _known(_of_group, *limit)
    return min(free, default=(sys.maxsize, "no limit is known"))


def require(nbytes: int, what: str, ranks: int = 1) -> None:
    """Raise a MemoryError that says ``what`` needs ``nbytes``, unless they are ``available``."""
    if nbytes * ranks < LITTLE:
        return
    if nbytes >= 16 * LITTLE:  # worth 1 ms: control groups may have got other limits
        _limits.cache_clear()
    free, limit = available(ranks)
    if nbytes > free * (1 - _KEPT):
        raise MemoryError(
            f"{what}: {nbytes:,} bytes are needed, and {max(free, 0):,} can be had ({limit}), of "
            f"which {_KEPT:.0%} stay free. Ask for less, start fewer ranks on this host, or give "
            "the job more memory (docker run --memory, srun --mem)"
        )


def ordinary_empty(shape: tuple[int, ...], dtype: np.dtype[Any], ranks: int = 1) -> Array:
    """Return ``numpy.empty``; a MemoryError where ``ranks`` of this machine have no room for it."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes * ranks >= LITTLE:  # the words take longer than a small array
        require(nbytes, f"an array of {dtype} {shape}", ranks)
    return np.empty(shape, dtype)


def shared_arrays(backend: Backend, shape: tuple[int, ...], dtype: np.dtype[Any]) -> list[Array]:
    """Return a new array of each rank, not initialised, in memory that all ranks see. Collective.

    If the ranks of ``backend`` share no memory, the list has only this rank's array. If there is
    not enough memory, this rank alone raises MemoryError: the caller must notify the other ranks.
    """
    if isinstance(backend, SharesMemory):
        return backend.shared_by_all(shape, dtype)
    backend.start(Call(BARRIER, part_of="shared_empty")).wait()
    return [ordinary_empty(shape, dtype)]


def shared_array(backend: Backend, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Return this rank's array of ``shared_arrays``, which is cheap to reduce."""
    arrays = shared_arrays(backend, shape, dtype)
    return arrays[backend.rank if len(arrays) > 1 else 0]


def reserve(fd: int, nbytes: int, what: str) -> None:
    """Let a file in memory have ``nbytes`` of it now; on an error it stays as it was.

    Later a lack would end the process that writes there, or another. Raises MemoryError as
    ``require``, and OSError if the file system is too small.
    """
    before, system = os.fstat(fd).st_size, os.fstatvfs(fd)
    room = system.f_bavail * system.f_frsize if system.f_blocks else nbytes
    if nbytes - before > room:
        raise OSError(errno.ENOSPC, f"{what}: its file system has {room:,} bytes of {nbytes:,}")
    try:
        for start in range(before, nbytes, _PIECE):
            require(nbytes - start, what)
            os.posix_fallocate(fd, start, min(_PIECE, nbytes - start))
    except BaseException:
        os.ftruncate(fd, before)
        raise


def _of_machine(ranks: int) -> tuple[int, str]:
    table = _words_after(ROOT / "proc/meminfo")
    nbytes = 1024 * (int(table["MemAvailable:"]) + int(table.get("SwapFree:", 0)))
    shared = f", by each of {ranks} ranks" if ranks > 1 else ""
    return nbytes // ranks, f"MemAvailable of /proc/meminfo{shared}"


def _of_group(group: Path, limit: int, name: str, used: str, caches: str) -> tuple[int, str]:
    stat = _words_after(group / "memory.stat")
    cached = sum(int(stat.get(f"{caches}{kind}_file", 0)) for kind in ("inactive", "active"))
    return limit - int((group / used).read_text()) + cached, f"{name} of the control group {group}"


@functools.lru_cache(maxsize=1)
def _limits(root: Path) -> list[tuple[Path, int, str, str, str]]:
    """Return the control groups above this process that may have less than the machine has."""
    machine = _known(lambda: 1024 * int(_words_after(root / "proc/meminfo")["MemTotal:"]))
    found = []
    for group, (name, used, caches) in itertools.product(control_groups(root), _FILES):
        limits = _known(lambda file: int(file.read_text()), group / name)
        found += [(group, limit, name, used, caches) for limit in limits]
    return [each for each in found if each[1] < min(machine, default=sys.maxsize)]


def _words_after(path: Path) -> dict[str, str]:
    """Return the word after each: numbers by their names, of a file with lines of both."""
    return dict(itertools.pairwise(path.read_text().split()))


def _known(read: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return a list of what is read, which is empty where that is not known."""
    try:
        return [read(*arguments)]
    # A kernel may lack a file or a line, a group have no limit ("max") or be gone, and a container
    # show other things. That does not limit: an error, on one rank alone, would hang the others.
    except (OSError, ValueError, KeyError, IndexError):
        return []
