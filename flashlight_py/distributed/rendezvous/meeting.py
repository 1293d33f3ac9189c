"""The place where ranks meet, as the node of a rank in the tree asks about it."""

from __future__ import annotations

import abc
import math
from collections.abc import Iterable
from functools import cached_property

from flashlight_py import system
from flashlight_py.distributed.rendezvous.secret import Secret
from flashlight_py.distributed.rendezvous.store import Store
from flashlight_py.distributed.rendezvous.wire import Offer
from flashlight_py.errors import RendezvousError

TREE_FROM = "FLASHLIGHT_TREE_FROM"
"""The environment variable with the number of ranks from which on they meet in a tree."""


class MeetingPoint(Store):
    """A store whose ranks connect to rank 0. Subclasses say where rank 0 listens, and how."""

    timeout: float  # in seconds, for each exchange
    name: str  # for messages
    kind: str  # what the place is
    own: str  # what every run needs one of for itself
    known: Secret  # what rank 0 expects its clients to know
    is_common = False  # a process of this user that knows the place must know the secret, too
    moves = False  # while ranks gather, another rank 0 may replace one that died
    patience = math.inf  # seconds that a client waits for the answer to one offer
    next_look = math.inf  # the time of the next call of ``look``, by ``time.monotonic``
    note = ""  # added by rank 0 when it reports missing ranks
    local_rank: int | None = None  # among the ranks of this host; None: not known

    @cached_property
    def is_tree(self) -> bool:
        """Whether ranks meet in a tree, one of each host for all of it. Equal on all of them."""
        text = system.environ.get(TREE_FROM, "64")
        if not text.isdecimal():
            raise self.error(f"{TREE_FROM} is to be a number of ranks, got {text!r}")
        return self.size >= int(text)

    @abc.abstractmethod
    def remedy(self) -> str:
        """Return what to do about ranks that have not arrived."""

    @abc.abstractmethod
    def listen(self, backlog: int) -> list[system.Socket]:
        """Return the sockets on which rank 0 listens for the others.

        Raises:
            OSError: it cannot listen there; says why.
        """

    def look(self) -> system.Socket | None:
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
