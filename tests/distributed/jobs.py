"""Start of a program, or of an mpirun of one, and watching it until its end."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.distributed import processes

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
        processes.kill(processes.members({process.pid}), 5.0)
        process.wait()
    return process.returncode, output
