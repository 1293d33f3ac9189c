"""The end of the job where a rank has raised.

A rank that raises ends the job: else the others, and MPI_Finalize, would wait for it. While a group
is open, an exception that nobody catches is printed and reported, the others have a moment to raise
and print theirs as well, and then MPI ends all processes of the job, with exit code 1. What mpirun
has not read by then is lost with them: so that is waited for.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import sys
import termios
import time
from typing import Any

# How long a rank whose program has raised waits for what is read, and then for the others.
_LINGER_SECONDS = 1.0
_LOOK_SECONDS = 1e-3


def end_the_job(mpi: Any) -> None:
    """Abort, soon: the others have time to do so too. No code of the interpreter's exit runs."""
    if mpi.Is_finalized():
        return
    end = time.monotonic() + _LINGER_SECONDS
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # as under pythonw
                stream.flush()
        for descriptor in (1, 2):
            _await_reader(descriptor, end)
        others = mpi.COMM_WORLD.Ibarrier()
        while time.monotonic() < end and not others.Test():
            time.sleep(_LOOK_SECONDS)
    finally:  # also after Ctrl-C, or where nobody reads any more
        mpi.COMM_WORLD.Abort(1)


def _await_reader(descriptor: int, end: float) -> None:
    """Wait until all that was written into a pipe has been read; no event reports it."""
    with contextlib.suppress(OSError):  # it is closed
        while stat.S_ISFIFO(os.fstat(descriptor).st_mode) and time.monotonic() < end:
            if not any(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4))):
                return
            time.sleep(_LOOK_SECONDS)
