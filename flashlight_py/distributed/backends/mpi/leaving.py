"""How a rank leaves: its last words to the others, and the end of the job where it has raised.

A rank that raises ends the job: else the others, and MPI_Finalize, would wait for it. While a group
is open, an exception that nobody catches is printed and reported, the others have a moment to raise
and print theirs as well, and then MPI ends all processes of the job, with exit code 1. What mpirun
has not read by then is lost with them: so that is waited for.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
import sys
import termios
import time
from collections.abc import Callable
from typing import Any

import numpy as np

_log = logging.getLogger("flashlight_py")

# Messages of users have tags below this one, the largest that MPI promises.
_LAST_TAG = 32767
# In place of a count: an operation has not ended.
_UNFINISHED = -1
# How long a rank whose program has raised waits for what is read, and then for the others.
_LINGER_SECONDS = 1.0
_LOOK_SECONDS = 1e-3


class Leaving:
    """The last words of the ranks of ``comm``: how many collectives have moved arrays.

    A communicator is freed when all ranks have left it for good, and only then: MPI hands its
    context on to new ones, and takes an operation that was abandoned, which it cannot cancel, for
    one of theirs.
    """

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi, self._comm = mpi, comm
        rank = int(comm.Get_rank())
        self._others = [other for other in range(int(comm.Get_size())) if other != rank]
        self._own: Any = None
        self._counts: list[int] = []
        self._on_their_way: list[Any] = []

    def leave(self, moved: int | None) -> None:
        """Notify the others that nothing more comes from here, once; None: something goes on."""
        if self._own is not None or self._mpi.Is_finalized():
            return
        self._own = np.array([_UNFINISHED if moved is None else moved], np.int64)
        buffer = [self._own, self._mpi.INT64_T]
        try:
            self._on_their_way = [
                self._comm.Isend(buffer, other, _LAST_TAG) for other in self._others
            ]
        except self._mpi.Exception as problem:  # what broke the group may keep this back as well
            _log.debug("the others wait for no word of rank %d: %s", self._comm.Get_rank(), problem)

    def have_all_left(self) -> bool:
        """Return whether every other rank has left."""
        while self._comm.Iprobe(self._mpi.ANY_SOURCE, _LAST_TAG):
            count = np.empty(1, np.int64)
            self._comm.Recv([count, self._mpi.INT64_T], self._mpi.ANY_SOURCE, _LAST_TAG)
            self._counts.append(int(count[0]))
        return len(self._counts) == len(self._others)

    def free(self) -> bool:
        """Free the communicator if nothing is on its way in it on any rank; return whether.

        All have left.
        """
        is_over = int(self._own[0]) != _UNFINISHED and set(self._counts) <= {int(self._own[0])}
        if is_over:
            self._mpi.Request.Waitall(self._on_their_way)
            # Only if every rank has completed the same calls: the context is used again, and an
            # abandoned operation would be received in a new group.
            self._comm.Free()
        return is_over


def end_the_job(mpi: Any, linger: Callable[[float], None]) -> None:
    """Abort, soon; no code of the interpreter's exit runs after that.

    ``linger(end)`` gives the others time to notice, until the clock says ``end``.
    """
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
    finally:  # also after Ctrl-C, or where nobody reads any more
        mpi.COMM_WORLD.Abort(1)


def _await_reader(descriptor: int, end: float) -> None:
    """Wait until all that was written into a pipe has been read; no event reports it."""
    while time.monotonic() < end and _unread(descriptor):
        time.sleep(_LOOK_SECONDS)


def _unread(descriptor: int) -> int:
    """Return the bytes in the pipe that ``descriptor`` is; 0 if it is none, or closed."""
    try:
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return 0
        count = fcntl.ioctl(descriptor, termios.FIONREAD, b"\0" * 4)
    except OSError:
        return 0
    return int.from_bytes(count, sys.byteorder)
