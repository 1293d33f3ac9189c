"""Groups of some of a group's ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.exchange import exchange_bytes
from flashlight_py.distributed.rendezvous.store import Store
from flashlight_py.distributed.verbs.base import Verbs, check_seconds, whole
from flashlight_py.distributed.verbs.refusing import refusable
from flashlight_py.errors import MismatchError

if TYPE_CHECKING:
    from flashlight_py.distributed.group import ProcessGroup

__all__ = ["MemberStore", "Subgroups"]

# Users' tags begin at 0: this one is for members that are about to become a group.
_TAG = -1


class Subgroups(Verbs):
    """``new_group`` and ``split``."""

    @refusable()
    def new_group(self, ranks: Sequence[int], timeout: float | None = None) -> ProcessGroup:
        """Make a group of some ranks of this one; see :func:`flashlight_py.new_group`."""
        members, seconds = self._check_members(ranks), check_seconds("new_group", timeout)
        backend = self.backend()
        with self._journal.recording("new_group"), backend.part_of("new_group"):
            self._agree(members, seconds)
            return self._found(members, seconds)

    @refusable()
    def split(self, color: int | None, key: int = 0, timeout: float | None = None) -> ProcessGroup:
        """Make a group of those with one color; see :func:`flashlight_py.split`."""
        color, key, seconds = _check_color(color), _check_key(key), check_seconds("split", timeout)
        backend = self.backend()
        with self._journal.recording("split"), backend.part_of("split"):
            told = exchange_bytes(backend, json.dumps([color, key, seconds]).encode())
            choices = list(map(json.loads, told))
            self._require_same("split", [f"split{_limit(limit)}" for _, _, limit in choices])
            mates = [(k, rank) for rank, (c, k, _) in enumerate(choices) if c == color]
            members = [] if color is None else [rank for _, rank in sorted(mates)]
            return self._found(members, seconds)

    def _check_members(self, ranks: Sequence[int]) -> list[int]:
        members = [self._check_rank("new_group", "each of ranks", rank) for rank in ranks]
        if len(set(members)) < len(members):
            raise ValueError(f"new_group: a rank is in the list twice: {members}")
        if not members:
            raise ValueError("new_group: a group has at least one rank, got none")
        return members

    def _agree(self, members: Sequence[int], seconds: float | None) -> None:
        """Make sure that all ranks of this group ask for the same new one."""
        mine = f"new_group {json.dumps(members)}{_limit(seconds)}"
        told = exchange_bytes(self.backend(), mine.encode())
        self._require_same("new_group", [text.decode() for text in told])

    def _require_same(self, verb: str, asked: Sequence[str]) -> None:
        if len(set(asked)) > 1:
            calls = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(asked))
            raise MismatchError(
                f"[{verb}] rank {self.rank} of {self.size}: the ranks asked for different "
                f"groups ({calls}). Every rank of the parent must pass the same"
            )

    def _found(self, members: list[int], seconds: float | None) -> ProcessGroup:
        if self.rank not in members:
            return self._outside(members)
        return self._inside(members, MemberStore(self.backend(), members), seconds)

    def _inside(self, members: list[int], store: Store, timeout: float | None) -> ProcessGroup:
        raise NotImplementedError  # ProcessGroup knows how a group is made

    def _outside(self, members: list[int]) -> ProcessGroup:
        raise NotImplementedError  # ProcessGroup knows how a group is made


def _limit(seconds: float | None) -> str:
    return "" if seconds is None else f", timeout={seconds!r}"


def _check_color(color: object) -> int | None:
    number = None if isinstance(color, bool) else whole(color)
    if number is None and color is not None:
        raise ValueError(f"split: color must be an integer, or None to stay out; got {color!r}")
    return number


def _check_key(key: object) -> int:
    number = whole(key)
    if number is None:
        raise ValueError(f"split: key must be an integer, got {key!r}")
    return number


class MemberStore(Store):
    """Some ranks of a joined backend as a store; the others have nothing to do with it.

    The first of ``members`` hears all and tells all, by messages.
    """

    def __init__(self, backend: Backend, members: Sequence[int]) -> None:
        self._backend, self._members = backend, list(members)
        self.rank, self.size = self._members.index(backend.rank), len(self._members)

    def exchange(self, payload: bytes) -> list[bytes]:
        """Give ``payload`` and return every member's; collective among them, blocking.

        Raises:
            DistributedError: as ``Work.wait``.
        """
        hub, *others = self._members
        if self.rank != 0:
            self._tell(hub, payload)
            return _unpack(self._hear(hub), self.size)
        payloads = [payload, *(self._hear(member) for member in others)]
        for member in others:
            self._tell(member, _pack(payloads))
        return payloads

    def close(self) -> None:
        """Do nothing: the backend goes on."""

    def _tell(self, peer: int, payload: bytes) -> None:
        room = np.frombuffer(bytearray(payload), np.uint8)
        self._backend.send(np.array([room.size]), peer, _TAG, blocking=True).wait()
        self._backend.send(room, peer, _TAG, blocking=True).wait()

    def _hear(self, peer: int) -> bytes:
        length = np.zeros(1, np.int64)
        self._backend.recv(length, peer, _TAG, blocking=True).wait()
        room = np.empty(length[0], np.uint8)
        self._backend.recv(room, peer, _TAG, blocking=True).wait()
        return room.tobytes()


def _pack(payloads: Sequence[bytes]) -> bytes:
    lengths = np.array([len(payload) for payload in payloads], np.int64)
    return lengths.tobytes() + b"".join(payloads)


def _unpack(packed: bytes, count: int) -> list[bytes]:
    lengths = np.frombuffer(packed[: 8 * count], np.int64)
    ends = np.cumsum(lengths) + 8 * count
    return [packed[end - n : end] for end, n in zip(ends, lengths, strict=True)]
