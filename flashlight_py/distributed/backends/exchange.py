"""Bytes between ranks that are joined already."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flashlight_py.device import Array
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.rendezvous.store import Store
from flashlight_py.distributed.verbs import ALL_GATHER, BROADCAST, GATHER
from flashlight_py.distributed.work import Work

_HEAD = struct.Struct("=q?7x")  # the length of what is framed, and whether it is a problem
_HEAD_BYTES = _HEAD.size
# What is not longer travels with its head, in one collective instead of two.
_SHORT_BYTES = 1024 - _HEAD_BYTES


class Steps(Backend):
    """``backend`` for calls that are steps of ``part_of``, or may take ``seconds`` each.

    What a call itself says counts; what it does not say is written into it.
    """

    def __init__(self, backend: Backend, part_of: str = "", seconds: float | None = None) -> None:
        self.kind, self.path = backend.kind, backend.path
        self.rank, self.size, self.processes = backend.rank, backend.size, backend.processes
        self.team, self.count = backend.team, backend.count
        self._backend, self._part_of, self._seconds = backend, part_of, seconds

    def start(self, call: Call) -> Work:
        return self._backend.start(self._limited(call))

    def start_many(self, calls: Sequence[Call]) -> Work:
        return self._backend.start_many([self._limited(call) for call in calls])

    def _limited(self, call: Call) -> Call:
        if call.seconds is None:
            call.seconds = self._seconds
        call.part_of = call.part_of or self._part_of
        return call

    def synchronize(self) -> None:
        self._backend.synchronize()

    def close(self) -> None:
        """Do nothing: the backend goes on."""


class Frame(NamedTuple):
    """Bytes of any length, which may say in words why there are none."""

    content: bytes | bytearray | memoryview
    is_problem: bool = False

    @classmethod
    def of_problem(cls, words: str) -> Frame:
        """Return a frame with ``words``, or as much of them as travels with its head."""
        content = words.encode(errors="backslashreplace")[:_SHORT_BYTES]
        return cls(bytearray(content), is_problem=True)


def exchange_bytes(backend: Backend, payload: bytes) -> list[bytes]:
    """Exchange ``payload``, of any length: return every rank's; collective, blocking.

    Raises:
        DistributedError: as ``Work.wait``.
    """
    return [bytes(frame.content) for frame in exchange_frames(backend, Frame(payload))]


def exchange_frames(backend: Backend, mine: Frame, root: int | None = None) -> list[Frame]:
    """Exchange ``mine``: return every rank's frame; collective, blocking.

    If one of them is a problem the others are empty. Only ``root`` needs them, if it is given: they
    may be empty elsewhere.

    Raises:
        DistributedError: as ``Work.wait``.
    """
    heads = np.empty((backend.size, _HEAD_BYTES + _SHORT_BYTES), np.uint8)
    # With an output of the right size a native backend has nothing to keep for Python.
    backend.start(Call(ALL_GATHER, _head(mine), out=heads.reshape(-1))).wait()
    lengths, frames = zip(*map(_open, heads), strict=True)
    if max(lengths) <= _SHORT_BYTES or any(frame.is_problem for frame in frames):
        return list(frames)
    given = np.frombuffer(mine.content, np.uint8)
    call = Call(ALL_GATHER, given) if root is None else Call(GATHER, given, root=root)
    joined = backend.start(call).wait()
    if joined is None:
        return list(frames)
    ends = np.cumsum(lengths)
    return [Frame(joined.data[end - n : end]) for end, n in zip(ends, lengths, strict=True)]


def broadcast_frame(backend: Backend, mine: Frame | None, root: int) -> Frame:
    """Return the frame of ``root``, whose content is writable; collective, blocking.

    Raises:
        DistributedError: as ``Work.wait``.
    """
    head = np.empty(_HEAD_BYTES + _SHORT_BYTES, np.uint8) if mine is None else _head(mine)
    backend.start(Call(BROADCAST, head, root=root)).wait()
    length, frame = _open(head)
    if length <= _SHORT_BYTES:
        return frame
    content = np.empty(length, np.uint8) if mine is None else np.frombuffer(mine.content, np.uint8)
    backend.start(Call(BROADCAST, content, root=root)).wait()
    return Frame(content.data)


def _head(frame: Frame) -> Array:
    """Return what has the same size for every frame: its length, and its content if short."""
    length = len(frame.content)
    head = bytearray(_HEAD_BYTES + _SHORT_BYTES)
    _HEAD.pack_into(head, 0, length, frame.is_problem)
    if length <= _SHORT_BYTES:
        head[_HEAD_BYTES : _HEAD_BYTES + length] = frame.content
    return np.frombuffer(head, np.uint8)


def _open(head: Array) -> tuple[int, Frame]:
    """Return the length of a frame, and the frame; an empty one if its head has not room for it."""
    length, is_problem = _HEAD.unpack_from(head.data)
    end = _HEAD_BYTES + (length if length <= _SHORT_BYTES else 0)
    return length, Frame(head.data[_HEAD_BYTES:end], is_problem)


class BackendStore(Store):
    """A store among the ranks of a backend."""

    def __init__(self, backend: Backend) -> None:
        self.rank, self.size = backend.rank, backend.size
        self._backend = backend

    def exchange(self, payload: bytes) -> list[bytes]:
        """Pass ``payload`` and return every rank's; raises DistributedError as ``Work.wait``."""
        return exchange_bytes(self._backend, payload)

    def close(self) -> None:
        """Do nothing: the backend goes on."""
