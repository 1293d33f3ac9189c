"""What the kernel does for a launcher: bind lives together, hand orphans over, list children."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Collection
from contextlib import suppress

__all__ = ["adopt_orphans", "children", "die_with_parent", "end_children", "has_children"]

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)

_libc = ctypes.CDLL(None, use_errno=True)  # loaded here: a process just forked must not load


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send us ``number`` when the thread of ``parent`` that started us ends."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before we asked
        os.kill(os.getpid(), number)


def adopt_orphans() -> None:
    """Become the parent of every process below us whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> list[int]:
    """Return the processes whose parent is this one, also those that have ended just now."""
    me = os.getpid()
    return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if _parent(pid) == me]


def has_children() -> bool:
    """Return whether this process has any child."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def end_children(spare: Collection[int] = ()) -> None:
    """Kill all children but ``spare``, then those that they leave to us. Blocks until none is."""
    while has_children() and (pids := set(children()).difference(spare)):
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}, {value}): {os.strerror(error)}")


def _parent(pid: int) -> int | None:
    with suppress(FileNotFoundError, ProcessLookupError), open(f"/proc/{pid}/stat", "rb") as file:
        # The name, in brackets, may itself have brackets and spaces; state and parent follow it.
        return int(file.read().rpartition(b")")[2].split()[1])
    return None
