"""Who has left a group for good: its communicator is freed when all have, and only then.

MPI hands the context of a communicator on to new ones, and takes an operation that was abandoned,
which it cannot cancel, for one of theirs.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

_log = logging.getLogger("flashlight_py")

# Messages of users have tags below this one, the largest that MPI promises.
_TAG = 32767
# In place of a count: an operation has not ended.
_UNFINISHED = -1


class Leaving:
    """What the ranks of ``comm`` report when they leave: how many collectives have moved arrays."""

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
            self._on_their_way = [self._comm.Isend(buffer, other, _TAG) for other in self._others]
        except self._mpi.Exception as problem:  # what broke the group may keep this back as well
            _log.debug("the others wait for no word of rank %d: %s", self._comm.Get_rank(), problem)

    def have_all_left(self) -> bool:
        """Return whether every other rank has left."""
        while self._comm.Iprobe(self._mpi.ANY_SOURCE, _TAG):
            count = np.empty(1, np.int64)
            self._comm.Recv([count, self._mpi.INT64_T], self._mpi.ANY_SOURCE, _TAG)
            self._counts.append(int(count[0]))
        return len(self._counts) == len(self._others)

    def free(self) -> bool:
        """Free the communicator if nothing is on its way in it on any rank; return whether.

        All have left.
        """
        is_over = int(self._own[0]) != _UNFINISHED and set(self._counts) <= {int(self._own[0])}
        if is_over:
            self._mpi.Request.Waitall(self._on_their_way)
            self._comm.Free()
        return is_over
