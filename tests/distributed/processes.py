"""Inspection and termination of processes, including processes of other parents."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from flashlight_py.distributed.failures import flight_record


def process_state() -> tuple[int, int, Any, bool]:
    """Return descriptors, threads, the exception hook, and whether SIGUSR1 is handled."""
    descriptors = len(os.listdir("/proc/self/fd"))
    handles = flight_record._handler(signal.SIGUSR1) > signal.SIG_IGN
    return descriptors, threading.active_count(), sys.excepthook, handles


@contextlib.contextmanager
def limit_descriptors(limit: int) -> Iterator[None]:
    """Close or avoid descriptors of ``limit`` or more in this process."""
    import resource  # Windows lacks it

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def all_pids() -> list[int]:
    """Return the pids of all processes of this machine."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def members(groups: set[int]) -> set[int]:
    results = set()
    for pid in all_pids():
        with contextlib.suppress(ProcessLookupError):
            if os.getpgid(pid) in groups:
                results.add(pid)
    return results


def is_alive(pid: int) -> bool:
    """Return whether ``pid`` runs. A zombie does not: it has no command line."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except (FileNotFoundError, ProcessLookupError):
        return False


def await_file(path: Path, seconds: float = 30.0) -> None:
    """Return when another process has created ``path``."""
    ends = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < ends, f"{path} has not come"
        time.sleep(0.01)


def wait_for_end(pids: set[int], seconds: float) -> None:
    """Return when all ``pids`` have ended, or after ``seconds``."""
    ends = time.monotonic() + seconds
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            try:
                wait([descriptor], max(0.0, ends - time.monotonic()))
            finally:
                os.close(descriptor)


def kill(pids: set[int], seconds: float) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_for_end(pids, seconds)
