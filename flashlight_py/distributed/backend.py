"""The contract of a backend: validation is above it, transport below."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from flashlight_py.device import Array
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.calls.fast_path import EntryPoints, FastPath
from flashlight_py.distributed.constants import DistributedBackend
from flashlight_py.distributed.failures.journal import Journal
from flashlight_py.distributed.memory.memory_room import ordinary_empty
from flashlight_py.distributed.verbs import BARRIER, Verb
from flashlight_py.distributed.work import AllOf, Work
from flashlight_py.errors import DistributedError


class Backend(abc.ABC):
    """Moves arrays between the ``size`` ranks of one group, of which this one is ``rank``.

    Collectives run in the order in which they are started; messages between two ranks run beside
    them, those of one direction and tag in order. A mistake of ranks against each other raises on
    all of them: see ``Work``.
    """

    kind: DistributedBackend
    path: str  # what carries the data, in words
    timeout: float  # what an operation may take, in seconds
    rank: int
    size: int
    processes: Sequence[str] = ()  # which process each rank is, for messages
    team: object = None  # the same for the backends that one group is made of
    # Whether ranks may leave out the array that a broadcast fills: it has what the root's has.
    finds_shape = False
    packed_bytes = 32 << 10  # of an array that all_reduce_multiple copies, for fewer calls
    packed_bytes_async = 32 << 10  # likewise, with async_op
    count: Sequence[int] = (0,)  # how many calls users have made in its group, where that is known
    # That of all its ranks whose connections groups share that are made of this one; see ``Kin``.
    network: Any = None
    # That of the ranks that share memory with this one, likewise; and which rank of it each is, -1:
    # none.
    memory: Any = None
    near: Sequence[int] = ()

    @cached_property
    def hosts(self) -> Sequence[Sequence[int]]:
        """The ranks that share memory with each other; by a network alone each is by itself."""
        return [[rank] for rank in range(self.size)]

    @abc.abstractmethod
    def start(self, call: Call) -> Work:
        """Start ``call``; ``Work.wait`` blocks and returns the result.

        Of a verb that works in place that is the array, on every rank; of a gather None on other
        ranks than the root; of a receive that is open a ``Matched``.
        """

    def start_many(self, calls: Sequence[Call]) -> Work:
        """Start several calls of one kind, all blocking or none, as one: its result is a list."""
        return AllOf([self.start(replace(call, blocking=False)) for call in calls])

    compares_ahead = False  # whether calls may be ``Call.is_ahead``

    def look_back(self, name: str, seconds: float) -> bool:
        """Return whether all ranks have made the calls of this rank that were ``Call.is_ahead``.

        Does not block. ``name`` is the last of them, for errors.

        Raises:
            MismatchError: the ranks differ in one of them.
            CollectiveTimeoutError: a rank has not made one for ``seconds``.
        """
        return True

    def shared_empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a new NumPy array, not initialised, that is cheap to reduce. Collective.

        A MemoryError, of this rank or host alone, where there is no memory for it: whoever calls
        this has all ranks know of it.
        """
        self.start(Call(BARRIER, part_of="shared_empty")).wait()
        return ordinary_empty(shape, dtype)

    def shared_by_all(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> list[Array]:
        """Return what ``shared_empty`` does on each rank, in rank order; collective.

        Where not all ranks see the same memory, a list of this rank's own array alone.
        """
        return [self.shared_empty(shape, dtype)]

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Block until every operation that this rank has started has ended."""

    def abort(self, cause: str | DistributedError) -> None:  # noqa: B027  (where nobody is notified)
        """Notify the others of what has ended this rank's part of the job, and end the group.

        ``cause`` is the traceback of an exception of this rank's program, whose first line names
        the exception, or an error of another rank, which the others raise as well. Not collective;
        blocks for half a second at most.
        """

    def lost(self, doing: str) -> DistributedError | None:
        """Return why the group cannot be used any more, as far as that is known without waiting.

        Another rank died or gave up, for example, also where nothing waits for it: ``doing`` is for
        what it matters. One that left in order is not lost as long as its process runs.
        """
        return None

    def leave(self) -> None:  # noqa: B027  (where no rank waits for another)
        """Let the others know that this rank begins no more messages, as it is about to shut down.

        A rank that waits for one that it has not begun raises. Not collective; does not block.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """End what runs, fail what waits, free everything. Not collective; may be repeated."""

    def abandon(self) -> None:  # noqa: B027  (optional: where there is nothing to let go of)
        """Close the descriptors and nothing else, in a child that was forked from a rank.

        Things shared with other ranks are not this process's to change. Only this is called there.
        """

    def is_busy(self) -> bool:
        """Return whether something that was started has not ended; the other ranks may need it."""
        return False

    def is_calling(self) -> bool:
        """Return whether this thread is in the middle of a call here: it runs a signal handler."""
        return False

    def bind(self, journal: Journal) -> FastPath:
        """Return the fast path of the group whose calls ``journal`` records."""
        return EntryPoints()

    def cupy_side(self) -> Backend | None:
        """Return the backend of the same ranks for CuPy arrays; None: NCCL joins their GPUs."""
        return None

    def limit(self, seconds: float) -> None:
        """Allow each operation that is started from now on so many seconds; not collective.

        Short ways that are bound keep what they had.
        """
        self.timeout = seconds

    def step(self, verb: Verb, array: Array, seconds: float) -> Any:
        """Return the result of ``verb`` of ``array``, which is a step of a call; blocking."""
        return self.start(Call(verb, array, seconds=seconds)).wait()
