"""Bytes between ranks that are joined already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flashlight_py.device import Array
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.rendezvous.store import Store

__all__ = ["BackendStore", "Letter", "broadcast_letter", "exchange_bytes", "exchange_letters"]

_HEAD_BYTES = 16
# What is not longer travels with its head, in one collective instead of two.
_SHORT_BYTES = 1024 - _HEAD_BYTES


class Letter(NamedTuple):
    """Bytes of any length, which may say in words why there are none."""

    content: bytes | bytearray | memoryview
    is_problem: bool = False

    @classmethod
    def of_problem(cls, words: str) -> Letter:
        """Return a letter that says ``words``, or as much of them as travels with its head."""
        return cls(
            bytearray(words.encode(errors="backslashreplace")[:_SHORT_BYTES]), is_problem=True
        )


def exchange_bytes(backend: Backend, payload: bytes) -> list[bytes]:
    """Give ``payload``, of any length, and return every rank's; collective, blocking.

    Raises:
        DistributedError: as ``Work.wait``.
    """
    return [bytes(letter.content) for letter in exchange_letters(backend, Letter(payload))]


def exchange_letters(backend: Backend, mine: Letter, root: int | None = None) -> list[Letter]:
    """Give a letter and return every rank's; collective, blocking.

    If one of them is a problem the others are empty. Only ``root`` needs them, if it is given: they
    may be empty elsewhere.

    Raises:
        DistributedError: as ``Work.wait``.
    """
    heads = backend.all_gather(_head(mine), blocking=True).wait().reshape(backend.size, -1)
    letters = [_open(head) for head in heads]
    lengths = [_length(head) for head in heads]
    if max(lengths) <= _SHORT_BYTES or any(letter.is_problem for letter in letters):
        return letters
    given = np.frombuffer(mine.content, np.uint8)
    if root is None:
        joined = backend.all_gather(given, blocking=True).wait()
    else:
        joined = backend.gather(given, root, blocking=True).wait()
    return letters if joined is None else _cut(joined, lengths)


def broadcast_letter(backend: Backend, mine: Letter | None, root: int) -> Letter:
    """Return the letter of ``root``, whose content is writable; collective, blocking.

    Raises:
        DistributedError: as ``Work.wait``.
    """
    head = np.empty(_HEAD_BYTES + _SHORT_BYTES, np.uint8) if mine is None else _head(mine)
    backend.broadcast(head, root, blocking=True).wait()
    length = _length(head)
    if length <= _SHORT_BYTES:
        return _open(head)
    content = np.empty(length, np.uint8) if mine is None else np.frombuffer(mine.content, np.uint8)
    backend.broadcast(content, root, blocking=True).wait()
    return Letter(content.data)


def _head(letter: Letter) -> Array:
    """Return what every letter of this kind has as many bytes of."""
    length = len(letter.content)
    head = np.zeros(_HEAD_BYTES + _SHORT_BYTES, np.uint8)
    head[:_HEAD_BYTES].view(np.int64)[:] = length, letter.is_problem
    if length <= _SHORT_BYTES:
        head[_HEAD_BYTES : _HEAD_BYTES + length] = np.frombuffer(letter.content, np.uint8)
    return head


def _length(head: Array) -> int:
    return int(head[:8].view(np.int64)[0])


def _open(head: Array) -> Letter:
    """Return the letter that is in its head; an empty one if it is too long for that."""
    length = _length(head)
    end = _HEAD_BYTES + (length if length <= _SHORT_BYTES else 0)
    return Letter(head.data[_HEAD_BYTES:end], bool(head[8]))


def _cut(joined: Array, lengths: Sequence[int]) -> list[Letter]:
    ends, whole = np.cumsum(lengths), joined.data
    return [Letter(whole[end - n : end]) for end, n in zip(ends, lengths, strict=True)]


class BackendStore(Store):
    """A store among the ranks of a backend."""

    def __init__(self, backend: Backend) -> None:
        self.rank, self.size = backend.rank, backend.size
        self._backend = backend

    def exchange(self, payload: bytes) -> list[bytes]:
        """Give ``payload`` and return every rank's; collective, blocking.

        Raises:
            DistributedError: as ``Work.wait``.
        """
        return exchange_bytes(self._backend, payload)

    def close(self) -> None:
        """Do nothing: the backend goes on."""
