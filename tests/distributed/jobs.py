"""A program, or an mpirun of one, that is watched from its start to its end."""

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.distributed import processes

__all__ = ["all_ended", "ended", "free_port", "start"]

ROOT = Path(__file__).parents[2]
# From the failure to the end of a job. Without a notice the others would wait for minutes.
SOON = 30.0


def free_port() -> int:
    """Return a TCP port that no process of this host listens at."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def start(command: list[str], env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    """Start it in a session of its own, with this environment's programs and ``env``."""
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


def all_ended(
    started: Sequence[subprocess.Popen[str]], seconds: float = SOON
) -> list[tuple[int, str, str]]:
    """Return the exit codes, the outputs and the errors of ranks that end soon; kill the rest."""
    try:
        written = [process.communicate(timeout=seconds) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [(process.returncode, *each) for process, each in zip(started, written, strict=True)]


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return the exit code and the output of one that must end by itself, soon."""
    try:
        output, _ = process.communicate(timeout=SOON)
    finally:
        processes.kill(processes.members({process.pid}), 5.0)
        process.wait()
    return process.returncode, output
