"""The place of a meeting: the common part of a host's port and of a file that all see."""

from __future__ import annotations

import abc
import math
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from flashlight_py.distributed.rendezvous.client import Client
from flashlight_py.distributed.rendezvous.secret import Secret
from flashlight_py.distributed.rendezvous.server import Server
from flashlight_py.distributed.rendezvous.store import ANY_RANK, Store
from flashlight_py.errors import RendezvousError


class Offer(NamedTuple):
    """Addresses where a rank 0 may listen, and the secret by which it is recognised.

    ``run`` names its run, ``who`` says who made the offer, and ``advice`` what to do where another
    program listens.
    """

    addresses: Sequence[tuple[str, int]]
    secret: Secret
    run: str = ""
    who: str = ""
    advice: str = ""


class MeetingPoint(Store):
    """A store whose ranks connect to rank 0 there; server and clients ask it where and how.

    ``timeout`` is in seconds for each exchange. ``name`` is for messages, ``kind`` what the place
    is, ``own`` what every run needs one of for itself. ``known`` is what rank 0 expects its clients
    to know. ``is_common``: whoever knows the place ought to know that too, so a process of this
    user that does not was started wrongly. ``moves``: while ranks gather, another rank 0 may take
    the place of one that died. A client waits ``patience`` seconds for the answer of one offer.
    ``next_look``: when ``look`` has something to do, by ``time.monotonic``. ``note`` is what rank 0
    adds when it reports whom it waits for. ``unnumbered``: it numbers who asks for ``ANY_RANK``,
    one process of each host unless they all have ``one_host``. ``first_report``: after so many
    seconds rather than the usual ones it is said who is missing, also where nobody is at the place.
    """

    timeout: float
    name: str
    kind: str
    own: str
    known: Secret
    is_common = False
    moves = False
    patience = math.inf
    next_look = math.inf
    note = ""
    unnumbered = False
    one_host = False
    first_report: float | None = None

    def __init__(self, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        is_server = rank == 0 and size > 1
        self._role: Server | Client = Server(self) if is_server else Client(self)
        self._has_ended = False

    def exchange(self, payload: bytes) -> list[bytes]:
        """Pass ``payload`` and return every rank's, in rank order. Collective, blocking.

        Raises:
            RendezvousError: a rank did not arrive within the timeout or has died (named), two
                processes claim one rank, a rank has another world size, another rank failed, or
                this store has ended. The store cannot be used again.
        """
        if self._has_ended:
            raise self.error("this store was closed or has failed; make a new one")
        if self.size == 1:
            return [bytes(payload)]
        try:
            return self._role.exchange(bytes(payload))
        except RendezvousError:
            self._has_ended = True
            raise

    def close(self) -> None:
        """Leave; collective. Rank 0 blocks until all have left; then nothing is left behind.

        Raises:
            RendezvousError: on rank 0, when a rank has not left within the timeout or has died
                (named); nothing is left behind all the same.
        """
        if not self._has_ended:
            self._has_ended = True
            self._role.leave()

    def hand_over(self) -> dict[int, socket.socket]:
        """Leave as ``close`` does, and return the connections that are proven; collective.

        Those of rank 0 to every other rank, by rank, and of these to rank 0. They block, and are
        the caller's to close. Rank 0 goes on listening where it says so: see ``late``.

        Raises:
            RendezvousError: a rank has not left within the timeout or has died (named).
        """
        self._has_ended = True
        return self._role.hand_over()

    @contextmanager
    def late(self) -> Iterator[tuple[int, Callable[[], object]]]:
        """After ``hand_over`` on rank 0: yield what can be read when somebody comes too late.

        And what to call then: it says that a run is under way, and does not block. At the end
        nobody listens any more.
        """
        assert isinstance(self._role, Server)
        try:
            yield self._role.late()
        finally:
            self._role.close()

    def abort(self, reason: str) -> None:
        """Notify the connected ranks that this one aborts; waits up to 2 s until they know."""
        if not self._has_ended:
            self._has_ended = True
            self._role.abort(f"{self._who} aborted: {reason}")

    @property
    def _who(self) -> str:
        return "one" if self.rank == ANY_RANK else f"rank {self.rank}"

    # What server and clients ask of it -----------------------------------------------------------

    @property
    def ends(self) -> Mapping[int, tuple[Any, Any]]:
        """See ``Store``."""
        return {
            rank: (tuple(each.here[:2]), tuple(each.address[:2]))
            for rank, each in self._role.connections().items()
        }

    @abc.abstractmethod
    def remedy(self) -> str:
        """Return what to do about ranks that have not arrived."""

    @abc.abstractmethod
    def listen(self, backlog: int) -> list[socket.socket]:
        """Return the sockets on which rank 0 listens for the others.

        Raises:
            OSError: it cannot listen there; says why.
        """

    def look(self) -> socket.socket | None:
        """Do what rank 0 has to while ranks gather; may return one more listening socket.

        Raises:
            RendezvousError: this is not the only rank 0, or the place cannot be used any more.
        """
        return None

    @abc.abstractmethod
    def offers(self) -> Iterable[Offer]:
        """Return where rank 0 may be, the likeliest first."""

    def takes(self, rank: int) -> bool:
        """Return whether a client may ask for ``rank``."""
        return rank != ANY_RANK or self.unnumbered

    def failed(self, offer: Offer) -> None:
        """Note that nobody answered ``offer`` as rank 0 of its run."""

    def clear(self) -> None:
        """Remove what this rank has left at the place."""

    def error(self, reason: str) -> RendezvousError:
        """Return the error of this rank."""
        where = f"rendezvous at {self.name}, {self._who} of {self.size}"
        return RendezvousError(f"{where}: {reason}")
