"""Bytes between ranks that are joined already."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from flashlight_py.device import Array
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.rendezvous.store import Roster, Store
from flashlight_py.distributed.verbs import ALL_GATHER
from flashlight_py.distributed.work import Work

# Of a frame: how long its content is, its kind, and how many buffers. Their lengths follow, then
# they, then the content, each padded: csrc/fast/objects.c makes and reads the same.
_HEAD = struct.Struct("=qii")
_ALIGNED = 16
CONTENT, PROBLEM, LATER = range(3)


class Steps(Backend):
    """``backend`` with defaults for ``part_of`` and ``seconds`` of calls."""

    def __init__(self, backend: Backend, part_of: str = "", seconds: float | None = None) -> None:
        self.kind, self.path = backend.kind, backend.path
        self.rank, self.size, self.processes = backend.rank, backend.size, backend.processes
        self.team, self.count, self.finds_shape = backend.team, backend.count, backend.finds_shape
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
    """Bytes that travel with their lengths.

    ``kind`` is ``CONTENT``, ``PROBLEM`` (why there is none, in words) or ``LATER`` (the length, in
    eight bytes, of the frame in the next call). Native code makes ``buffers`` of a pickle.
    """

    content: bytes | memoryview
    kind: int = CONTENT
    buffers: Sequence[memoryview] = ()

    def pack(self) -> Array:
        """Return it as an array of bytes; it has no buffers."""
        size = len(self.content)
        pieces = _HEAD.pack(size, self.kind, 0), self.content, bytes(-size % _ALIGNED)
        return np.frombuffer(bytearray().join(pieces), np.uint8)


def read_frames(joined: Array, most: int | None = None) -> list[Frame]:
    """Return the frames that lie in ``joined``, one after the other, at most so many."""
    memory, at = memoryview(joined), 0  # type: ignore[arg-type]
    frames: list[Frame] = []
    while at < len(memory) and len(frames) != most:
        length, kind, count = _HEAD.unpack_from(memory, at)
        lengths = np.frombuffer(memory, np.int64, count, at + _HEAD.size).tolist()
        parts = []
        for size in (_HEAD.size, 8 * count, *lengths, length):
            parts.append(memory[at : at + size])
            at += size + -size % _ALIGNED
        frames.append(Frame(parts[-1], kind, parts[2:-1]))
    return frames


def exchange_bytes(backend: Backend, payload: bytes) -> list[bytes]:
    """Exchange ``payload``, of any length: return every rank's. Raises as ``Work.wait``."""
    joined = backend.start(Call(ALL_GATHER, Frame(payload).pack())).wait()
    return [bytes(frame.content) for frame in read_frames(joined)]


class BackendStore(Store):
    """A store among the ranks of a backend."""

    def __init__(self, backend: Backend) -> None:
        self.rank, self.size = backend.rank, backend.size
        self._backend = backend

    def exchange(self, payload: bytes) -> Roster:
        """Pass ``payload`` and return every rank's; raises DistributedError as ``Work.wait``."""
        return Roster.of(exchange_bytes(self._backend, payload))
