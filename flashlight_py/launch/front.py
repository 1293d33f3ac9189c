"""Two processes supervise a job, so that a ``kill -9`` of either one leaves no process behind.

The process that the user started is called the front. It forks a copy of itself into a separate
session. The copy starts and watches the ranks. The front only forwards signals and waits. If the
copy is killed, the front ends the remaining processes. If the front is killed, the kernel signals
the copy, which then ends the job. Both processes adopt orphans.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Collection
from contextlib import suppress

from flashlight_py import system
from flashlight_py.launch.failures import describe_exit
from flashlight_py.launch.loop import FORWARDED, SIGKILL

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # of prctl(2)

if not system.IS_PORTABLE:
    _libc = ctypes.CDLL(None, use_errno=True)  # before the fork: a child must not load libraries


def run_in_copy(work: Callable[[], int], clean_up: Callable[[], None]) -> int:
    """Run ``work()`` in a copy of this process and return its exit code.

    After the copy has ended for any reason, this process kills its remaining descendants and calls
    ``clean_up``. The copy does not return: it exits. Without prctl, there is no copy, and the guard
    of the ranks kills them if this process is killed.
    """
    if system.IS_PORTABLE:
        try:
            return work()
        finally:
            clean_up()
    if not os.path.exists("/proc/self"):
        text = "/proc is not mounted, so processes that ranks leave behind are not found and ended"
        print(f"flrun: warning: {text}. Mount /proc", file=sys.stderr)
    adopt_orphans()
    front = os.getpid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if ignored, the kernel discards exit codes
    # If a shell replaced itself by this program (exec), the shell's children are our children now.
    inherited_children = system.children() if has_children() else []
    # No signal may arrive between the fork and the installation of the handlers. Other signals are
    # unblocked, even if the parent has blocked them.
    signal.pthread_sigmask(signal.SIG_SETMASK, FORWARDED)
    pid = os.fork()
    if pid == 0:
        _run_copy(front, work)
    for number in FORWARDED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # not reaped, so the pid stays valid
        for number in FORWARDED:
            signal.signal(number, signal.SIG_IGN)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code < 0:
            description = describe_exit(code)
            print(f"flrun: the launcher {description}; its ranks were ended", file=sys.stderr)
        return code if code >= 0 else 128 - code
    finally:
        end_children(inherited_children)
        clean_up()


def _run_copy(front: int, work: Callable[[], int]) -> None:
    code = 1
    try:
        os.setsid()  # so only the front receives Ctrl-C, which it forwards
        signal_if_parent_ends(front, signal.SIGTERM)
        adopt_orphans()
        for number in FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)  # until work() installs handlers
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        code = work()
    except BaseException:  # noqa: BLE001 - after any error, two processes must not continue as one
        sys.excepthook(*sys.exc_info())
    finally:
        try:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):  # a closed stream or a full disk
                    stream.flush()
        finally:
            os._exit(code)


def signal_if_parent_ends(parent: int, number: int = SIGKILL) -> None:
    """Make the kernel send signal ``number`` to this process if its parent ends.

    The kernel waits for the end of the thread of ``parent`` that started this process.
    """
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # the parent ended before the call of prctl
        os.kill(os.getpid(), number)


def adopt_orphans() -> None:
    """Make this process the new parent of descendants if their parents end."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def end_children(spare: Collection[int] = ()) -> None:
    """Kill all children except ``spare``, and then the orphans that they leave. Blocks."""
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
