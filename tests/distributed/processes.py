"""Look at and end processes that need not be our children."""

import contextlib
import os
import signal
import time
from multiprocessing.connection import wait


def running() -> list[int]:
    """Every process of this machine."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def members(groups: set[int]) -> set[int]:
    """The processes whose process group is one of ``groups``."""
    found = set()
    for pid in running():
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(pid) in groups:
                found.add(pid)
    return found


def await_end(pids: set[int], seconds: float) -> None:
    """Return when all of ``pids`` have ended, or after ``seconds``."""
    ends = time.monotonic() + seconds
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            try:
                wait([descriptor], max(0.0, ends - time.monotonic()))
            finally:
                os.close(descriptor)


def kill(pids: set[int], seconds: float) -> None:
    """Kill ``pids`` and wait until they are gone, for at most ``seconds``."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    await_end(pids, seconds)
