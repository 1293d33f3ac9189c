"""Where ranks find rank 0: what a host's port and a file that all see have in common."""

from __future__ import annotations

import abc
import math
import socket
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from flashlight_py.distributed.rendezvous.secret import Secret
from flashlight_py.distributed.rendezvous.store import Store
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


class Place(Store):
    """A store whose ranks connect to rank 0, as server and clients see it.

    ``timeout`` is in seconds for each exchange. ``name`` is for messages, ``kind`` what the place
    is, ``own`` what every run needs one of for itself. ``known`` is what rank 0 expects its clients
    to know. ``is_common``: whoever knows the place ought to know that too, so a process of this
    user that does not was started wrongly. ``moves``: while ranks gather, another rank 0 may take
    the place of one that died. A client waits ``patience`` seconds for the answer of one offer.
    ``next_look``: when ``look`` has something to do, by ``time.monotonic``.
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

    @abc.abstractmethod
    def remedy(self) -> str:
        """Return what to do about ranks that have not arrived."""

    @abc.abstractmethod
    def listen(self, backlog: int) -> socket.socket:
        """Return a socket on which rank 0 listens for the others.

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

    def failed(self, offer: Offer) -> None:
        """Note that nobody answered ``offer`` as rank 0 of its run."""

    def clear(self) -> None:
        """Remove what this rank has left at the place."""

    def error(self, reason: str) -> RendezvousError:
        """Return the error of this rank."""
        where = f"rendezvous at {self.name}, rank {self.rank} of {self.size}"
        return RendezvousError(f"{where}: {reason}")
