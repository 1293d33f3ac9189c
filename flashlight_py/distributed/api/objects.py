"""Verbs for Python objects that can be pickled, between ranks that trust each other.

Unpickling can run any code. So all members of a group must be processes of one job and one user.
Objects are sent as bytes through the NumPy backend of the group.
"""

import itertools
import pickle
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from flashlight_py.device import Array
from flashlight_py.distributed import verbs
from flashlight_py.distributed.api.messages import recv, send
from flashlight_py.distributed.api.verb_call import Group, reason_of, reject_together
from flashlight_py.distributed.backend import LATER, PROBLEM, Frame, read_frames
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.calls.checks import check_rank
from flashlight_py.distributed.calls.journal import OBJECTS
from flashlight_py.distributed.groups.membership import Membership, members_of, world_fast

__all__ = ["all_gather_object", "broadcast_object", "gather_object", "scatter_object"]
__all__ += ["recv_object", "send_object"]

T = TypeVar("T")

BROADCAST_OBJECT, ALL_GATHER_OBJECT, GATHER_OBJECT, SCATTER_OBJECT = OBJECTS

# Maximum bytes of a frame in the first collective of a gather. It announces the length of a longer
# frame, which a second collective sends. csrc/fast/objects.c has the same limits.
_SHORT_BYTES = 1024
# A scatter pads its frames to equal length if the padding has at most this number of bytes more
# than all frames.
_MOST_PADDING = 65536
# Maximum bytes of the text that explains why an object cannot be pickled.
_WORDS_BYTES = _SHORT_BYTES - 64
_NOTHING = np.empty(0, np.uint8)
# Maximum bytes of the first message of send_object. Its first byte gives its content: 0x80 is a
# pickle; 1 is a pickling error; 0 is a header (size of the pickle, a number, the sender). After a
# header, the pickle follows in a second message. Its negative tag depends on the number, because
# several threads may send.
_FIRST_BYTES = 16384
_LATER, _NO_PICKLE = 0, b"\1"
_LATER_TAGS = -2
_numbers = itertools.count()


def broadcast_object(obj: Any = None, root: int = 0, *, group: Group = None) -> Any:
    """Return ``obj`` of rank ``root`` on every rank. ``obj`` of other ranks is ignored.

    Collective; blocks. Rank ``root`` returns the object itself, and other ranks return a copy made
    by pickle. The ranks of a group must trust each other (docs/sharp-bits.md).

    Raises:
        ValueError: If ``root`` is no rank of the group.
        TypeError: If the object cannot be pickled. Every rank raises it, and no rank receives an
            object.
        Exception: If pickle raises it while this rank loads its copy. The traceback names ``root``.
        DistributedError: As for :func:`all_reduce`.
    """
    return _run(BROADCAST_OBJECT, obj, root, group)[0]


def all_gather_object(obj: T, *, group: Group = None) -> list[T]:
    """Return the list of the objects of all ranks, in rank order. Collective; blocks.

    The object of this rank is returned itself. The other objects are copies made by pickle.

    Raises:
        TypeError: If an object cannot be pickled. Every rank raises it. The error names the rank.
        DistributedError: As for :func:`all_reduce`.

    Example:
        >>> fl.all_gather_object(7)
        [7]
    """
    return _run(ALL_GATHER_OBJECT, obj, 0, group)


def gather_object(obj: T, root: int = 0, *, group: Group = None) -> list[T] | None:
    """Return the list of the objects of all ranks on rank ``root``, and None on other ranks.

    Collective; blocks. Otherwise like :func:`all_gather_object`.

    Raises:
        ValueError: If ``root`` is no rank of the group.
        TypeError, DistributedError: As for :func:`all_gather_object`.
    """
    return _run(GATHER_OBJECT, obj, root, group)


def scatter_object(objs: Sequence[Any] | None = None, root: int = 0, *, group: Group = None) -> Any:
    """Return the object for this rank, from the list ``objs`` that rank ``root`` passes.

    ``objs`` has one object per rank. Collective; blocks. Otherwise like :func:`broadcast_object`.

    Raises:
        ValueError: If ``root`` is no rank of the group, or does not pass one object per rank.
        TypeError, DistributedError: As for :func:`broadcast_object`.
    """
    return _run(SCATTER_OBJECT, objs, root, group)[0]


