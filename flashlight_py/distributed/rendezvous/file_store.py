"""Ranks that see one file system meet at a path: a file there says where rank 0 listens.

Rank 0 listens on the loopback and announces its run in a file with a random name: address, process
and a secret of this run. Only its user can read the file, so a process that knows the secret is a
rank. The ranks then meet at that port. A rank that gets no answer, perhaps on another host, leaves
a file that asks rank 0 to listen on its other addresses, too, and to announce them.

Files of a dead run do no harm: its process is known to be dead, its address refuses, or another
program that listens there does not know the secret. Rank 0 removes them at its end. A rank that
finds no rank 0 goes on looking, so a rank 0 that died while ranks gathered may be started again.
Rank 0 connects to every other announced rank 0: if that lives, it answers that two processes claim
this rank, or that its run is under way. A rank has one connection, so of two runs at one path only
one can become complete. File times are not used, so clocks may differ.
"""

from __future__ import annotations

import ipaddress
import itertools
import json
import os
import re
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

from flashlight_py import system
from flashlight_py.distributed.rendezvous.gate import LONGEST_PAUSE
from flashlight_py.distributed.rendezvous.secret import FLAGS, NONCE_BYTES, Secret, create_private
from flashlight_py.distributed.rendezvous.store import Peer, check_member, this_process
from flashlight_py.distributed.rendezvous.tree import TreeStore
from flashlight_py.distributed.rendezvous.wire import NobodyError, Offer, SilentError, claim
from flashlight_py.errors import RendezvousError
from flashlight_py.interfaces import listen_everywhere, own_addresses

# Seconds to wait for an answer at one announcement, and at that of a rank 0 that began at the same
# time as this one: both may wait for each other.
_PATIENCE, _SHORT_PATIENCE = 2.0, 0.25

LOOPBACK = "127.0.0.1"
VERSION = 3  # of the format of announcements

_NONCE = "[0-9a-f]{16}"
# What follows the run in the name of a file of each kind.
_FORMS = {"run": r"-\d+", "ask": rf"-{_NONCE}", "tmp": r"-\d+"}


class Name(NamedTuple):
    """The parts of a file's name: its kind, the run that it belongs to, its number or owner."""

    kind: str
    run: str
    rest: str

    def __str__(self) -> str:
        return "-".join(self)


