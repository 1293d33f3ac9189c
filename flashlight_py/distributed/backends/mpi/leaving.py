"""The end of a rank: its last message to the other ranks, and the end of the job after an error.

An uncaught exception on a rank ends the job, because the other ranks and MPI_Finalize would wait
for this rank. The rank prints the exception and sends it to the other ranks, which have a second to
print their errors. After mpirun has read the output, MPI ends all processes with exit code 1.
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

# Sent instead of the number of collectives if an operation has not ended.
UNFINISHED = -1
# Maximum seconds that a failed rank waits for readers of its output, and for other ranks.
_LINGER_SECONDS = 1.0
_LOOK_SECONDS = 1e-3


class Leaving:
    """The last messages of a group. Each rank of ``comm`` sends how many collectives MPI has run.

    The messages use a second communicator. Both communicators are freed only after all ranks have
    left. Otherwise MPI, which cannot cancel an abandoned operation, would run it in a new group.
    """

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi, self._comms = mpi, (comm, comm.Dup())
        self._moved, self._counts = np.zeros(1, np.int64), np.empty(comm.Get_size(), np.int64)
        self._request: Any = None

    def leave(self, moved: int) -> None:
        """Send ``moved`` to the other ranks as the last message. A second call does nothing."""
        if self._request is None and not self._mpi.Is_finalized():
            self._moved[:] = moved
            with contextlib.suppress(self._mpi.Exception):  # MPI raises if the group has failed
                self._request = self._comms[1].Iallgather(self._moved, self._counts)

    def have_all_left(self) -> bool:
        with contextlib.suppress(self._mpi.Exception):
            return self._request is not None and bool(self._request.Test())
        return False

    def free(self) -> bool:
        """If all ranks have finished and sent equal counts, free the communicators; return True."""
        is_over = UNFINISHED < min(self._counts) == max(self._counts)
        for comm in self._comms if is_over else ():
            with contextlib.suppress(self._mpi.Exception):
                comm.Free()
        return bool(is_over)


def abort_job(mpi: Any, linger: Callable[[float], None]) -> None:
    """Abort the job, after a call of ``linger(end)`` that gives the other ranks time to print."""
    if mpi.Is_finalized():
        return
    end = time.monotonic() + _LINGER_SECONDS
    try:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # None under pythonw
                stream.flush()
        for descriptor in (1, 2):  # poll, because no event reports that a pipe has been read
            with contextlib.suppress(OSError):
                while stat.S_ISFIFO(os.fstat(descriptor).st_mode) and time.monotonic() < end:
                    if not any(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4))):
                        break
                    time.sleep(_LOOK_SECONDS)
        linger(end)
    finally:  # even after Ctrl-C or a broken pipe; Abort runs no exit handlers
        mpi.COMM_WORLD.Abort(1)
