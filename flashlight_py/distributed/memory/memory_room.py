"""How much memory may still be taken, which is asked before much of it is.

The kernel promises more memory than there is. Once that has been written to, or where a file in
memory is to have it at once, it ends a process to find some: maybe one that has asked for little.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flashlight_py.device import Array

ROOT = Path("/")  # of /proc and /sys; tests have others

# Less is given without a question, which takes 0.1 ms.
_LITTLE = 1 << 20
# Of what there is this much stays free: processes need some for what they do.
_KEPT = 1 / 20
# What is reserved between two questions, as others may take memory meanwhile.
_PIECE = 256 << 20


class _Controller(NamedTuple):
    """Files of a version of control groups: what a group may have, has, and could do without."""

    mounts: tuple[str, ...]
    limit: str
    used: str
    cache: tuple[str, ...]


# By what stands between the colons of /proc/self/cgroup. Version 2 has one hierarchy for all.
_CONTROLLERS = {
    "": _Controller(
        ("sys/fs/cgroup", "sys/fs/cgroup/unified"),
        *("memory.max", "memory.current"),
        ("inactive_file", "active_file"),
    ),
    "memory": _Controller(
        ("sys/fs/cgroup/memory",),
        *("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ("total_inactive_file", "total_active_file"),
    ),
}


def available(ranks: int = 1) -> tuple[int, str]:
    """Return how many bytes this process may still take, and what limits them, in words.

    So may as many ``ranks`` of this machine, each in a control group of its own. Memory of files
    that were read counts as free. So does swap, but for the limits of control groups: how much of
    it theirs may use is often nothing.
    """
    table = _numbers(ROOT / "proc/meminfo")
    of_machine = 1024 * (table["MemAvailable:"] + table.get("SwapFree:", 0)) // ranks
    shared = f", by each of {ranks} ranks" if ranks > 1 else ""
    return min([(of_machine, f"MemAvailable of /proc/meminfo{shared}"), *_of_groups()])


def require(nbytes: int, what: str, ranks: int = 1) -> None:
    """Raise a MemoryError that says ``what`` needs ``nbytes``, unless they are ``available``."""
    if nbytes < _LITTLE:
        return
    free, limit = available(ranks)
    if nbytes > free * (1 - _KEPT):
        raise MemoryError(
            f"{what}: {nbytes:,} bytes are needed, and {max(free, 0):,} can be had ({limit}), of "
            f"which {_KEPT:.0%} stay free. Ask for less, start fewer ranks on this host, or give "
            "the job more memory (docker run --memory, srun --mem)"
        )


def ordinary_empty(shape: tuple[int, ...], dtype: np.dtype[Any], ranks: int = 1) -> Array:
    """Return ``numpy.empty``; a MemoryError where ``ranks`` of this machine have no room for it."""
    require(math.prod(shape) * dtype.itemsize, f"an array of {dtype} {shape}", ranks)
    return np.empty(shape, dtype)


def reserve(fd: int, nbytes: int, what: str) -> None:
    """Let a file in memory have ``nbytes`` of it now; on an error it stays as it was.

    Later a lack would end the process that writes there, or another.

    Raises:
        MemoryError: there are not so many; see ``require``.
        OSError: the file system is too small.
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


def _of_groups() -> Iterator[tuple[int, str]]:
    """Yield what each control group that this process is in may still take; see ``available``."""
    with suppress(FileNotFoundError):  # of a kernel without them
        for line in (ROOT / "proc/self/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            controller = _CONTROLLERS.get("memory" if "memory" in names.split(",") else names)
            if controller is None:
                continue
            for mount in controller.mounts:
                # A container may see its own group alone, where the mount is, by a longer path.
                for group in (ROOT / mount / path.lstrip("/") / "x").parents:
                    if not group.is_relative_to(ROOT / mount):
                        break
                    yield from _of_group(group, controller)


def _of_group(group: Path, controller: _Controller) -> Iterator[tuple[int, str]]:
    with suppress(OSError):  # the root has no limit, and other groups may not be visible
        limit = (group / controller.limit).read_text().strip()
        if limit.isdecimal():  # not "max"
            used = int((group / controller.used).read_text())
            stat = _numbers(group / "memory.stat")
            used -= sum(stat.get(name, 0) for name in controller.cache)
            yield int(limit) - used, f"{controller.limit} of the control group {group}"


def _numbers(path: Path) -> dict[str, int]:
    """Return the numbers of a file whose lines are names and numbers."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {words[0]: int(words[1]) for words in lines}