def send_object(obj: Any, dst: int, tag: int = 0, *, group: Group = None) -> None:
    """Send an object that can be pickled to rank ``dst``, which calls :func:`recv_object`.

    After the call, ``obj`` may be changed. If several objects or arrays are sent to ``dst`` with
    one ``tag``, they arrive in the order of sending.

    Raises:
        TypeError: If the object cannot be pickled. ``dst`` raises it as well.
        ValueError, DistributedError: As for :func:`send`.
    """
    members = members_of(group)
    check_rank(members.size, "send_object", "dst", dst)
    try:
        content = pickle.dumps(obj, 5)
    except Exception as error:
        send(np.frombuffer(_NO_PICKLE + _reason_bytes(error), np.uint8), dst, tag, group=group)
        raise TypeError(f"{_pickle_error('send_object', members)}: {reason_of(error)}") from error
    content_bytes = np.frombuffer(content, np.uint8)
    if content_bytes.size <= _FIRST_BYTES:
        send(content_bytes, dst, tag, group=group)
    else:
        number = next(_numbers) % 2**30
        with reject_together(members, "send_object", ()):
            head = np.array([0, content_bytes.size, number, members.rank]).view(np.uint8)
            send(head, dst, tag, group=group)
            members.run(Call(verbs.SEND, content_bytes, peer=dst, tag=_LATER_TAGS - number))


def recv_object(src: int | None, tag: int = 0, *, group: Group = None) -> Any:
    """Return a copy of the object that rank ``src`` sends by :func:`send_object`. Blocks.

    If ``src`` is None, the object may come from any other rank, as in :func:`recv`.

    Raises:
        TypeError: If the object cannot be pickled on ``src``.
        Exception: If pickle raises it while this rank loads the object.
        ValueError, DistributedError: As for :func:`recv`.
    """
    members = members_of(group)
    first = recv(np.empty(_FIRST_BYTES, np.uint8), src, tag, group=group, partial=True)
    if first[0] == _LATER:
        _, size, number, sender = first.view(np.int64).tolist()
        first = np.empty(size, np.uint8)
        with reject_together(members, "recv_object", ()):
            members.run(Call(verbs.RECV, first, peer=sender, tag=_LATER_TAGS - number))
    elif first[0] == _NO_PICKLE[0]:
        reason = first[1:].tobytes().decode(errors="replace")
        raise TypeError(f"{_pickle_error('recv_object', members)}: {reason}")
    return pickle.loads(first.data)


def _pickle_error(verb: str, members: Membership) -> str:
    where = f"[{verb}] rank {members.rank} of {members.size}"
    return f"{where}: expected a picklable object on the sender"


def _reason_bytes(error: Exception) -> bytes:
    return reason_of(error).encode(errors="backslashreplace")[:_WORDS_BYTES]


def _run(verb: verbs.Verb, obj: Any, root: Any, group: Group) -> Any:
    """Run an object verb. Return the received objects, or None if only other ranks receive."""
    try:
        fast = world_fast if group is None else members_of(group).fast
        result = fast.objects(verb.code, obj, root)
    except BaseException as error:
        if not isinstance(error, Exception):  # such as Ctrl-C while an object is pickled
            members_of(group).end(error)
        raise
    if result is None or type(result) is list:
        return result
    members = members_of(group)
    with reject_together(members, verb.name):
        if result is NotImplemented:
            return _run_in_python(members, verb, obj, root)
        first, number, frame = result
        try:
            return _Move(members, verb, obj, root, [] if frame is None else [frame]).end(first)
        except BaseException as error:
            members.journal.record_failure(number, error)
            raise


def _run_in_python(members: Membership, verb: verbs.Verb, obj: Any, root: Any) -> Any:
    root = check_rank(members.size, verb.name, "root", root) if verb.rooted else 0
    gives, frames = verb.ragged or members.rank == root, list[Array]()
    if gives and verb is SCATTER_OBJECT:
        passed, obj = obj, list(() if obj is None else obj)
        if len(obj) != members.size:
            raise ValueError(
                f"scatter_object: objs must have {members.size} objects, one for each rank, on the "
                f"root, rank {root}, got {'None' if passed is None else len(obj)}"
            )
        frames = _pickled(obj)
    elif gives:
        frames = _pickled([obj])
    move = _Move(members, verb, obj, root, frames)
    with members.journal.recording(verb.name, root=root if verb.rooted else None) as record:
        record.size = sum(frame.size for frame in frames)
        first = move.begin()
        if verb is BROADCAST_OBJECT:
            record.size = first.size
        return move.end(first)


