"""Two processes watch over a job, so that a ``kill -9`` of either leaves nothing behind.

The process that the user has started, the front, hands signals on and waits. A copy of it in a
session of its own does the work. If the copy is killed, the front ends what it has left; if the
front is killed, the kernel signals the copy, which ends the job. Both adopt orphans.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Collection
from contextlib import suppress

from flashlight_py import system
from flashlight_py.launch.failures import describe_exit
from flashlight_py.launch.loop import FORWARDED

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)

_libc = ctypes.CDLL(None, use_errno=True)  # loaded here: a process just forked must not load


def run_behind(work: Callable[[], int], clean_up: Callable[[], None]) -> int:
    """Return the exit code of ``work()``, done in a copy of this process.

    ``clean_up`` is called here when that has ended, however it did. Descendants that it left are
    killed. The copy does not return: it exits.
    """
    if not os.path.exists("/proc/self"):
        text = "without /proc it cannot find, and end, processes that ranks leave behind"
        print(f"flrun: warning: {text}; mount /proc", file=sys.stderr)
    adopt_orphans()
    front = os.getpid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else the kernel would keep no exit code
    # A shell that started others and then became this process has left them to us.
    strangers = system.children() if has_children() else []
    # No signal may arrive between the copy's birth and our readiness to hand it on. Others are
    # not blocked, also if the parent has blocked them.
    signal.pthread_sigmask(signal.SIG_SETMASK, FORWARDED)
    pid = os.fork()
    if pid == 0:
        _be_the_copy(front, work)
    for number in FORWARDED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # its number is taken while we may signal
        for number in FORWARDED:
            signal.signal(number, signal.SIG_IGN)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code < 0:
            how = describe_exit(code)
            print(f"flrun: the launcher {how}; its ranks were ended", file=sys.stderr)
        return code if code >= 0 else 128 - code
    finally:
        end_children(strangers)
        clean_up()


def _be_the_copy(front: int, work: Callable[[], int]) -> None:
    code = 1
    try:
        os.setsid()  # Ctrl-C on the terminal reaches the front alone, which hands it on
        die_with_parent(front, signal.SIGTERM)
        adopt_orphans()
        for number in FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)  # until work() wishes otherwise
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        code = work()
    except BaseException:  # noqa: BLE001 - whatever it is, two processes must not go on as one
        sys.excepthook(*sys.exc_info())
    finally:
        try:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):  # whatever becomes of it: closed, a full disk
                    stream.flush()
        finally:
            os._exit(code)


# What the kernel does: bind lives together, hand orphans over ---------------------------------


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel send us ``number`` when the thread of ``parent`` that started us ends."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it ended before we asked
        os.kill(os.getpid(), number)


def adopt_orphans() -> None:
    """Become the parent of every process below us whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def has_children() -> bool:
    """Return whether this process has any child."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def end_children(spare: Collection[int] = ()) -> None:
    """Kill all children but ``spare``, then those that they leave to us. Blocks until none is."""
    while has_children() and (pids := set(system.children()).difference(spare)):
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}, {value}): {os.strerror(error)}")
