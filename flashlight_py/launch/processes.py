"""Start processes in sessions of their own, signal them with what they started, read their end."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

__all__ = ["describe_exit", "exit_code", "signal_groups", "start"]


def start(
    command: Sequence[str],
    environ: Mapping[str, str],
    descriptors: Sequence[int] = (),
    stdout: int | None = None,
    stderr: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start ``command`` without input, inheriting ``descriptors``; output is ours, or as given.

    In a session of its own it can be ended with all that it has started, and Ctrl-C on the
    terminal reaches this process alone, which passes it on.
    """
    return subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        pass_fds=descriptors,
        start_new_session=True,
    )


def signal_groups(processes: Iterable[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    """Send ``number`` to every process that is not reaped yet, and to those that it started."""
    for process in processes:
        if process.returncode is None:  # its number cannot be another's before it is reaped
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)


def exit_code(process: subprocess.Popen[bytes]) -> int:
    """Wait for the end and return the exit code, or minus the signal; does not reap."""
    end = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    if end is None:
        raise AssertionError("waitid returns None only with WNOHANG")
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def describe_exit(code: int) -> str:
    """Say in words how a process ended, from its exit code or minus its signal."""
    if code >= 0:
        return f"exited with code {code}"
    number = -code
    known = number in set(signal.Signals)
    name = signal.Signals(number).name if known else f"signal {number}"
    hint = " (out of memory? the kernel's log tells)" if number == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"
