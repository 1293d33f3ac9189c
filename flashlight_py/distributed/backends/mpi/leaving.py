"""How a rank leaves: its last words to the others, and the end of the job where it has raised.

A rank that raises ends the job, because the other ranks and MPI_Finalize would wait for it. An
uncaught exception is printed and reported, the other ranks have a moment to print theirs, and MPI
ends all processes with exit code 1, once mpirun has read their output.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import sys
import termios
import time
from collections.abc import Callable
from typing import Any

import numpy as np

# In place of a count: something goes on, or was abandoned.
UNFINISHED = -1
# How long a rank whose program has raised waits for what is read, and then for the others.
_LINGER_SECONDS = 1.0
_LOOK_SECONDS = 1e-3


class Leaving:
    """The last words of the ranks of ``comm``: how many collectives have moved arrays.

    They use a communicator of their own. Both are freed only when all ranks have left, because MPI
    would take an abandoned operation, which it cannot cancel, for one of a new group.
    """

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi, self._comms = mpi, (comm, comm.Dup())
        self._moved, self._counts = np.zeros(1, np.int64), np.empty(comm.Get_size(), np.int64)
        self._request: Any = None

    def leave(self, moved: int) -> None:
        """Notify the others, once, that nothing more comes from here."""
        if self._request is None and not self._mpi.Is_finalized():
            self._moved[:] = moved
            with contextlib.suppress(self._mpi.Exception):  # what broke the group may break this
                self._request = self._comms[1].Iallgather(self._moved, self._counts)

    def have_all_left(self) -> bool:
        """Return whether every rank has left."""
        with contextlib.suppress(self._mpi.Exception):
            return self._request is not None and bool(self._request.Test())
        return False

    def free(self) -> bool:
        """Free what all have left, if each has completed the same calls; return whether."""
        is_over = UNFINISHED < min(self._counts) == max(self._counts)
        for comm in self._comms if is_over else ():
            with contextlib.suppress(self._mpi.Exception):
                comm.Free()
        return bool(is_over)


def end_the_job(mpi: Any, linger: Callable[[float], None]) -> None:
    """Abort, when ``linger(end)`` has given the others time to notice, until the time ``end``."""
    if mpi.Is_finalized():
        return
    end = time.monotonic() + _LINGER_SECONDS
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # as under pythonw
                stream.flush()
        for descriptor in (1, 2):
            _await_reader(descriptor, end)
        linger(end)
    finally:  # also after Ctrl-C, or where nobody reads any more; no code of the exit runs
        mpi.COMM_WORLD.Abort(1)


def _await_reader(descriptor: int, end: float) -> None:
    """Wait until all that was written into a pipe has been read; no event reports it."""
    with contextlib.suppress(OSError):  # it is closed
        while stat.S_ISFIFO(os.fstat(descriptor).st_mode) and time.monotonic() < end:
            if not any(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4))):
                return
            time.sleep(_LOOK_SECONDS)
