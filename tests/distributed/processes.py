"""Look at and end processes that need not be our children; what this process holds."""

import contextlib
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from flashlight_py.distributed.failures import flight_record


def held() -> tuple[int, int, Any, bool]:
    """Descriptors, threads, the hook of exceptions, and whether SIGUSR1 is handled: a world's."""
    descriptors = len(os.listdir("/proc/self/fd"))
    handles = flight_record._handler(signal.SIGUSR1) > signal.SIG_IGN
    return descriptors, threading.active_count(), sys.excepthook, handles


@contextlib.contextmanager
def descriptors_below(limit: int) -> Iterator[None]:
    """Have this process open no file with a descriptor of ``limit`` or more."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


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


def is_alive(pid: int) -> bool:
    """False too for a zombie, which whoever adopted it may leave unburied: it has no command."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except (FileNotFoundError, ProcessLookupError):
        return False


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
