"""Files that are on the disk when we say so, and of which we know what was written.

What a file must hold is known by its length and its SHA-256. Computing the digest takes as long as
writing to a fast disk, so it happens meanwhile, in a thread: hashlib releases the GIL.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flashlight_py.device import Array

PIECE_BYTES = 8 << 20
# What may wait for its digest: enough to compute and write at once, and little to hold in memory.
WAITING_BYTES = 2 * PIECE_BYTES


class Content(NamedTuple):
    """What identifies a file's content: its length in bytes, and its SHA-256 in hexadecimal."""

    nbytes: int
    sha256: str


def write_durable(file: Path, pieces: Iterable[Array]) -> Content:
    """Create ``file`` of ``pieces`` (uint8); it is on the disk when this returns.

    A piece is held until it is written and digested: beside the last one, those of which 16 MiB
    at most wait for the digest.

    Raises:
        OSError: the system says so; ``FileExistsError`` if there is such a file.
    """
    nbytes = 0
    with open(file, "xb", buffering=0) as stream, _digesting() as digest:
        for piece in pieces:
            for part in _parts(piece):
                digest.add(part)
                _write_whole(stream.fileno(), part)
                nbytes += part.nbytes
        os.fsync(stream.fileno())
        return Content(nbytes, digest.result())


def read_durable(file: Path, expected: Content) -> Array:
    """Return what ``file`` holds, as uint8 of one dimension.

    Raises:
        OSError: the system says so.
        ValueError: it is not what was written; says what differs.
    """
    with open(file, "rb", buffering=0) as stream, _digesting() as digest:
        present = os.fstat(stream.fileno()).st_size
        if present != expected.nbytes:
            raise ValueError(f"{file.name} has {present} bytes, {expected.nbytes} were written")
        content = np.empty(present, np.uint8)
        for part in _parts(content):
            _read_whole(stream.fileno(), part, file)
            digest.add(part)
        if digest.result() != expected.sha256:
            raise ValueError(f"{file.name} holds other bytes than were written (by its SHA-256)")
    return content


def sync_directory(directory: Path) -> None:
    """Return when the names in ``directory`` are on the disk.

    Raises:
        OSError: the system says so.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Digest:
    """The SHA-256 of what is added, computed in the thread of ``executor``."""

    def __init__(self, executor: Executor) -> None:
        self._executor, self._found = executor, hashlib.sha256()
        self._waiting: deque[tuple[int, Future[None]]] = deque()
        self._waiting_bytes = 0

    def add(self, part: Array) -> None:
        """Add bytes, which are held until they are digested; blocks while too many wait."""
        done = self._executor.submit(self._found.update, part)  # type: ignore[arg-type]
        self._waiting.append((part.nbytes, done))
        self._waiting_bytes += part.nbytes
        self._wait(WAITING_BYTES)

    def result(self) -> str:
        """Wait for all that was added and return the digest, in hexadecimal."""
        self._wait(0)
        return self._found.hexdigest()

    def _wait(self, most: int) -> None:
        while self._waiting_bytes > most:
            nbytes, done = self._waiting.popleft()
            done.result()
            self._waiting_bytes -= nbytes


@contextmanager
def _digesting() -> Iterator[_Digest]:
    with ThreadPoolExecutor(1, thread_name_prefix="flashlight-digest") as executor:
        yield _Digest(executor)


def _parts(content: Array) -> Iterator[Array]:
    for begin in range(0, content.size, PIECE_BYTES):
        yield content[begin : begin + PIECE_BYTES]


def _write_whole(descriptor: int, part: Array) -> None:
    rest = part.data
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def _read_whole(descriptor: int, part: Array, file: Path) -> None:
    rest = part.data
    while rest:
        got = os.readv(descriptor, [rest])
        if got == 0:
            raise ValueError(f"{file.name} became shorter while it was read")
        rest = rest[got:]
