"""Start, inspection and termination of processes, including processes of other parents."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
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


ROOT = Path(__file__).parents[2]
# Seconds from the failure to the end of a job. Without a notice the ranks would wait for minutes.
SOON = 30.0


def free_port() -> int:
    """Return a TCP port on which no process of this host listens."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def start(command: list[str], env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PATH": path, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish_all(
    started: Sequence[subprocess.Popen[str]], seconds: float = SOON
) -> list[tuple[int, str, str]]:
    """Return exit codes, outputs and errors of ranks. Kill ranks that do not end soon."""
    try:
        written = [process.communicate(timeout=seconds) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [(process.returncode, *output) for process, output in zip(started, written, strict=True)]


def finish(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return exit code and output of a process that must end soon without a kill."""
    try:
        output, _ = process.communicate(timeout=SOON)
    finally:
        kill(members({process.pid}), 5.0)
        process.wait()
    return process.returncode, output
