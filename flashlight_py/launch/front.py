"""Two processes watch over a job, so that a ``kill -9`` of either leaves nothing behind.

The one that the user has started stays in front: it hands signals on and waits. The work is done
by a copy of it in a session of its own. If the copy is killed, the front ends what it has left; if
the front is killed, the copy is told by the kernel and ends the job.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress

from flashlight_py.launch import kernel
from flashlight_py.launch.loop import FORWARDED
from flashlight_py.launch.processes import describe_exit

__all__ = ["run_behind"]


def run_behind(work: Callable[[], int], clean_up: Callable[[], None]) -> int:
    """Return the exit code of ``work()``, done in a copy of this process.

    ``clean_up`` is called here when that has ended, however it did. Descendants that it left are
    killed. The copy does not return: it exits.
    """
    kernel.adopt_orphans()
    front = os.getpid()
    # A shell that started others and then became this process has left them to us.
    strangers = kernel.children() if kernel.has_children() else []
    # No signal may come between the copy's birth and our readiness to hand it on.
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    pid = os.fork()
    if pid == 0:
        _be_the_copy(front, work)
    for number in FORWARDED:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda given, frame: os.kill(pid, given))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    try:
        return _await(pid)
    finally:
        kernel.end_children(strangers)
        clean_up()


def _await(pid: int) -> int:
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # its number stays taken while we may signal
    for number in FORWARDED:
        signal.signal(number, signal.SIG_IGN)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code < 0:
        print(f"flrun: the launcher {describe_exit(code)}; its ranks were ended", file=sys.stderr)
        return 128 - code
    return code


def _be_the_copy(front: int, work: Callable[[], int]) -> None:
    code = 1
    try:
        os.setsid()  # Ctrl-C on the terminal reaches the front alone, which hands it on
        kernel.die_with_parent(front, signal.SIGTERM)
        kernel.adopt_orphans()
        for number in FORWARDED:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)  # until work() wishes otherwise
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        code = work()
    except BaseException:  # noqa: BLE001 - whatever it is, two processes must not go on as one
        sys.excepthook(*sys.exc_info())
    finally:
        _leave(code)


def _leave(code: int) -> None:
    """Exit, whatever becomes of what is not written yet: a closed stream, a full disk."""
    try:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
    finally:
        os._exit(code)
