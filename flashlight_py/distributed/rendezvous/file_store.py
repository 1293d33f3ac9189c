"""Ranks that see one file system meet at a path: a file there says where rank 0 listens.

Rank 0 listens on the loopback and announces its run, under a fresh random name: address, process,
and a secret of this run. The file is for its user alone, so who proves to know the secret is a
rank, and who answers at the address and knows it is the rank 0 that is meant. All the rest goes
over that connection, as at a port. A rank that nobody answers, as it may be on another host, leaves
a file that asks rank 0 to listen on its other addresses as well, and to announce them.

Leftovers of a dead run cannot disturb: its process is known to be dead, or its address refuses, or
whoever listens there by now does not know the secret. Rank 0 removes them at its end. Whoever finds
no rank 0 goes on looking, so a rank 0 that died while ranks gathered may be started again, and one
whose announcement was spoilt or removed announces anew. Rank 0 connects to every other announced
one itself, as a rank 0: if that lives, it answers that two claim this rank, or that its run is
under way. A rank has one connection, so of two runs at one path only one can become complete. No
file's time is looked at, so clocks may differ.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Iterator

from flashlight_py.distributed.rendezvous.client import (
    LONGEST_PAUSE,
    NobodyError,
    SilentError,
    claim,
)
from flashlight_py.distributed.rendezvous.peers import check_member, this_process
from flashlight_py.distributed.rendezvous.place import MeetingPoint, Offer
from flashlight_py.distributed.rendezvous.secret import NONCE_BYTES, Secret
from flashlight_py.distributed.rendezvous.shared_directory import (
    Announcement,
    Name,
    SharedDirectory,
)
from flashlight_py.distributed.rendezvous.sockets import LOOPBACK
from flashlight_py.distributed.rendezvous.wire import Greeting
from flashlight_py.interfaces import listen_everywhere, own_addresses

# How long one announcement may keep us from the next, in seconds; and a rank 0 that was announced
# at the same time as we were: both may be waiting for each other.
_PATIENCE, _SHORT_PATIENCE = 2.0, 0.25


class FileStore(MeetingPoint):
    """A store at ``path``, which every rank must see; ``timeout`` seconds per exchange.

    ``path`` may be an existing directory or a new name in one. Nothing needs to be prepared or
    removed by hand, also after a run that was killed. Files have mode 0600, and files of other
    users are not believed.

    Raises:
        ValueError: ``rank``, ``size`` or ``timeout`` make no sense.
        RendezvousError: the directory of ``path`` is missing or nothing can be created in it.
    """

    kind, own, moves, patience = "path", "FILE_PATH", True, _PATIENCE

    def __init__(self, path: str | os.PathLike[str], rank: int, size: int, timeout: float) -> None:
        check_member(rank, size, timeout)
        self._directory, self._me = SharedDirectory(path), this_process()
        self.name, self.run = str(self._directory.path), self._directory.nonce
        self.known = self._secret(secrets.token_hex(NONCE_BYTES))
        self.secret = self.known.common
        self._listeners: list[socket.socket] = []
        self._announced: Name | None = None
        self._announcement = Announcement(self._me, [], "")
        self.next_look = 0.0
        # Runs that had left files before ours; those that may be alive; whom we have greeted.
        self._earlier: set[str] = set()
        self._alive: set[str] = set()
        self._greeted: set[str] = set()
        # Which run's rank 0 has not answered, how often; how we asked for other addresses.
        self._failed: Counter[str] = Counter()
        self._asked: set[Name] = set()
        super().__init__(rank, size, timeout)

    def remedy(self) -> str:
        """Say what was passed over; see ``MeetingPoint``."""
        ignored = "; ".join(f"{name} {why}" for name, why in self._directory.ignored.items())
        passed_over = f" (files passed over: {ignored})" if ignored else ""
        what = (
            "start every rank with the same FILE_PATH and world size, within reach of rank 0's host"
        )
        return f"{what}{passed_over}"

    # Rank 0 ---------------------------------------------------------------------------------------

    def listen(self, backlog: int) -> list[socket.socket]:
        """Listen on the loopback; see ``MeetingPoint``."""
        self._backlog = backlog
        self._listeners.append(socket.create_server((LOOPBACK, 0), backlog=backlog))
        return list(self._listeners)

    def look(self) -> socket.socket | None:
        """Keep our announcement whole, greet every rival, listen on more addresses if asked."""
        names = self._directory.names()
        if self._announced is None:
            self._earlier = {name.run for name in names}
        if not self._is_announced(names):
            self._announce()
            names = self._directory.names()
        for offer in self._announced_by_others(names):
            if offer.run not in self._greeted:
                self._greeted.add(offer.run)
                self._greet_rival(offer)
        self.next_look = time.monotonic() + LONGEST_PAUSE
        is_asked = any(name.kind == "ask" and name.run == self.run for name in names)
        return self._listen_outside() if is_asked and len(self._listeners) == 1 else None

    def _is_announced(self, names: set[Name]) -> bool:
        name = self._announced
        return name in names and self._directory.read(name, again=True) == self._announcement

    def _announce(self) -> None:
        """Write what the others need to know, as another file than before.

        Content that an NFS client keeps of a file by name is never out of date then.
        """
        before = self._announced
        self._announced = Name("run", self.run, str(int(before.rest) + 1 if before else 0))
        ports = [int(listener.getsockname()[1]) for listener in self._listeners]
        addresses = [(host, port) for port in ports[1:] for host in own_addresses()]
        text = self.known.given.decode()
        self._announcement = Announcement(self._me, [(LOOPBACK, ports[0]), *addresses], text)
        self._directory.write(self._announced, self._announcement.pack())
        if before is not None:
            self._directory.remove(before)

    def _listen_outside(self) -> socket.socket:
        listener = listen_everywhere(0, self._backlog)
        self._listeners.append(listener)
        self._announce()
        return listener

    def _greet_rival(self, offer: Offer) -> None:
        """Find out whether another run's rank 0 lives; then one of us is too many."""
        patience = _PATIENCE if offer.run < self.run else _SHORT_PATIENCE
        deadline = time.monotonic() + patience
        try:
            reason = claim(offer, Greeting(0, self.size, self._me), deadline)
        except SilentError:
            self._alive.add(offer.run)
            return
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
        return Secret(text.encode(), b"", False, f"a file at {self._directory.path}")
