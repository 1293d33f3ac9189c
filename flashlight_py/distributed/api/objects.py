"""Any Python object that can be pickled, between ranks that trust each other.

What one rank pickles the others unpickle, which can run any code: the members of a group are the
processes of one job and one user. Objects travel as bytes through the group's NumPy backend.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from flashlight_py.device import Array
from flashlight_py.distributed.api.verb_call import Group, refusing
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.backends.exchange import (
    LATER,
    PROBLEM,
    Frame,
    Steps,
    read_frames,
)
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.calls.checks import check_rank
from flashlight_py.distributed.failures.journal import (
    ALL_GATHER_OBJECT,
    BROADCAST_OBJECT,
    GATHER_OBJECT,
    SCATTER_OBJECT,
)
from flashlight_py.distributed.groups.membership import Membership, native_object, of
from flashlight_py.distributed.verbs import ALL_GATHER, ALL_TO_ALL, BROADCAST, GATHER, SCATTER, Verb

__all__ = ["all_gather_object", "broadcast_object", "gather_object", "scatter_object"]

T = TypeVar("T")

# csrc/fast/objects.c has the same numbers. Buffers of at least so many bytes are not copied into
# the pickle, nor out of what has come.
_APART_BYTES = 4096
# What is longer goes to the root of a gather alone, in a second collective.
_SHORT_BYTES = 1024
# A scatter fills up short frames unless that is so much, and more than the frames.
_MOST_PADDING = 65536
# So much of why an object cannot be pickled.
_WORDS_BYTES = _SHORT_BYTES - 64


def broadcast_object(obj: Any = None, root: int = 0, group: Group = None) -> Any:
    """Return rank ``root``'s ``obj``, on every rank; the others' is not looked at.

    Collective, blocking. On ``root`` it is the object itself, elsewhere a copy, made by pickle:
    the ranks of a group trust each other (docs/sharp-bits.md).

    Raises:
        ValueError: ``root`` is no rank of the group.
        TypeError: the object cannot be pickled; raised on every rank, and nobody is given
            anything. What unpickling raises is raised where it does, with a note that names the
            ranks.
        DistributedError: as for :func:`all_reduce`.
    """
    return _moved(BROADCAST_OBJECT, obj, root, group)[0]


def all_gather_object(obj: T, group: Group = None) -> list[T]:
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


def gather_object(obj: T, root: int = 0, group: Group = None) -> list[T] | None:
    """Return the list of all ranks' objects on rank ``root``, None elsewhere.

    Collective, blocking; as :func:`all_gather_object`.

    Raises:
        ValueError: ``root`` is no rank of the group.
        TypeError, DistributedError: as for :func:`all_gather_object`.
    """
    return cast("list[T] | None", _moved(GATHER_OBJECT, obj, root, group))


def scatter_object(objs: Sequence[Any] | None = None, root: int = 0, group: Group = None) -> Any:
    """Return this rank's one of the objects that rank ``root`` passes, one per rank.

    Collective, blocking; as :func:`broadcast_object`.

    Raises:
        ValueError: ``root`` is no rank of the group, or has not one object for each rank.
        TypeError, DistributedError: as for :func:`broadcast_object`.
    """
    return _moved(SCATTER_OBJECT, objs, root, group)[0]


class _Verb(NamedTuple):
    """A call of a verb of objects, and the frames that this rank has for the others."""

    members: Membership
    row: Verb
    given: Any
    root: int
    mine: list[Array]

    @property
    def is_root(self) -> bool:
        return self.members.rank == self.root

    @property
    def gathers(self) -> bool:
        return self.row.ragged

    @property
    def backend(self) -> Backend:
        return Steps(self.members.backend(), self.row.name)


def _moved(row: Verb, given: Any, root: Any, group: Group) -> Any:
    """Return the list of what comes to this rank, which has ``given``; None: nothing does."""
    try:
        come = native_object(group)(row.code, given, root)
    except BaseException as error:
        if not isinstance(error, Exception):  # as objects were pickled, or made again
            of(group).end(error)
        raise
    if come is None or type(come) is list:
        return come
    members = of(group)
    with refusing(members, row.name):
        if come is NotImplemented:
            return _from_the_beginning(members, row, given, root)
        first, number, frame = come
        try:
            mine = [] if frame is None else [frame]
            return _arrived(_Verb(members, row, given, root, mine), first)
        except BaseException as error:
            members.journal.failed(number, error)
            raise


def _from_the_beginning(members: Membership, row: Verb, given: Any, root: Any) -> Any:
    where = check_rank(members.size, row.name, "root", root) if row.rooted else 0
    mine: list[Array] = []
    if row is SCATTER_OBJECT and members.rank == where:
        given = _one_each(members, given)
        mine = _packed(given)
    elif row.ragged or members.rank == where:
        mine = _packed([given])
    call = _Verb(members, row, given, where, mine)
    with members.journal.recording(row.name, root=where if row.rooted else None) as record:
        record.size = sum(frame.size for frame in mine)
        first = _first(call)
        if row is BROADCAST_OBJECT:
            record.size = first.size
        return _arrived(call, first)


def _one_each(members: Membership, objs: Sequence[Any] | None) -> list[Any]:
    given = list(() if objs is None else objs)
    if len(given) != members.size:
        got = "None" if objs is None else len(given)
        raise ValueError(
            f"scatter_object: rank {members.rank} is the root and must pass one object for each of "
            f"the {members.size} ranks, got {got}"
        )
    return given


def _first(call: _Verb) -> Array:
    """Return the frames that come by the first collective, which mostly is the only one."""
    row, mine, backend = call.row, call.mine, call.backend
    step = Call(ALL_GATHER, mine[0] if mine else np.empty(0, np.uint8))
    if row is SCATTER_OBJECT:
        step = Call(SCATTER, _rows(mine) if mine else None, root=call.root)
    elif row is BROADCAST_OBJECT and backend.finds_shape:
        step = Call(BROADCAST, mine[0] if mine else None, root=call.root)
    elif row is not ALL_GATHER_OBJECT and step.array.size > _SHORT_BYTES:
        step.array = Frame.later(step.array).pack()
    frames: Array = backend.start(step).wait()
    return frames


def _rows(frames: Sequence[Array]) -> Array:
    """Return ``frames`` as rows of one length; or what says that they come later."""
    longest, total = max(map(len, frames)), sum(map(len, frames))
    if longest * len(frames) > 2 * total + _MOST_PADDING:
        return np.stack([Frame.later(frame).pack() for frame in frames])
    rows = np.zeros((len(frames), longest), np.uint8)
    for row, frame in zip(rows, frames, strict=True):
        row[: frame.size] = frame
    return rows


def _arrived(call: _Verb, first: Array) -> Any:
    """Return the objects of ``first``, and of what comes later."""
    members, here = call.members, call.is_root
    frames = read_frames(first, most=members.size if call.gathers else 1)
    sources = range(members.size) if call.gathers else [call.root]
    _raise_problems(call, dict(zip(sources, frames, strict=True)))
    if any(frame.kind == LATER for frame in frames):
        later = iter(read_frames(_later(call, frames[0])))
        frames = [next(later, frame) if frame.kind == LATER else frame for frame in frames]
    if not call.gathers and here:
        return [call.given[call.root] if call.row is SCATTER_OBJECT else call.given]
    if call.row is GATHER_OBJECT and not here:
        return None
    return [
        call.given if source == members.rank else _unpickled(call, frame, source)
        for source, frame in zip(sources, frames, strict=True)
    ]


def _later(call: _Verb, first: Frame) -> Array:
    """Return the frames that were too long for the first collective, where they are wanted."""
    row, mine, none = call.row, call.mine, np.empty(0, np.uint8)
    if row is BROADCAST_OBJECT:
        whole = mine[0] if mine else np.empty(first.length, np.uint8)
        step = Call(BROADCAST, whole, root=call.root)
    elif row is GATHER_OBJECT:
        step = Call(GATHER, mine[0] if mine[0].size > _SHORT_BYTES else none, root=call.root)
    else:
        lengths = [frame.size for frame in mine] or [0] * call.members.size
        step = Call(ALL_TO_ALL, np.concatenate([none, *mine]), rows=lengths)
    come = call.backend.start(step).wait()
    return none if come is None else come


def _unpickled(call: _Verb, frame: Frame, source: int) -> Any:
    """Make the object of rank ``source``; what its class raises here says where it was."""
    try:
        return pickle.loads(frame.content, buffers=frame.buffers)
    except Exception as error:
        if hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(
                f"{_where(call)}: the object from rank {source} cannot be unpickled here; import "
                "on every rank what it is made of"
            )
        raise


def _raise_problems(call: _Verb, frames: Mapping[int, Frame]) -> None:
    """Raise TypeError on every rank if one could not pickle its object: all receive its frame."""
    problems = "; ".join(
        f"rank {rank}: {bytes(frame.content).decode(errors='replace')}"
        for rank, frame in frames.items()
        if frame.kind == PROBLEM
    )
    if problems:
        raise TypeError(
            f"{_where(call)}: an object cannot be pickled ({problems}). Nobody has received "
            "anything; pass what pickle takes, such as functions of modules instead of lambdas"
        )


def _where(call: _Verb) -> str:
    return f"[{call.row.name}] rank {call.members.rank} of {call.members.size}"


def _packed(objs: Sequence[Any]) -> list[Array]:
    """Return the frame of each object; if one cannot be pickled each says why."""
    try:
        return [_pickled(obj).pack() for obj in objs]
    except Exception as error:  # noqa: BLE001  (__reduce__ may raise anything; every rank raises it)
        words = f"{type(error).__name__}: {error}".encode(errors="backslashreplace")
        return [Frame(words[:_WORDS_BYTES], PROBLEM).pack()] * len(objs)


def _pickled(obj: Any) -> Frame:
    buffers: list[memoryview] = []

    def keep_large(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes >= _APART_BYTES:
            buffers.append(raw)
        return raw.nbytes < _APART_BYTES

    return Frame(pickle.dumps(obj, 5, buffer_callback=keep_large), buffers=buffers)
