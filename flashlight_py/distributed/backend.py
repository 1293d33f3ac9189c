"""The contract of a backend: validation is above it, transport below."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flashlight_py.device import Array
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.calls.fast_path import EntryPoints, FastPath
from flashlight_py.distributed.calls.journal import Journal
from flashlight_py.distributed.constants import DistributedBackend
from flashlight_py.distributed.verbs import Verb
from flashlight_py.distributed.work import AllOf, Work
from flashlight_py.errors import DistributedError


class Backend(abc.ABC):
    """Transport between the ranks of one group.

    Arguments are valid when they arrive here; ``api/`` has checked them. Every rank starts its
    collectives in the same order. Messages between two ranks keep their order per direction and
    tag. If the calls of ranks disagree, they raise ``MismatchError``; see ``Work``.
    """

    kind: DistributedBackend
    path: str  # for reports: "shared memory", "Gloo over TCP"
    timeout: float  # seconds that one operation may take
    rank: int  # of this process in the group
    size: int  # number of ranks
    processes: Sequence[str] = ()  # of each rank, for errors: "process 12 on host a"
    hosts: Sequence[Sequence[int]] = ()  # ranks that share memory; (): each rank is on its own
    finds_shape = False  # whether receivers of a broadcast may leave out the array
    packed_bytes = 32 << 10, 32 << 10  # all_reduce_multiple copies arrays up to this; with async_op
    count: Sequence[int] = (0,)  # collectives that users have called in this group
    team: object = None  # equal for the backends of which one group is composed
    network: Any = None  # backend whose connections subgroups share; see ``Subgroup``
    memory: Any = None  # backend whose memory subgroups share
    memory_ranks: Sequence[int] = ()  # rank in ``memory`` of each of our ranks; -1: none

    @abc.abstractmethod
    def start(self, call: Call) -> Work:
        """Start ``call``; ``Work.wait`` blocks and returns the result.

        The result is the array for verbs that work in place, a new array or ``call.out`` for the
        others, a ``Matched`` for an open receive, and None on ranks that receive nothing.
        """

    def start_many(self, calls: Sequence[Call]) -> Work:
        """Start several calls, all blocking or none, as one; the result is a list."""
        return AllOf([self.start(replace(call, blocking=False)) for call in calls])

    def step(self, verb: Verb, array: Array, seconds: float) -> Any:
        """Return the result of ``verb``, which is a step of another call; blocks."""
        return self.start(Call(verb, array, seconds=seconds)).wait()

    def bind(self, journal: Journal) -> FastPath:
        """Return the fast path of the group whose calls ``journal`` records."""
        return EntryPoints()

    def limit(self, seconds: float) -> None:
        """Set ``timeout`` for later operations; not collective. Bound fast paths keep theirs."""
        self.timeout = seconds

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Block until all operations of this rank have ended; raise the first failure."""

    @abc.abstractmethod
    def close(self) -> None:
        """Fail pending operations and release all resources. Not collective; idempotent."""

    def abort(self, cause: str | DistributedError) -> None:  # noqa: B027  (optional, as the rest)
        """Tell the other ranks why this rank stops, and end the group.

        ``cause`` is a traceback whose first line names the exception, or another rank's error. The
        other ranks raise it. Not collective; blocks for at most 0.5 s.
        """

    def lost(self, doing: str) -> DistributedError | None:
        """Return the error that made the group unusable, or None, for ``doing``. Does not block.

        A rank that left in order is not lost while its process runs.
        """
        return None

    def leave(self) -> None:  # noqa: B027
        """Tell the other ranks that this rank starts no more messages. Does not block."""

    def abandon(self) -> None:  # noqa: B027
        """Close file descriptors only: this process was forked from the rank."""

    def is_busy(self) -> bool:
        """Return whether an operation is pending; other ranks may wait for it."""
        return False

    def is_calling(self) -> bool:
        """Return whether this thread is inside a call, so that it runs a signal handler."""
        return False
