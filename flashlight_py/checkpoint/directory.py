"""The directory of a run's checkpoints: each appears whole or not at all.

Each is a directory ``<number>-step-<step>`` with two files. Numbers count up, so the newest has the
highest, also where a run went back to an earlier step. One that is being written, or removed, has
a name that begins with a full stop; if we are killed then, the next ``save`` removes it.

The contents of a file are known by its length and its SHA-256. Computing the digest takes as long
as writing to a fast disk, so it happens meanwhile, in a thread: hashlib releases the GIL. All raise
the OSErrors of the system; a ValueError says what differs from what was written.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flashlight_py._version import __version__
from flashlight_py.device import Array

PIECE_BYTES = 8 << 20
# So much may wait for its digest: enough to compute and write at once, and little to hold.
WAITING_BYTES = 2 * PIECE_BYTES


class Content(NamedTuple):
    """The identity of a file's content: its length in bytes, and its SHA-256 in hexadecimal."""

    nbytes: int
    sha256: str


def write_durable(file: Path, pieces: Iterable[Array]) -> Content:
    """Create ``file`` of ``pieces`` (uint8); it is on the disk when this returns.

    A piece is held until it is written and digested: beside the last one, those of which 16 MiB
    at most wait for the digest.
    """
    with open(file, "xb") as stream, _Digest() as digest:
        for piece in pieces:
            for part in _parts(piece):
                digest.add(part)
                stream.write(part.data)
        stream.flush()
        os.fsync(stream.fileno())
        return Content(stream.tell(), digest.result())


def read_durable(file: Path, expected: Content) -> Array:
    """Return what ``file`` holds, as uint8 of one dimension."""
    with open(file, "rb") as stream, _Digest() as digest:
        present = os.fstat(stream.fileno()).st_size
        if present != expected.nbytes:
            raise ValueError(f"{file.name} has {present} bytes, {expected.nbytes} were written")
        content = np.empty(present, np.uint8)
        for part in _parts(content):
            if stream.readinto(part.data) < part.nbytes:
                raise ValueError(f"{file.name} became shorter while it was read")
            digest.add(part)
        if digest.result() != expected.sha256:
            raise ValueError(f"{file.name} holds other bytes than were written (by its SHA-256)")
    return content


def sync_directory(directory: Path) -> None:
    """Return when the names in ``directory`` are on the disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Digest(ThreadPoolExecutor):
    """The SHA-256 of what is added, computed in a thread."""

    def __init__(self) -> None:
        super().__init__(1, thread_name_prefix="flashlight-digest")
        self._found = hashlib.sha256()
        self._waiting: deque[tuple[int, Future[None]]] = deque()
        self._waiting_bytes = 0

    def add(self, part: Array) -> None:
        """Add bytes, which are held until they are digested; blocks while too many wait."""
        done = self.submit(self._found.update, part)  # type: ignore[arg-type]
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


def _parts(content: Array) -> Iterator[Array]:
    for begin in range(0, content.size, PIECE_BYTES):
        yield content[begin : begin + PIECE_BYTES]


FORMAT = 1


@dataclass(frozen=True)
class Manifest:
    """The file beside the state: the step, who saved what, and the file's content.

    ``parts`` are the arguments of ``save`` that were given; ``ranks`` how many saved.
    """

    step: int
    ranks: int
    parts: tuple[str, ...]
    state: Content
    version: str

    def encode(self) -> bytes:
        """Return the file: JSON with a digest of itself, for a bit may flip here too."""
        content = {"format": FORMAT, **asdict(self), "state": self.state._asdict()}
        return _text({"manifest": content, "sha256": _digest(content)})

    @classmethod
    def decode(cls, file: bytes) -> Manifest:
        """Return what ``encode`` was given; a ValueError also refuses a version to come."""
        try:
            found = json.loads(file)
            content = dict(found["manifest"])
            whole = found["sha256"] == _digest(content) and file == _text(found)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"its manifest is truncated or damaged ({error})") from error
        if not whole:
            raise ValueError("its manifest holds other bytes than were written (by its SHA-256)")
        if content.pop("format") != FORMAT:
            raise ValueError(f"flashlight_py {content['version']} wrote it, in a format to come")
        parts, state = tuple(content.pop("parts")), Content(**content.pop("state"))
        return cls(parts=parts, state=state, **content)


def _text(value: Any) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode() + b"\n"


def _digest(content: Any) -> str:
    return hashlib.sha256(_text(content)).hexdigest()


MANIFEST, STATE = "manifest.json", "state.safetensors"

_NAME = re.compile(r"(\d{6,})-step-(\d+)", re.ASCII)
_TEMPORARY = re.compile(r"\.(writing|removing)-[0-9a-f]{16}", re.ASCII)


def publish(
    directory: Path, step: int, ranks: int, parts: Iterable[str], state: Iterable[Array]
) -> Path:
    """Write a checkpoint, whose state is the pieces ``state``; return its path.

    It has its name, and is on the disk with it, only once all of it is on the disk. Nothing is left
    behind when it raises.
    """
    if not directory.is_dir():
        directory.mkdir(parents=True)
        sync_directory(directory.parent)
    _remove_temporaries(directory)  # a disk that was full stays so otherwise
    last = next((_number(each) for each in newest_first(directory)), 0)
    place = _temporary(directory, "writing")
    place.mkdir()
    try:
        content = write_durable(place / STATE, state)
        manifest = Manifest(step, ranks, tuple(parts), content, __version__)
        write_durable(place / MANIFEST, [np.frombuffer(manifest.encode(), np.uint8)])
        sync_directory(place)
        path = place.rename(directory / f"{last + 1:06d}-step-{step}")
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
    sync_directory(directory)
    return path


def read(checkpoint: Path) -> tuple[Manifest, Array]:
    """Return the manifest and the bytes of the state (uint8), once they are found to be whole."""
    manifest = Manifest.decode((checkpoint / MANIFEST).read_bytes())
    return manifest, read_durable(checkpoint / STATE, manifest.state)


def newest_first(directory: Path) -> list[Path]:
    """Return the checkpoints in ``directory``, whole or not; none where there is no directory."""
    if not directory.is_dir():
        return []
    found = [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=_number, reverse=True)


def is_checkpoint(path: Path) -> bool:
    """Return whether ``path`` is one checkpoint, and not the directory of several."""
    return (path / MANIFEST).exists() or _NAME.fullmatch(path.name) is not None


def clear(directory: Path, keep: int) -> None:
    """Remove all checkpoints but the ``keep`` newest."""
    for path in newest_first(directory)[keep:]:
        # First the name: what is half removed is not to be taken for a checkpoint.
        path.rename(_temporary(directory, "removing"))
    _remove_temporaries(directory)


def _remove_temporaries(directory: Path) -> None:
    """Remove what is being removed, and what a run that died was writing."""
    for path in list(directory.iterdir()):
        if _TEMPORARY.fullmatch(path.name):
            shutil.rmtree(path)


def _number(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match
    return int(match[1])


def _temporary(directory: Path, kind: str) -> Path:
    return directory / f".{kind}-{secrets.token_hex(8)}"
