"""The directory of a run's checkpoints: each appears whole or not at all.

Each is a directory ``<number>-step-<step>`` with two files. Numbers count up, also if steps go
back. A directory that is being written or removed has a name that begins with a full stop. After a
kill the next ``save`` removes it.

A file's length and SHA-256 identify its content. A thread computes the digest during the write,
because it takes as long as a fast disk. Functions raise the OSErrors of the system; a ValueError
says what differs from the written bytes.
"""

import hashlib
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flashlight_py._version import __version__
from flashlight_py.device import Array

_log = logging.getLogger("flashlight_py")

PIECE_BYTES = 8 << 20
SMALL_BYTES = 1 << 14  # are digested before a thread would begin to


class Content(NamedTuple):
    """The identity of a file's content: its length in bytes, and its SHA-256 in hexadecimal."""

    nbytes: int
    sha256: str


def write_durable(file: Path, pieces: Iterable[Array]) -> Content:
    """Create ``file`` from ``pieces`` (uint8); it is on the disk when this returns.

    Holds two pieces at most: one is written while the digest of the one before is computed.
    """
    with open(file, "xb") as stream:
        sha256 = _sha256_of(pieces, stream.write)
        stream.flush()
        os.fsync(stream.fileno())
        return Content(stream.tell(), sha256)


def read_durable(file: Path, expected: Content) -> Array:
    """Return what ``file`` holds, as uint8 of one dimension."""
    with open(file, "rb") as stream:
        present = os.fstat(stream.fileno()).st_size
        if present != expected.nbytes:
            raise ValueError(f"{file.name} has {present} bytes, {expected.nbytes} were written")
        content = np.empty(present, np.uint8)

        def read(part: memoryview) -> None:
            if stream.readinto(part) < part.nbytes:
                raise ValueError(f"{file.name} became shorter while it was read")

        if _sha256_of([content], read) != expected.sha256:
            raise ValueError(f"{file.name} holds other bytes than were written (by its SHA-256)")
    return content


def sync_directory(directory: Path) -> None:
    """Return when the names in ``directory`` are on the disk."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256_of(pieces: Iterable[Array], move: Callable[[memoryview], object]) -> str:
    """Return the SHA-256 of ``pieces``, in hexadecimal, after ``move`` was called with each part.

    A thread computes the digest of one part while the next part is moved.
    """
    digest = hashlib.sha256()
    with ThreadPoolExecutor(1, thread_name_prefix="flashlight-digest") as thread:
        added = thread.submit(digest.update, b"")
        for piece in pieces:
            for begin in range(0, piece.size, PIECE_BYTES):
                part = piece[begin : begin + PIECE_BYTES].data
                move(part)
                added.result()
                if part.nbytes > SMALL_BYTES:
                    added = thread.submit(digest.update, part)
                else:
                    digest.update(part)
        added.result()
    return digest.hexdigest()


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
    def decode(cls, file: bytes) -> "Manifest":
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

_NAME = re.compile(r"\d{6,}-step-\d+", re.ASCII)
_TEMPORARY = re.compile(r"\.(writing|removing)-[0-9a-f]{16}", re.ASCII)


def publish(
    directory: Path, step: int, ranks: int, parts: Iterable[str], state: Iterable[Array], keep: int
) -> Path:
    """Write a checkpoint, whose state is the pieces ``state``, and return its path.

    The checkpoint gets its name once its content is on the disk. An exception leaves nothing
    behind. All but the newest ``keep`` checkpoints are removed; a failure of that is a warning.
    """
    missing = [each for each in (directory, *directory.parents) if not each.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for each in missing:
        sync_directory(each.parent)
    for path in list(directory.iterdir()):  # Leftovers may fill the disk.
        if _TEMPORARY.fullmatch(path.name):
            _remove(path)
    before = newest_first(directory)
    place = directory / f".writing-{secrets.token_hex(8)}"
    place.mkdir()
    try:
        content = write_durable(place / STATE, state)
        manifest = Manifest(step, ranks, tuple(parts), content, __version__)
        write_durable(place / MANIFEST, [np.frombuffer(manifest.encode(), np.uint8)])
        sync_directory(place)
        number = _number(before[0]) + 1 if before else 1
        path = place.rename(directory / f"{number:06d}-step-{step}")
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
    sync_directory(directory)
    # Other entries may have such names, too: only a checkpoint has a state.
    for old in [each for each in before if os.path.exists(each / STATE)][keep - 1 :]:
        _remove(old)
    return path


def read(checkpoint: Path) -> tuple[Manifest, Array]:
    """Return the manifest and the bytes of the state (uint8), once they are found to be whole."""
    manifest = Manifest.decode((checkpoint / MANIFEST).read_bytes())
    return manifest, read_durable(checkpoint / STATE, manifest.state)


def newest_first(directory: Path) -> list[Path]:
    """Return the entries of ``directory`` with names of checkpoints; none if it does not exist."""
    try:
        # One listing of a large folder may miss the only checkpoint if it is replaced meanwhile.
        listings = (list(directory.iterdir()) for _ in range(5))
        paths = ([each for each in listing if _NAME.fullmatch(each.name)] for listing in listings)
        return sorted(next(filter(None, paths), []), key=_number, reverse=True)
    except OSError as error:
        nearest = next(each for each in (directory, *directory.parents) if os.path.lexists(each))
        if isinstance(error, FileNotFoundError) and nearest.is_dir():
            return []
        raise OSError(
            f"expected the folder of a run or of a checkpoint, got {directory}: {error}. Pass the "
            "folder that was given to save, or mount its disk"
        ) from error


def candidates(path: Path) -> list[Path]:
    """Return the checkpoints in the folder ``path``, newest first, or ``path`` if it is one."""
    siblings = newest_first(path.parent) if _NAME.fullmatch(path.name) else []
    files = [path / MANIFEST, *(each / STATE for each in (path, *siblings))]
    return newest_first(path) or [path] * any(map(os.path.exists, files))


def _remove(path: Path) -> None:
    """Remove a folder, a file, or a link without its target; warn if that fails."""
    try:
        if _NAME.fullmatch(path.name):
            # A folder that is removed in part must not have the name of a checkpoint.
            path = path.rename(path.parent / f".removing-{secrets.token_hex(8)}")
        remove = shutil.rmtree if path.is_dir() and not path.is_symlink() else os.unlink
        remove(path)
    except OSError as error:
        _log.warning("[save] rank 0: cannot remove %s: %s. Remove it by hand", path, error)


def _number(path: Path) -> int:
    return int(path.name.partition("-")[0])