class Announcement(NamedTuple):
    """An announcement of rank 0: its process, its address, and the secret of its run."""

    peer: Peer
    addresses: list[tuple[str, int]]
    secret: str

    def pack(self) -> bytes:
        """Return a JSON object."""
        return json.dumps({"version": VERSION, **self._asdict()}).encode()

    @classmethod
    def parse(cls, content: bytes) -> Announcement:
        """Read what ``pack`` wrote. Raises ValueError, with the reason, if it is anything else."""
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
            bytes.fromhex(record["secret"])
            peer = Peer(*record["peer"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError("lacks what such a file must hold") from error
        if not all(port in range(1, 65536) for _, port in addresses):
            raise ValueError("has a port that is none")
        return cls(peer, addresses, record["secret"])


class SharedDirectory:
    """The files of one rendezvous path: ``<name>.<kind>-<run>-...`` in one directory.

    They never change, since NFS clients cache files by name. A file is created exclusively under a
    temporary name, closed (an NFS client sends everything at close) and renamed, so it appears
    whole or not at all. Content is JSON.

    ``path`` may be an existing directory (the files in it are then named ``flashlight.*``) or a
    path whose parent exists (files beside it, named after it). ``nonce`` is fresh for every object.
    Raises RendezvousError if the directory is missing, is no directory, or no file can be created.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        # os.path returns False if we may not look at it; Path would raise.
        inside = os.path.isdir(self.path)
        self._directory = self.path if inside else self.path.parent
        self._prefix = ("flashlight" if inside else self.path.name) + "."
        forms = "|".join(f"{kind}-{_NONCE}{rest}" for kind, rest in _FORMS.items())
        self._names = re.compile(re.escape(self._prefix) + f"({forms})", re.ASCII)
        self.nonce = system.random_bytes(8).hex()
        self._counter = itertools.count()
        self._cache: dict[Name, Announcement] = {}
        self.ignored: dict[str, str] = {}  # files that were passed over, and why
        # The owner of files that we create: an NFS server may map root to nobody.
        try:
            probe = self._make_temporary(b"")
            self._owner = probe.lstat().st_uid
            probe.unlink(missing_ok=True)
        except OSError as error:
            self._refuse("create files in", error)

    def names(self) -> set[Name]:
        """Return the names of all files there are.

        An NFS client caches a listing for up to a minute. A new file changes the directory, so that
        the client has to ask again. A name is opened only after a listing has shown it, so that a
        cached "no such file" cannot hide it.
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

        ``again``: look at the file also if it was read before.
        """
        if again or name not in self._cache:
            try:
                with open(os.open(self._file(name), os.O_RDONLY | FLAGS), "rb") as file:
                    status = os.fstat(file.fileno())
                    if not stat.S_ISREG(status.st_mode) or status.st_uid != self._owner:
                        raise ValueError("belongs to another user or is no regular file")
                    self._cache[name] = Announcement.parse(file.read())
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

    def _make_temporary(self, content: bytes) -> Path:
        path = self._file(Name("tmp", self.nonce, str(next(self._counter))))
        create_private(path, content)
        return path

    def _refuse(self, doing: str, error: OSError) -> NoReturn:
        raise RendezvousError(
            f"rendezvous at {self.path}: cannot {doing} {self._directory}: {error.strerror}; "
            "FILE_PATH needs a parent directory that exists, that every rank sees and may write to"
        ) from error


def _why(error: OSError | ValueError) -> str:
    if isinstance(error, PermissionError):
        return "belongs to another user or may not be read"
    return f"cannot be opened ({error.strerror})" if isinstance(error, OSError) else str(error)


class FileStore(TreeStore):
    """A store at ``path``, which every rank must see; ``timeout`` seconds per exchange.

    ``path`` is that of a ``SharedDirectory``. Nothing needs to be prepared or removed by hand, even
    after a run that was killed. Files of other users are ignored. Raises ValueError like
    ``check_member``; RendezvousError like ``SharedDirectory``, or if there is no loopback network.
    """

    kind, own, moves, patience = "path", "FILE_PATH", True, _PATIENCE

    def __init__(self, path: str | os.PathLike[str], rank: int, size: int, timeout: float) -> None:
        check_member(rank, size, timeout)
        self._directory = SharedDirectory(path)
        self.name, self.run = str(self._directory.path), self._directory.nonce
        self.known = self._secret(system.random_bytes(NONCE_BYTES).hex())
        self.secret = self.known.common
        self._listeners: list[system.Socket] = []
        self._announced: Name | None = None
        self._announcement = Announcement(this_process(), [], "")
        self.next_look = 0.0
        # Runs that had left files before ours; those that may be alive; whom we have greeted.
        self._earlier: set[str] = set()
        self._alive: set[str] = set()
        self._greeted: set[str] = set()
        # Which run's rank 0 has not answered, how often; how we asked for other addresses.
        self._failed: Counter[str] = Counter()
        self._asked: set[Name] = set()
        super().__init__(rank, size, timeout, [LOOPBACK])

    def remedy(self) -> str:
        ignored = "; ".join(f"{name} {why}" for name, why in self._directory.ignored.items())
        return (
            "start every rank with the same FILE_PATH and world size, within reach of rank 0's host"
            f"{f' (files passed over: {ignored})' if ignored else ''}"
        )

    # Rank 0 ---------------------------------------------------------------------------------------

    def listen(self, backlog: int) -> list[system.Socket]:
        self._backlog = backlog
        self._listeners.append(system.create_server((LOOPBACK, 0), backlog=backlog))
        return list(self._listeners)

    def look(self) -> system.Socket | None:
        """Keep our announcement whole, greet every rival, listen on more addresses if asked."""
        names = self._directory.names()
        if self._announced is None:
            self._earlier = {name.run for name in names}
        mine = self._announced
        if mine not in names or self._directory.read(mine, again=True) != self._announcement:
            self._announce()
            names = self._directory.names()
        for offer in self._announced_by_others(names):
            if offer.run not in self._greeted:
                self._greeted.add(offer.run)
                self._greet_rival(offer)
        self.next_look = system.monotonic() + LONGEST_PAUSE
        is_asked = any(name.kind == "ask" and name.run == self.run for name in names)
        if not is_asked or len(self._listeners) > 1:
            return None
        self._listeners.append(listen_everywhere(0, self._backlog))
        self._announce()
        return self._listeners[-1]

    def _announce(self) -> None:
        """Write the addresses for the other ranks, to another file than before: see above."""
        before = self._announced
        self._announced = Name("run", self.run, str(int(before.rest) + 1 if before else 0))
        first, *more = (int(listener.getsockname()[1]) for listener in self._listeners)
        outside = ((host, port) for port in more for host in own_addresses())
        addresses = [(LOOPBACK, first), *outside]
        self._announcement = Announcement(this_process(), addresses, self.known.given.decode())
        self._directory.write(self._announced, self._announcement.pack())
        if before is not None:
            self._directory.remove(before)

    def _greet_rival(self, offer: Offer) -> None:
        """Find out whether another run's rank 0 lives; then one of us is too many."""
        patience = _PATIENCE if offer.run < self.run else _SHORT_PATIENCE
        try:
            reason = claim(offer, self.size, patience)
        except SilentError:
            reason = ""
        except NobodyError:
            return
        self._alive.add(offer.run)
        if reason:
            raise self.error(reason)

    # The others -----------------------------------------------------------------------------------

    def offers(self) -> list[Offer]:
        """Return what is announced, what has failed least often first."""
        offers = self._announced_by_others(self._directory.names())
        return sorted(offers, key=lambda offer: self._failed[offer.run])

    def failed(self, offer: Offer) -> None:
        """Ask a rank 0 that nobody answers for, to listen where other hosts can reach it."""
        self._failed[offer.run] += 1
        ask = Name("ask", offer.run, self.run)
        if len(offer.addresses) == 1 and ask not in self._asked:
            self._asked.add(ask)
            self._directory.write(ask)

    # Every rank -----------------------------------------------------------------------------------

    def clear(self) -> None:
        """Remove our files and, as rank 0, those of runs that were dead before ours."""
        for ask in self._asked:
            self._directory.remove(ask)
        if self._announced is None:
            return
        dead = (self._earlier - self._alive) | {self.run}
        mine = [name for name in self._directory.names() if name.run in dead]
        # Announcements go first: nobody connects to what is about to end.
        for name in sorted(mine, key=lambda name: name.kind != "run"):
            self._directory.remove(name)

    def _announced_by_others(self, names: set[Name]) -> Iterator[Offer]:
        """Yield the last announcement of each run whose rank 0 is not known to be dead."""
        editions = sorted((int(name.rest), name) for name in names if name.kind == "run")
        for name in {name.run: name for _, name in editions if name.run != self.run}.values():
            found = self._directory.read(name)
            if found is not None and not found.peer.is_gone():
                where = ", ".join(f"{host}:{port}" for host, port in found.addresses)
                who = f"at {where}, announced by {found.peer}: "
                yield Offer(found.addresses, self._secret(found.secret), name.run, who)

    def _secret(self, text: str) -> Secret:
        return Secret(text.encode(), source=f"a file at {self._directory.path}")
