"""Files of checkpoints. A checkpoint appears in its directory complete or not at all.

A checkpoint is a directory ``<number>-step-<step>`` with two files. A new checkpoint has a larger
number than all earlier checkpoints, even if its step is smaller. While a directory is being written
or removed, its name begins with a full stop. If a process is killed meanwhile, the next ``save``
removes this directory.

The manifest contains the length and the SHA-256 of the state file. A thread computes the SHA-256
during the write, because hashing and writing take about the same time on a fast disk. Functions
raise OSError if the system reports an error, and ValueError if a file does not match the manifest.
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
SMALL_BYTES = 1 << 14  # bytes; the digest of fewer bytes takes less time than a thread's start


class Content(NamedTuple):
    """Identity of a file's content: its length in bytes and its hexadecimal SHA-256."""

    nbytes: int
    sha256: str


def write_durable(file: Path, pieces: Iterable[Array]) -> Content:
    """Create ``file`` from ``pieces`` (uint8), and return when the data is on the disk.

    At most two pieces are in memory: a piece is written while the previous piece is digested.
    """
    with open(file, "xb") as stream:
        sha256 = _sha256_of(pieces, stream.write)
        stream.flush()
        os.fsync(stream.fileno())
        return Content(stream.tell(), sha256)


def read_durable(file: Path, expected: Content) -> Array:
    """Return the bytes of ``file``; raise ValueError if they do not match ``expected``."""
    with open(file, "rb") as stream:
        present = os.fstat(stream.fileno()).st_size
        if present != expected.nbytes:
            raise ValueError(f"{file.name}: expected {expected.nbytes} bytes, got {present}")
        content = np.empty(present, np.uint8)

        def read(part: memoryview) -> None:
            if stream.readinto(part) < part.nbytes:
                raise ValueError(f"{file.name}: expected {expected.nbytes} bytes, got fewer")

        if _sha256_of([content], read) != expected.sha256:
            raise ValueError(f"{file.name}: expected the SHA-256 of the manifest, got another")
    return content


def sync_directory(directory: Path) -> None:
    """Block until the names in ``directory`` are on the disk."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows, which opens no folders
        return
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256_of(pieces: Iterable[Array], move: Callable[[memoryview], object]) -> str:
    """Call ``move`` to read or write each part of ``pieces``. Return the SHA-256 of all parts."""
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
    """Content of the manifest file. ``parts`` lists the names of the saved parts, as "module"."""

    step: int
    ranks: int
    parts: tuple[str, ...]
    state: Content
    version: str

    def encode(self) -> bytes:
        """Return the manifest as JSON with a digest, by which ``decode`` detects damage."""
        content = {"format": FORMAT, **asdict(self), "state": self.state._asdict()}
        return _text({"manifest": content, "sha256": _digest(content)})

    @classmethod
    def decode(cls, file: bytes) -> "Manifest":
        """Return the manifest; raise ValueError if ``file`` is damaged or of a later version."""
        try:
            decoded = json.loads(file)
            content = dict(decoded["manifest"])
            is_intact = decoded["sha256"] == _digest(content) and file == _text(decoded)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"its manifest is truncated or damaged ({error})") from error
        if not is_intact:
            raise ValueError("its manifest needs a matching SHA-256, got another")
        if content.pop("format") != FORMAT:
            raise ValueError(f"got a later format. Install flashlight_py {content['version']}")
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
    """Write a checkpoint with the bytes of ``state``, and return its path.

    The directory gets its final name when its content is on the disk. If writing fails, the
    directory is removed. Finally, if there are more than ``keep`` checkpoints, the oldest ones are
    removed.
    """
    missing = [folder for folder in (directory, *directory.parents) if not folder.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_directory(folder.parent)
    for path in list(directory.iterdir()):  # Leftovers of killed processes may fill the disk.
        if _TEMPORARY.fullmatch(path.name):
            _remove(path)
    before = newest_first(directory)
    temporary = directory / f".writing-{secrets.token_hex(8)}"
    temporary.mkdir()
    try:
        content = write_durable(temporary / STATE, state)
        manifest = Manifest(step, ranks, tuple(parts), content, __version__)
        write_durable(temporary / MANIFEST, [np.frombuffer(manifest.encode(), np.uint8)])
        sync_directory(temporary)
        number = _number(before[0]) + 1 if before else 1
        path = temporary.rename(directory / f"{number:06d}-step-{step}")
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_directory(directory)
    # A user's folder may have the name of a checkpoint. Only a checkpoint has a state file.
    for old in [folder for folder in before if os.path.exists(folder / STATE)][keep - 1 :]:
        _remove(old)
    return path


def read_checkpoint(checkpoint: Path) -> tuple[Manifest, Array]:
    """Return the manifest and the verified bytes of the state (uint8)."""
    manifest = Manifest.decode((checkpoint / MANIFEST).read_bytes())
    return manifest, read_durable(checkpoint / STATE, manifest.state)


def newest_first(directory: Path) -> list[Path]:
    """Return the paths in ``directory`` that have names of checkpoints, newest first."""
    try:
        # One listing of a large folder may miss a checkpoint that is replaced at the same time.
        listings = (list(directory.iterdir()) for _ in range(5))
        paths = ([path for path in listing if _NAME.fullmatch(path.name)] for listing in listings)
        return sorted(next(filter(None, paths), []), key=_number, reverse=True)
    except OSError as error:
        nearest = next(entry for entry in (directory, *directory.parents) if os.path.lexists(entry))
        if isinstance(error, FileNotFoundError) and nearest.is_dir():
            return []
        raise OSError(
            f"expected the folder of a run or of a checkpoint, got {directory}: {error}. Pass the "
            "folder that was passed to save, or mount its disk"
        ) from error


def checkpoints_in(path: Path) -> list[Path]:
    """Return the checkpoints in ``path``, newest first, or ``[path]`` if it is a checkpoint."""
    siblings = newest_first(path.parent) if _NAME.fullmatch(path.name) else []
    files = [path / MANIFEST, *(checkpoint / STATE for checkpoint in (path, *siblings))]
    return newest_first(path) or [path] * any(map(os.path.exists, files))


def _remove(path: Path) -> None:
    """Remove a folder, a file or a link (not its target). Log a warning if this fails."""
    try:
        if _NAME.fullmatch(path.name):
            # A partly removed folder must not have the name of a checkpoint.
            path = path.rename(path.parent / f".removing-{secrets.token_hex(8)}")
        (shutil.rmtree if path.is_dir() and not path.is_symlink() else os.unlink)(path)
    except OSError as error:
        _log.warning("[save] rank 0: cannot remove %s: %s. Remove it by hand", path, error)


def _number(path: Path) -> int:
    return int(path.name.partition("-")[0])