def _pickled(objs: Sequence[Any]) -> list[Array]:
    """Return one frame per object. If an object cannot be pickled, all frames contain the error."""
    try:
        return [Frame(pickle.dumps(obj, 5)).pack() for obj in objs]
    except Exception as error:  # noqa: BLE001  (__reduce__ may raise anything; every rank raises it)
        return [Frame(_reason_bytes(error), PROBLEM).pack()] * len(objs)


class _Move:
    """A call of the object verb ``verb`` on this rank. The rank sends the frames ``arrays``."""

    def __init__(
        self, members: Membership, verb: verbs.Verb, values: Any, root: int, arrays: list[Array]
    ) -> None:
        self._members, self._verb, self._given, self._root = members, verb, values, root
        self._mine, self._backend = arrays, members.backend()
        self._sources = range(members.size) if verb.ragged else range(root, root + 1)

    def begin(self) -> Array:
        verb, frames, root = self._verb, self._mine, self._root
        if verb is SCATTER_OBJECT:
            return self._step(Call(verbs.SCATTER, _rows(frames) if frames else None, root=root))
        frame = frames[0] if frames else None
        if verb is BROADCAST_OBJECT and self._backend.finds_shape:
            if frame is not None and frame.size > self._backend.object_bytes:
                frame = _announced(frame)
            return self._step(Call(verbs.BROADCAST, frame, root=root))
        if frame is not None and verb is not ALL_GATHER_OBJECT and frame.size > _SHORT_BYTES:
            frame = _announced(frame)
        return self._step(Call(verbs.ALL_GATHER, _NOTHING if frame is None else frame, root=root))

    def end(self, first: Array) -> list[Any] | None:
        rank, frames = self._members.rank, read_frames(first, limit=len(self._sources))
        problems = "; ".join(
            f"rank {source}: {bytes(frame.content).decode(errors='replace')}"
            for source, frame in zip(self._sources, frames, strict=True)
            if frame.kind == PROBLEM
        )
        if problems:
            raise TypeError(
                f"{self}: an object cannot be pickled ({problems}). No rank has received an "
                "object. Pass objects that pickle accepts, for example functions of modules."
            )
        if any(frame.kind == LATER for frame in frames):
            later = iter(read_frames(self._later(frames[0])))
            frames = [next(later, frame) if frame.kind == LATER else frame for frame in frames]
        if self._verb is GATHER_OBJECT and rank != self._root:
            return None
        obj = self._given[rank] if self._verb is SCATTER_OBJECT and self._mine else self._given
        pairs = zip(self._sources, frames, strict=True)
        return [obj if source == rank else self._object(frame, source) for source, frame in pairs]

    def _later(self, first: Frame) -> Array:
        verb, frames = self._verb, self._mine
        if verb is SCATTER_OBJECT:
            lengths = [frame.size for frame in frames] or [0] * self._members.size
            joined = np.concatenate([_NOTHING, *frames])
            return self._step(Call(verbs.ALL_TO_ALL, joined, rows=lengths))
        if verb is GATHER_OBJECT:
            long = frames[0] if frames[0].size > _SHORT_BYTES else _NOTHING
            return self._step(Call(verbs.GATHER, long, root=self._root))
        length = int(np.frombuffer(first.content, np.int64)[0])
        frame = frames[0] if frames else np.empty(length, np.uint8)
        return self._step(Call(verbs.BROADCAST, frame, root=self._root))

    def _step(self, call: Call) -> Array:
        call.part_of = self._verb.name
        received = self._backend.start(call).wait()
        return _NOTHING if received is None else received

    def _object(self, frame: Frame, source: int) -> Any:
        try:
            return pickle.loads(frame.content, buffers=frame.buffers)
        except Exception as error:
            if hasattr(error, "add_note"):  # since Python 3.11
                error.add_note(
                    f"{self}: the object from rank {source} cannot be unpickled. Make the modules "
                    "of its classes importable on every rank."
                )
            raise

    def __str__(self) -> str:
        return f"[{self._verb.name}] rank {self._members.rank} of {self._members.size}"


def _rows(frames: Sequence[Array]) -> Array:
    """Return ``frames`` padded to equal length. If that wastes memory, return their lengths."""
    longest, total = max(map(len, frames)), sum(map(len, frames))
    if longest * len(frames) > 2 * total + _MOST_PADDING:
        return np.stack(list(map(_announced, frames)))
    rows = np.zeros((len(frames), longest), np.uint8)
    for row, frame in zip(rows, frames, strict=True):
        row[: frame.size] = frame
    return rows


def _announced(frame: Array) -> Array:
    return Frame(np.int64(frame.size).tobytes(), LATER).pack()
