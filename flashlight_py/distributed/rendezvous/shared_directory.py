"""Small immutable files in a directory that several hosts see, by operations that hold on NFS.

A file appears whole or not at all: it is created exclusively under a temporary name, closed
(an NFS client sends everything at close) and renamed. Nothing is locked, no link is counted and
no file time is compared. Content is JSON; nothing is unpickled.
"""

from __future__ import annotations

import ipaddress
import itertools
import json
import os
import re
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

from flashlight_py.distributed.rendezvous.peers import Peer
from flashlight_py.errors import RendezvousError

VERSION = 2

_NONCE = "[0-9a-f]{16}"
# What follows the run in the name of a file of each kind.
_FORMS = {"run": r"-\d+", "ask": rf"-{_NONCE}", "tmp": r"-\d+"}


class Name(NamedTuple):
    """Parts of a file's name: its kind, its run, and its number or owner."""

    kind: str
    run: str
    rest: str

    def __str__(self) -> str:
        return "-".join(self)


class Announcement(NamedTuple):
    """Announcement of a rank 0: its process, where it listens, and the secret of its run."""

    peer: Peer
    addresses: list[tuple[str, int]]
    secret: str

    def pack(self) -> bytes:
        """Return a JSON object."""
        record = {"version": VERSION, **self.peer.as_record()}
        return json.dumps({**record, "addresses": self.addresses, "secret": self.secret}).encode()

    @classmethod
    def parse(cls, content: bytes) -> Announcement:
        """Read what ``pack`` wrote.

        Raises:
            ValueError: it is none; says why.
        """
        try:
            record = json.loads(content)
        except (ValueError, RecursionError) as error:  # what is nested too deeply
            raise ValueError("is truncated or none of ours") from error
        version = record.get("version") if isinstance(record, dict) else None
        if version != VERSION:
            raise ValueError(f"has protocol version {version!r}, this process {VERSION}")
        try:
            addresses = [
                (str(ipaddress.ip_address(host)), port) for host, port in record["addresses"]
            ]
            is_whole = all(port in range(1, 65536) for _, port in addresses)
            bytes.fromhex(record["secret"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError("lacks what such a file must hold") from error
        if not is_whole:
            raise ValueError("has a port that is none")
        return cls(Peer.from_record(record), addresses, record["secret"])


class SharedDirectory:
    """The files of one rendezvous path: ``<name>.<kind>-<run>-...`` in one directory.

    ``path`` may be an existing directory (the files in it are then named ``flashlight.*``) or a
    path whose parent exists (files beside it, named after it). ``nonce`` is fresh for every object.

    Raises:
        RendezvousError: the directory is missing, is none, or nothing can be created in it.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        # os.path and not Path: what we may not look at is no directory of ours, and no crash.
        inside = os.path.isdir(self.path)
        self._directory = self.path if inside else self.path.parent
        self._prefix = ("flashlight" if inside else self.path.name) + "."
        forms = "|".join(f"{kind}-{_NONCE}{rest}" for kind, rest in _FORMS.items())
        self._names = re.compile(re.escape(self._prefix) + f"({forms})", re.ASCII)
        self.nonce = secrets.token_hex(8)
        self._counter = itertools.count()
        self._cache: dict[Name, Announcement] = {}
        self.ignored: dict[str, str] = {}
        self._owner = self._probe_owner()

    def names(self) -> set[Name]:
        """Return the names of all files there are.

        An NFS client may answer from a listing that it cached up to a minute ago. Making a file
        in the directory changes the directory, so that the client has to ask again. A name is
        opened only after a listing has shown it, hence a cached "no such file" cannot hide one.
        """
        try:
            self._make_temporary(b"").unlink(missing_ok=True)
            matches = map(self._names.fullmatch, os.listdir(self._directory))
            return {Name(*match[1].split("-")) for match in matches if match}
        except OSError as error:
            self._refuse("list", error)

    def write(self, name: Name, content: bytes = b"") -> None:
        """Create the file ``name``; it appears with its whole content."""
        try:
            temporary = self._make_temporary(content)
            with suppress(FileNotFoundError):  # a later run's rank 0 took it for a dead one's
                temporary.rename(self._file(name))
        except OSError as error:
            self._refuse(f"create {name} in", error)

    def read(self, name: Name, again: bool = False) -> Announcement | None:
        """Return what ``name`` holds, or None if it is gone, another user's or unreadable.

        Why a file was passed over is kept in ``ignored``, for the message of a later failure.
        ``again``: look at the file also if it was read before.
        """
        if again or name not in self._cache:
            try:
                self._cache[name] = Announcement.parse(self._content(name))
            except (OSError, ValueError) as error:
                self.ignored[str(name)] = _why(error)
                return None
        return self._cache[name]

    def remove(self, name: Name) -> None:
        """Remove the file ``name`` if it is there and ours to remove."""
        try:
            self._file(name).unlink(missing_ok=True)
        except OSError as error:
            self.ignored[str(name)] = f"could not be removed ({error.strerror})"

    def _file(self, name: Name) -> Path:
        return self._directory / f"{self._prefix}{name}"

    def _content(self, name: Name) -> bytes:
        # O_NONBLOCK: a FIFO that somebody put there must not block us before fstat sees it.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with open(os.open(self._file(name), flags), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_uid != self._owner:
                raise ValueError("belongs to another user or is no regular file")
            return file.read()

    def _make_temporary(self, content: bytes) -> Path:
        path = self._file(Name("tmp", self.nonce, str(next(self._counter))))
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o600)
        try:
            with open(descriptor, "wb") as file:
                file.write(content)
        except OSError:
            path.unlink(missing_ok=True)  # on a full disk there is room for its name alone
            raise
        return path

    def _probe_owner(self) -> int:
        """Return who owns the files that we create, as the file's server sees it.

        An NFS server may map us to somebody else (root to nobody), so the answer of geteuid()
        would make us refuse our own files.
        """
        try:
            probe = self._make_temporary(b"")
            owner = probe.lstat().st_uid
            probe.unlink(missing_ok=True)
        except OSError as error:
            self._refuse("create files in", error)
        return owner

    def _refuse(self, doing: str, error: OSError) -> NoReturn:
        raise RendezvousError(
            f"rendezvous at {self.path}: cannot {doing} {self._directory}: {error.strerror}; "
            "FILE_PATH needs a parent directory that exists, that every rank sees and may write to"
        ) from error


def _why(error: OSError | ValueError) -> str:
    if isinstance(error, PermissionError):
        return "belongs to another user or may not be read"
    return f"cannot be opened ({error.strerror})" if isinstance(error, OSError) else str(error)
