"""What a backend owes. Everything above it is validation, everything below it is transport.

A backend is given arrays that are C-contiguous, writable, of native byte order and of a dtype
and op that go together; ranks agree on nothing yet. Collectives of one backend run in the order
in which they are called; messages between two ranks run beside them, those of one direction and
tag in order. ``AVG`` never arrives: it is ``SUM`` with the scale divided by the size.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from flashlight_py.device import Array
from flashlight_py.distributed.constants import DistributedBackend, ReduceOp
from flashlight_py.distributed.work import AllOf, Work
from flashlight_py.errors import DistributedError

if TYPE_CHECKING:
    from flashlight_py.distributed.recorder.journal import Journal

__all__ = ["COMPOSED", "Backend", "Matched", "Message", "left_to_python"]

# Calls that several collectives make up. Ranks know them by their places in this list.
COMPOSED = (
    *("broadcast_object", "all_gather_object", "gather_object", "scatter_object"),
    *("new_group", "split", "shared_empty", "all_to_all(rows=...)", "scatter(rows=...)"),
    *("all_reduce_location(min)", "all_reduce_location(max)"),
    # Often called on rank 0 alone, by mistake: so a mismatch says what is wrong with that.
    *(
        "save(collective, to be called on every rank)",
        "load(collective, to be called on every rank)",
    ),
)


def left_to_python(*arguments: object) -> Any:
    """Return NotImplemented: there is no short way here."""
    return NotImplemented


class Message(NamedTuple):
    """One end of a message: an array that goes to ``peer``, or that what ``peer`` sends fills."""

    sends: bool
    array: Array
    peer: int
    tag: int


class Matched(NamedTuple):
    """What a receive has taken that did not know who sends, or how much."""

    source: int
    rows: int


class Backend(abc.ABC):
    """Moves arrays between the ``size`` ranks of one group, of which this one is ``rank``.

    Each verb is collective, except send and recv, and starts at once; ``Work.wait`` blocks and
    returns the result. With ``blocking`` the caller waits right away: the backend may run the verb
    on the caller's thread. What ranks get wrong against each other raises on all: see ``Work``.
    """

    kind: DistributedBackend
    path: str  # what carries the data, in words
    rank: int
    size: int
    people: Sequence[str] = ()  # which process each rank is, for messages
    team: object = None  # the same for the backends that one group is made of
    count: Sequence[int] = (0,)  # how many calls users have made in its group, where that is known

    @abc.abstractmethod
    def all_reduce(self, array: Array, op: ReduceOp, scale: float, blocking: bool = False) -> Work:
        """``array = scale * (rank 0's op rank 1's op ...)`` in place; the result is ``array``."""

    def all_reduce_many(
        self, arrays: Sequence[Array], op: ReduceOp, scale: float, blocking: bool = False
    ) -> Work:
        """Reduce each of ``arrays`` in place, as ``all_reduce`` does; the result is their list."""
        return AllOf([self.all_reduce(array, op, scale, blocking) for array in arrays])

    def shared_empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """Return a new NumPy array, not initialised, that is cheap to reduce. Collective."""
        with self.part_of("shared_empty"):
            self.barrier().wait()
        return np.empty(shape, dtype)

    def bind(self, journal: Journal) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return the short ways of the group whose record is ``journal``: native, native_sendrecv.

        ``native(verb, x, out, op, scale, root or peer, tag, async_op)`` does whatever a user has
        called with plain arrays; ``verb`` is a place in the journal's ``VERBS``. It returns the
        result, or a Work where ``async_op``; NotImplemented, and nothing has happened, where that
        is left to the methods below. ``native_sendrecv(x, dst, out, src, tag, recv_tag)`` likewise.
        """
        return left_to_python, left_to_python

    @abc.abstractmethod
    def reduce_scatter(
        self,
        array: Array,
        op: ReduceOp,
        scale: float,
        blocking: bool = False,
        out: Array | None = None,
        rows: Sequence[int] | None = None,
    ) -> Work:
        """Reduce; the result is this rank's part of the first dimension.

        Parts are equal, or rank r's has ``rows[r]`` rows; ranks agree on ``rows``. Here
        and below, the result is ``out``, filled, where that is given, else a new array.
        """

    @abc.abstractmethod
    def reduce(
        self, array: Array, op: ReduceOp, scale: float, root: int, blocking: bool = False
    ) -> Work:
        """Reduce into ``root``'s array, in place; the others' stay as they are."""

    @abc.abstractmethod
    def broadcast(self, array: Array, root: int, blocking: bool = False) -> Work:
        """Make ``array`` equal to ``root``'s, in place; the result is ``array``."""

    @abc.abstractmethod
    def all_gather(self, array: Array, blocking: bool = False, out: Array | None = None) -> Work:
        """The result is all ranks' arrays, joined along the first dimension.

        First dimensions may differ between ranks; an array has at least one dimension. ``out``
        of another length than what comes raises ValueError, when all has come.
        """

    @abc.abstractmethod
    def gather(
        self, array: Array, root: int, blocking: bool = False, out: Array | None = None
    ) -> Work:
        """As ``all_gather``, for ``root`` alone; the result is None elsewhere."""

    @abc.abstractmethod
    def scatter(
        self, array: Array | None, root: int, blocking: bool = False, out: Array | None = None
    ) -> Work:
        """Give rank r ``array[r]`` of ``root``; the others' ``array`` is None."""

    @abc.abstractmethod
    def all_to_all(self, array: Array, blocking: bool = False, out: Array | None = None) -> Work:
        """Give rank r the r-th equal part of the first dimension.

        The result is the parts that came, joined in rank order.
        """

    @abc.abstractmethod
    def all_to_all_uneven(
        self,
        array: Array,
        rows: Sequence[int],
        blocking: bool = False,
        out: Array | None = None,
        came: list[int] | None = None,
    ) -> Work:
        """As ``all_to_all``, with ``rows[r]`` rows for rank r; waits until all tell theirs.

        As for ``all_gather``, ``out`` must have the length of what comes. How many rows each rank
        has sent here is added to ``came``, at the end at the latest.
        """

    @abc.abstractmethod
    def send(self, array: Array, dst: int, tag: int, blocking: bool = False) -> Work:
        """Give ``array`` to rank ``dst``, which must ``recv`` with the same ``tag``."""

    @abc.abstractmethod
    def recv(self, array: Array, src: int, tag: int, blocking: bool = False) -> Work:
        """Fill ``array`` with what rank ``src`` sends under ``tag``; the result is ``array``."""

    def recv_matched(
        self,
        array: Array,
        src: int | None,
        tag: int,
        partial: bool,
        blocking: bool = False,
        patience: float = -1.0,
    ) -> Work:
        """Receive from ``src``, or where that is None from any other rank; the result is a Matched.

        It takes messages of ranks from which no other receive waits for one under ``tag``. With
        ``partial`` fewer rows may come than ``array`` has: they fill its first ones. ``patience``
        are seconds after which it ends without a message, with None; negative: no limit.

        Raises:
            TypeError: this backend cannot.
        """
        raise TypeError(
            "recv: src=None and partial=True are for NumPy arrays; name the rank, and receive as "
            "much as it sends, or receive into a NumPy array"
        )

    def exchange(self, messages: Sequence[Message], blocking: bool = False) -> Work:
        """Send and receive several messages at once; the result is the list of their arrays."""
        works = [
            (self.send if message.sends else self.recv)(message.array, message.peer, message.tag)
            for message in messages
        ]
        return AllOf(works)

    @abc.abstractmethod
    def barrier(self, timeout: float | None = None) -> Work:
        """End when every rank has called it; ``timeout`` in seconds, None: the group's."""

    @abc.abstractmethod
    def refuse(self, call: str) -> None:
        """Take part in a collective that this rank refuses: the others raise MismatchError.

        ``call`` is what this rank called and why it did not, in words. Returns at once; what this
        rank calls afterwards comes after it.
        """

    @abc.abstractmethod
    def refuse_message(self, call: str, peer: int, tag: int, sends: bool) -> None:
        """As ``refuse``, of a message to ``peer``, or from it."""

    def within(self, seconds: float) -> contextlib.AbstractContextManager[None]:
        """Return a context in which collectives may take up to ``seconds`` each, where any wait."""
        return contextlib.nullcontext()

    def part_of(self, call: str) -> contextlib.AbstractContextManager[None]:
        """Return a context in which collectives are steps of ``call``, one of ``COMPOSED``.

        They go with those of the other ranks that are steps of the same.
        """
        return contextlib.nullcontext()

    def is_calling(self) -> bool:
        """Return whether this thread is in the middle of a call here: it runs a signal handler."""
        return False

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Block until every operation that this rank has started has ended."""

    def give_up(self, traceback: str) -> None:  # noqa: B027  (optional: where nobody can be told)
        """Notify the others that this rank's program has raised, in words, and end the group.

        The first line of ``traceback`` names the exception. Not collective; blocks for half a
        second at most.
        """

    def pass_on(self, error: DistributedError) -> None:  # noqa: B027  (as give_up)
        """End the group because of ``error`` of another one, which the others raise as well."""

    def is_busy(self) -> bool:
        """Return whether something that was started has not ended; the other ranks may need it."""
        return False

    @abc.abstractmethod
    def close(self) -> None:
        """End what runs, fail what waits, free everything. Not collective; may be repeated."""

    def abandon(self) -> None:  # noqa: B027  (optional: where there is nothing to let go of)
        """Close the descriptors and nothing else, in a child that was forked from a rank.

        Its threads are not here, and what it shares with other ranks is not this process's to
        change. Only this is called there.
        """
