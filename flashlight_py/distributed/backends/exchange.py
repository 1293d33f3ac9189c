"""Exchange of bytes between the connected ranks of a backend."""

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

# A frame consists of a header (length of the content, kind, number of buffers), the lengths of the
# buffers, the buffers, and the content. Each part is padded to ``_ALIGNED`` bytes.
# csrc/fast/objects.c uses the same format.
_HEAD = struct.Struct("=qii")
_ALIGNED = 16
CONTENT, PROBLEM, LATER = range(3)


class Frame(NamedTuple):
    """A message: ``content`` and ``buffers``. The lengths of both are sent as well.

    ``kind`` is ``CONTENT`` for data, and ``PROBLEM`` for an error message. ``LATER`` announces a
    frame that the next call sends; ``content`` is the size of that frame in bytes. Only native code
    sends buffers.
    """

    content: bytes | memoryview
    kind: int = CONTENT
    buffers: Sequence[memoryview] = ()

    def pack(self) -> Array:
        """Return the frame, which must have no buffers, as an array of bytes."""
        size = len(self.content)
        fields = _HEAD.pack(size, self.kind, 0), self.content, bytes(-size % _ALIGNED)
        return np.frombuffer(bytearray().join(fields), np.uint8)


def read_frames(data: Array, limit: int | None = None) -> list[Frame]:
    """Return the first ``limit`` frames that ``data`` contains; None: all frames."""
    memory, offset = memoryview(data), 0  # type: ignore[arg-type]
    frames: list[Frame] = []
    while offset < len(memory) and len(frames) != limit:
        length, kind, count = _HEAD.unpack_from(memory, offset)
        lengths = np.frombuffer(memory, np.int64, count, offset + _HEAD.size).tolist()
        fields = []
        for size in (_HEAD.size, 8 * count, *lengths, length):
            fields.append(memory[offset : offset + size])
            offset += size + -size % _ALIGNED
        frames.append(Frame(fields[-1], kind, fields[2:-1]))
    return frames


def exchange_bytes(
    backend: Backend, payload: bytes, part_of: str = "", seconds: float | None = None
) -> list[bytes]:
    """Return the payloads of all ranks in rank order. ``part_of`` and ``seconds``: see ``Call``."""
    frame = Frame(payload).pack()
    data = backend.start(Call(ALL_GATHER, frame, part_of=part_of, seconds=seconds)).wait()
    return [bytes(frame.content) for frame in read_frames(data)]


class BackendStore(Store):
    """A store on a connected backend. ``part_of`` names the calling function in errors."""

    def __init__(self, backend: Backend, part_of: str = "") -> None:
        self.rank, self.size = backend.rank, backend.size
        self._backend, self._part_of = backend, part_of

    def exchange(self, payload: bytes) -> Roster:
        """Return the payloads of all ranks. Raises the errors of ``Work.wait``."""
        return Roster.of(exchange_bytes(self._backend, payload, self._part_of))
