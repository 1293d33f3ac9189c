"""Any Python object that can be pickled, between ranks that trust each other.

The others unpickle what one rank pickles, which can run any code: the members of a group are the
processes of one job and one user. Objects travel as bytes through the group's NumPy backend.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from flashlight_py.device import Array
from flashlight_py.distributed.api.messages import recv, send
from flashlight_py.distributed.api.verb_call import Group, reason_of, refusing
from flashlight_py.distributed.backends.exchange import LATER, PROBLEM, Frame, read_frames
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.calls.checks import check_rank
from flashlight_py.distributed.calls.journal import (
    ALL_GATHER_OBJECT,
    BROADCAST_OBJECT,
    GATHER_OBJECT,
    SCATTER_OBJECT,
)
from flashlight_py.distributed.groups.membership import Membership, of, world_fast
from flashlight_py.distributed.verbs import (
    ALL_GATHER,
    ALL_TO_ALL,
    BROADCAST,
    GATHER,
    RECV,
    SCATTER,
    SEND,
    Verb,
)

__all__ = ["all_gather_object", "broadcast_object", "gather_object", "scatter_object"]
__all__ += ["recv_object", "send_object"]

T = TypeVar("T")

# Longer frames go to the root of a gather alone, in a second collective; csrc/fast/objects.c has
# the same numbers.
_SHORT_BYTES = 1024
# A scatter fills up short frames unless that is so much, and more than the frames.
_MOST_PADDING = 65536
# So much of why an object cannot be pickled.
_WORDS_BYTES = _SHORT_BYTES - 64
_NOTHING = np.empty(0, np.uint8)
# An object that is sent to one rank is its pickle, whose first byte is 0x80, where that is short.
# Else what comes first is 0, the length, a number and the rank, and the pickle has a tag that is no
# user's and the sender's alone: threads may send and receive at once. Or it is 1, and why not.
_FIRST_BYTES = 16384
_LATER, _NO_PICKLE = 0, b"\1"
_LATER_TAGS = -2
_numbers = itertools.count()


def broadcast_object(obj: Any = None, root: int = 0, *, group: Group = None) -> Any:
    """Return rank ``root``'s ``obj``, on every rank; the others' is not looked at.

    Collective, blocking. On ``root`` it is the object itself, elsewhere a copy, made by pickle:
    the ranks of a group trust each other (docs/sharp-bits.md).

    Raises:
        ValueError: ``root`` is no rank of the group.
        TypeError: the object cannot be pickled; raised on every rank, and nobody is given
            anything. An error of unpickling is raised where it happens, with a note that names the
            ranks.
        DistributedError: as for :func:`all_reduce`.
    """
    return _moved(BROADCAST_OBJECT, obj, root, group)[0]


def all_gather_object(obj: T, *, group: Group = None) -> list[T]:
    """Return the list of all ranks' objects, in rank order. Collective, blocking.

    The own one is the object itself, the others are copies, made by pickle.

    Raises:
        TypeError: a rank's object cannot be pickled; raised on every rank, names the rank, and
            nobody is given anything.
        DistributedError: as for :func:`all_reduce`.

    Example:
        >>> fl.all_gather_object(7)
        [7]
    """
    return _moved(ALL_GATHER_OBJECT, obj, 0, group)


def gather_object(obj: T, root: int = 0, *, group: Group = None) -> list[T] | None:
    """Return the list of all ranks' objects on rank ``root``, None elsewhere.

    Collective, blocking; as :func:`all_gather_object`.

    Raises:
        ValueError: ``root`` is no rank of the group.
        TypeError, DistributedError: as for :func:`all_gather_object`.
    """
    return _moved(GATHER_OBJECT, obj, root, group)


def scatter_object(objs: Sequence[Any] | None = None, root: int = 0, *, group: Group = None) -> Any:
    """Return this rank's one of the objects that rank ``root`` passes, one per rank.

    Collective, blocking; as :func:`broadcast_object`.

    Raises:
        ValueError: ``root`` is no rank of the group, or has not one object for each rank.
        TypeError, DistributedError: as for :func:`broadcast_object`.
    """
    return _moved(SCATTER_OBJECT, objs, root, group)[0]


def send_object(obj: Any, dst: int, tag: int = 0, *, group: Group = None) -> None:
    """Send any object that can be pickled to rank ``dst``, which calls :func:`recv_object`.

    Blocks until ``obj`` may be changed. Objects and arrays between two ranks under one ``tag`` are
    received in the order in which they were sent.

    Raises:
        TypeError: the object cannot be pickled; raised on ``dst``, too.
        ValueError, DistributedError: as for :func:`send`.
    """
    members = of(group)
    check_rank(members.size, "send_object", "dst", dst)
    try:
        content = pickle.dumps(obj, 5)
    except Exception as error:
        send(np.frombuffer(_NO_PICKLE + _words_of(error), np.uint8), dst, tag, group=group)
        raise TypeError(f"{_at('send_object', members)}: {reason_of(error)}") from error
    whole = np.frombuffer(content, np.uint8)
    if whole.size <= _FIRST_BYTES:
        send(whole, dst, tag, group=group)
    else:
        number = next(_numbers) % 2**30
        with refusing(members, "send_object", ()):
            head = np.array([0, whole.size, number, members.rank]).view(np.uint8)
            send(head, dst, tag, group=group)
            members.run(Call(SEND, whole, peer=dst, tag=_LATER_TAGS - number))


def recv_object(src: int | None, tag: int = 0, *, group: Group = None) -> Any:
    """Return the object that rank ``src`` sends by :func:`send_object`; a copy. Blocks.

    ``src`` may be None: of any other rank, as of :func:`recv`.

    Raises:
        TypeError: it cannot be pickled there.
        ValueError, DistributedError: as for :func:`recv`. Errors of unpickling are raised, too.
    """
    members = of(group)
    first = recv(np.empty(_FIRST_BYTES, np.uint8), src, tag, group=group, partial=True)
    if first[0] == _LATER:
        _, size, number, sender = first.view(np.int64).tolist()
        first = np.empty(size, np.uint8)
        with refusing(members, "recv_object", ()):
            members.run(Call(RECV, first, peer=sender, tag=_LATER_TAGS - number))
    elif first[0] == _NO_PICKLE[0]:
        raise TypeError(
            f"{_at('recv_object', members)}: {first[1:].tobytes().decode(errors='replace')}"
        )
    return pickle.loads(first.data)


def _at(verb: str, members: Membership) -> str:
    return f"[{verb}] rank {members.rank} of {members.size}: the sender's object cannot be pickled"


def _words_of(error: Exception) -> bytes:
    return reason_of(error).encode(errors="backslashreplace")[:_WORDS_BYTES]


def _moved(verb: Verb, given: Any, root: Any, group: Group) -> Any:
    """Return the list of what comes to this rank, which has ``given``; None: nothing does."""
    try:
        come = (world_fast.objects if group is None else of(group).fast.objects)(
            verb.code, given, root
        )
    except BaseException as error:
        if not isinstance(error, Exception):  # as objects were pickled, or made again
            of(group).end(error)
        raise
    if come is None or type(come) is list:
        return come
    members = of(group)
    with refusing(members, verb.name):
        if come is NotImplemented:
            return _from_the_beginning(members, verb, given, root)
        first, number, frame = come
        try:
            return _Move(members, verb, given, root, [] if frame is None else [frame]).end(first)
        except BaseException as error:
            members.journal.failed(number, error)
            raise


def _from_the_beginning(members: Membership, verb: Verb, given: Any, root: Any) -> Any:
    root = check_rank(members.size, verb.name, "root", root) if verb.rooted else 0
    gives, mine = verb.ragged or members.rank == root, list[Array]()
    if gives and verb is SCATTER_OBJECT:
        got, given = given, list(() if given is None else given)
        if len(given) != members.size:
            raise ValueError(
                f"scatter_object: rank {root} is the root and must pass one object for each of the "
                f"{members.size} ranks, got {'None' if got is None else len(given)}"
            )
        mine = _pickled(given)
    elif gives:
        mine = _pickled([given])
    move = _Move(members, verb, given, root, mine)
    with members.journal.recording(verb.name, root=root if verb.rooted else None) as record:
        record.size = sum(frame.size for frame in mine)
        first = move.begin()
        if verb is BROADCAST_OBJECT:
            record.size = first.size
        return move.end(first)


def _pickled(objs: Sequence[Any]) -> list[Array]:
    """Return the frame of each object; if one cannot be pickled each says why."""
    try:
        return [Frame(pickle.dumps(obj, 5)).pack() for obj in objs]
    except Exception as error:  # noqa: BLE001  (__reduce__ may raise anything; every rank raises it)
        return [Frame(_words_of(error), PROBLEM).pack()] * len(objs)


class _Move:
    """A call of ``verb`` on this rank, which has the frames ``mine`` for others.

    It is one collective. A frame that a backend or a root cannot take so is announced, and a second
    one brings it.
    """

    def __init__(
        self, members: Membership, verb: Verb, given: Any, root: int, mine: list[Array]
    ) -> None:
        self._members, self._verb, self._given, self._root = members, verb, given, root
        self._mine, self._backend = mine, members.backend()
        self._sources = range(members.size) if verb.ragged else range(root, root + 1)

    def begin(self) -> Array:
        """Return the frames of the first collective, which mostly is the only one."""
        verb, mine, root = self._verb, self._mine, self._root
        if verb is SCATTER_OBJECT:
            return self._come(Call(SCATTER, _rows(mine) if mine else None, root=root))
        frame = mine[0] if mine else None
        if verb is BROADCAST_OBJECT and self._backend.finds_shape:
            return self._come(Call(BROADCAST, frame, root=root))
        if frame is not None and verb is not ALL_GATHER_OBJECT and frame.size > _SHORT_BYTES:
            frame = _announced(frame)
        return self._come(Call(ALL_GATHER, _NOTHING if frame is None else frame, root=root))

    def end(self, first: Array) -> list[Any] | None:
        """Return the objects of the ``first`` frames, and of what comes later."""
        rank, frames = self._members.rank, read_frames(first, limit=len(self._sources))
        self._raise_problems(frames)
        if any(frame.kind == LATER for frame in frames):
            later = iter(read_frames(self._later(frames[0])))
            frames = [next(later, frame) if frame.kind == LATER else frame for frame in frames]
        if self._verb is GATHER_OBJECT and rank != self._root:
            return None
        own = self._given[rank] if self._verb is SCATTER_OBJECT and self._mine else self._given
        pairs = zip(self._sources, frames, strict=True)
        return [own if source == rank else self._object(frame, source) for source, frame in pairs]

    def _later(self, first: Frame) -> Array:
        """Return the frames that were announced, where they are wanted."""
        verb, mine = self._verb, self._mine
        if verb is SCATTER_OBJECT:
            lengths = [frame.size for frame in mine] or [0] * self._members.size
            return self._come(Call(ALL_TO_ALL, np.concatenate([_NOTHING, *mine]), rows=lengths))
        if verb is GATHER_OBJECT:
            long = mine[0] if mine[0].size > _SHORT_BYTES else _NOTHING
            return self._come(Call(GATHER, long, root=self._root))
        length = int(np.frombuffer(first.content, np.int64)[0])
        whole = mine[0] if mine else np.empty(length, np.uint8)
        return self._come(Call(BROADCAST, whole, root=self._root))

    def _come(self, call: Call) -> Array:
        call.part_of = self._verb.name
        come = self._backend.start(call).wait()
        return _NOTHING if come is None else come

    def _object(self, frame: Frame, source: int) -> Any:
        """Make the object of rank ``source``; what its class raises here says where it was."""
        try:
            return pickle.loads(frame.content, buffers=frame.buffers)
        except Exception as error:
            if hasattr(error, "add_note"):  # from Python 3.11 on
                error.add_note(
                    f"{self}: the object from rank {source} cannot be unpickled here; import on "
                    "every rank what it is made of"
                )
            raise

    def _raise_problems(self, frames: Sequence[Frame]) -> None:
        """Raise TypeError on every rank if one could not pickle its object: all have its frame."""
        problems = "; ".join(
            f"rank {source}: {bytes(frame.content).decode(errors='replace')}"
            for source, frame in zip(self._sources, frames, strict=True)
            if frame.kind == PROBLEM
        )
        if problems:
            raise TypeError(
                f"{self}: an object cannot be pickled ({problems}). Nobody has received anything; "
                "pass what pickle takes, such as functions of modules instead of lambdas"
            )

    def __str__(self) -> str:
        return f"[{self._verb.name}] rank {self._members.rank} of {self._members.size}"


def _rows(frames: Sequence[Array]) -> Array:
    """Return ``frames`` as rows of one length; announced, if that would be much longer."""
    longest, total = max(map(len, frames)), sum(map(len, frames))
    if longest * len(frames) > 2 * total + _MOST_PADDING:
        return np.stack(list(map(_announced, frames)))
    rows = np.zeros((len(frames), longest), np.uint8)
    for row, frame in zip(rows, frames, strict=True):
        row[: frame.size] = frame
    return rows


def _announced(frame: Array) -> Array:
    return Frame(np.int64(frame.size).tobytes(), LATER).pack()
