"""Where ranks find rank 0: what a host's port and a file that all see have in common."""

from __future__ import annotations

import abc
import math
import socket
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from flashlight_py.distributed.rendezvous.secret import Secret
from flashlight_py.errors import RendezvousError

__all__ = ["Offer", "Place"]


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


class Place(abc.ABC):
    """One rendezvous, as one rank sees it.

    ``name`` is for messages, ``kind`` what it is, ``own`` what every run needs one of for itself.
    ``secret`` is what rank 0 expects its clients to know. ``is_common``: other runs of this user
    may have another secret and arrive here by mistake. ``moves``: while the ranks gather, another
    rank 0 may take the place of one that died. A client waits ``patience`` seconds for the answer
    of one offer. ``next_look``: when ``look`` has something to do, by ``time.monotonic``.
    """

    name: str
    kind: str
    own: str
    secret: Secret
    is_common = False
    moves = False
    patience = math.inf
    next_look = math.inf

    @abc.abstractmethod
    def remedy(self) -> str:
        """Return what to do about ranks that have not arrived."""

    # Rank 0 ---------------------------------------------------------------------------------------

    @abc.abstractmethod
    def listen(self, backlog: int) -> socket.socket:
        """Return a socket that listens for the other ranks.

        Raises:
            OSError: it cannot listen there; says why.
        """

    def look(self) -> socket.socket | None:
        """Do what is to be done while ranks gather; may return one more listening socket.

        Raises:
            RendezvousError: this is not the only rank 0, or the place cannot be used any more.
        """
        return None

    # Every rank -----------------------------------------------------------------------------------

    @abc.abstractmethod
    def offers(self) -> Iterable[Offer]:
        """Return where rank 0 may be, the likeliest first."""

    def failed(self, offer: Offer) -> None:  # noqa: B027  (optional: a port has one offer)
        """Note that nobody answered ``offer`` as rank 0 of its run."""

    def close(self) -> None:  # noqa: B027  (optional: a port leaves nothing behind)
        """Remove what this rank has left at the place."""

    def error(self, rank: int, size: int, reason: str) -> RendezvousError:
        """Return the error of a rank."""
        return RendezvousError(f"rendezvous at {self.name}, rank {rank} of {size}: {reason}")
