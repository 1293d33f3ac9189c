"""Any Python object that can be pickled, between ranks that trust each other.

What one rank pickles the others unpickle, which can run any code: the members of a group are the
processes of one job and one user. Objects travel as bytes through the group's NumPy backend.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from flashlight_py.distributed.api.verb_call import Group, refusing
from flashlight_py.distributed.backends.exchange import (
    Frame,
    Steps,
    broadcast_frame,
    exchange_frames,
)
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.calls.checks import check_rank
from flashlight_py.distributed.groups.membership import Membership, of
from flashlight_py.distributed.verbs import ALL_TO_ALL

__all__ = ["all_gather_object", "broadcast_object", "gather_object", "scatter_object"]

T = TypeVar("T")

# All pickles of a scatter together are broadcast up to here: less than a second collective costs.
_TOGETHER_BYTES = 512


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
    verb, members = "broadcast_object", of(group)
    with refusing(members, verb):
        root = check_rank(members.size, verb, "root", root)
        here = members.rank == root
        mine = _pickled([obj])[0] if here else None
        steps = Steps(members.backend(), verb)
        with members.journal.recording(verb, root=root) as record:
            frame = broadcast_frame(steps, mine, root)
            record.size = len(frame.content)
            _raise_problems(members, verb, {root: frame})
            return obj if here else _unpickled(members, verb, frame.content, root)


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
    return _gathered(of(group), "all_gather_object", obj, None)


def gather_object(obj: T, root: int = 0, group: Group = None) -> list[T] | None:
    """Return the list of all ranks' objects on rank ``root``, None elsewhere.

    Collective, blocking; as :func:`all_gather_object`.

    Raises:
        ValueError: ``root`` is no rank of the group.
        TypeError, DistributedError: as for :func:`all_gather_object`.
    """
    return _gathered(of(group), "gather_object", obj, root)


def scatter_object(objs: Sequence[Any] | None = None, root: int = 0, group: Group = None) -> Any:
    """Return this rank's one of the objects that rank ``root`` passes, one per rank.

    Collective, blocking; as :func:`broadcast_object`.

    Raises:
        ValueError: ``root`` is no rank of the group, or has not one object for each rank.
        TypeError, DistributedError: as for :func:`broadcast_object`.
    """
    verb, members = "scatter_object", of(group)
    with refusing(members, verb):
        root = check_rank(members.size, verb, "root", root)
        given = list(() if objs is None or members.rank != root else objs)
        if members.rank == root and len(given) != members.size:
            got = "None" if objs is None else len(given)
            raise ValueError(
                f"scatter_object: rank {root} is the root and must pass one object for each of "
                f"the {members.size} ranks, got {got}"
            )
        mine, lengths = _pickled(given)
        with members.journal.recording(verb, root=root) as record:
            record.size = len(mine.content)
            content = _scattered(members, mine, lengths, root)
            return given[root] if given else _unpickled(members, verb, content, root)


def _gathered(members: Membership, verb: str, obj: Any, root: int | None) -> Any:
    with refusing(members, verb):
        if root is not None:
            root = check_rank(members.size, verb, "root", root)
        mine, _ = _pickled([obj])
        steps = Steps(members.backend(), verb)
        with members.journal.recording(verb, root=root) as record:
            record.size = len(mine.content)
            frames = exchange_frames(steps, mine, root)
            _raise_problems(members, verb, dict(enumerate(frames)))
            if root not in (None, members.rank):
                return None
            return [  # this rank's own object is the one that was given
                obj if rank == members.rank else _unpickled(members, verb, frame.content, rank)
                for rank, frame in enumerate(frames)
            ]


def _scattered(members: Membership, mine: Frame, lengths: Sequence[int], root: int) -> Any:
    """Return this rank's bytes of those that ``root`` has in ``mine``, ``lengths`` for each."""
    here, rank, size = members.rank == root, members.rank, members.size
    steps = Steps(members.backend(), "scatter_object")
    head = mine if here else None
    if here and not mine.is_problem:  # the lengths and, where they are short, the pickles
        payload = mine.content if len(mine.content) <= _TOGETHER_BYTES else b""
        head = Frame(bytearray(np.array(lengths, np.int64).tobytes() + bytes(payload)))
    frame = broadcast_frame(steps, head, root)
    _raise_problems(members, "scatter_object", {root: frame})
    lengths = np.frombuffer(frame.content[: 8 * size], np.int64).tolist()
    if len(frame.content) > 8 * size:
        end = 8 * size + sum(lengths[: rank + 1])
        return frame.content[end - lengths[rank] : end]
    rows, payload = (lengths, mine.content) if here else ([0] * size, b"")
    call = Call(ALL_TO_ALL, np.frombuffer(payload, np.uint8), rows=rows)
    return steps.start(call).wait().data


def _unpickled(
    members: Membership, verb: str, data: bytes | bytearray | memoryview, source: int
) -> Any:
    """Make the object of rank ``source``; what its class raises here says where it was."""
    try:
        return pickle.loads(data)
    except Exception as error:
        if hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(
                f"[{verb}] rank {members.rank} of {members.size}: the object from rank {source} "
                "cannot be unpickled here; import on every rank what it is made of"
            )
        raise


def _raise_problems(members: Membership, verb: str, frames: Mapping[int, Frame]) -> None:
    """Raise TypeError on every rank if one could not pickle its object: all receive its frame."""
    problems = "; ".join(
        f"rank {rank}: {bytes(frame.content).decode(errors='replace')}"
        for rank, frame in frames.items()
        if frame.is_problem
    )
    if problems:
        raise TypeError(
            f"[{verb}] rank {members.rank} of {members.size}: an object cannot be pickled "
            f"({problems}). Nobody has received anything; pass what pickle takes, such as "
            "functions of modules instead of lambdas"
        )


def _pickled(objs: Sequence[Any]) -> tuple[Frame, list[int]]:
    """Return the pickles of ``objs``, one after the other, and the length of each."""
    try:
        pickles = [pickle.dumps(obj, pickle.HIGHEST_PROTOCOL) for obj in objs]
    except Exception as error:  # noqa: BLE001  (__reduce__ may raise anything; every rank raises it)
        return Frame.of_problem(f"{type(error).__name__}: {error}"), []
    return Frame(b"".join(pickles)), [len(each) for each in pickles]
