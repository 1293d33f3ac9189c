"""Small messages between the ranks of a group, outside any collective."""

from __future__ import annotations

import enum
import pickle
from collections import deque
from collections.abc import Iterator
from typing import Any

__all__ = ["Kind", "Notes"]


class Kind(enum.IntEnum):
    """What a note is about; its tag."""

    LEFT = 1
    """The sender will take part in no further collective: a ``Farewell``."""
    ASK = 2
    """Where are you? (the number of the question)"""
    ANSWER = 3
    """(the question's number, collectives begun, what is waited for with the one who asks)"""
    OFFER = 4
    """Something is to be sent: an ``Offer``."""
    REPLY = 5
    """(the offer's number, None or the call that it does not fit)"""
    GONE = 6
    """The sender has closed the group, or its program has ended and printed why: the last note.

    (the collectives that it has completed, if all that it ever began in the group has ended)"""


class Notes:
    """Pickled notes over ``comm``, which carries nothing else. Sending does not wait."""

    def __init__(self, mpi: Any, comm: Any) -> None:
        self._mpi, self._comm = mpi, comm
        self._status = mpi.Status()
        self._on_their_way: deque[Any] = deque()

    def send(self, rank: int, kind: Kind, content: Any) -> None:
        """Send ``content`` to ``rank``; returns at once."""
        buffer = [pickle.dumps(content), self._mpi.BYTE]
        self._on_their_way.append(self._comm.Isend(buffer, rank, kind))
        while self._on_their_way and self._on_their_way[0].Test():
            self._on_their_way.popleft()

    def hear(self) -> Iterator[tuple[int, Kind, Any]]:
        """Yield what has arrived, as sender, kind and content."""
        mpi, status = self._mpi, self._status
        while (message := self._comm.Improbe(mpi.ANY_SOURCE, mpi.ANY_TAG, status)) is not None:
            source, kind = status.Get_source(), Kind(status.Get_tag())
            buffer = bytearray(status.Get_count(mpi.BYTE))
            message.Recv([buffer, mpi.BYTE])
            yield source, kind, pickle.loads(buffer)
