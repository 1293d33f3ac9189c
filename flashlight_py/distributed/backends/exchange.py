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

# Of a frame: how long its content is, its kind, and how many buffers. Their lengths follow, then
# they, then the content, each padded: csrc/fast/objects.c makes and reads the same.
_HEAD = struct.Struct("=qii")
_ALIGNED = 16
CONTENT, PROBLEM, LATER = range(3)


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


def exchange_bytes(
    backend: Backend, payload: bytes, part_of: str = "", seconds: float | None = None
) -> list[bytes]:
    """Return the payloads of all ranks; the rest is as in ``Call``. Raises as ``Work.wait``."""
    frame = Frame(payload).pack()
    joined = backend.start(Call(ALL_GATHER, frame, part_of=part_of, seconds=seconds)).wait()
    return [bytes(frame.content) for frame in read_frames(joined)]


class BackendStore(Store):
    """A store among the ranks of a backend, as a step of the call ``part_of``."""

    def __init__(self, backend: Backend, part_of: str = "") -> None:
        self.rank, self.size = backend.rank, backend.size
        self._backend, self._part_of = backend, part_of

    def exchange(self, payload: bytes) -> Roster:
        """Pass ``payload`` and return every rank's; raises DistributedError as ``Work.wait``."""
        return Roster.of(exchange_bytes(self._backend, payload, self._part_of))
