"""A meeting of ranks at a place, where rank 0 listens: each gives a payload and gets all."""

from __future__ import annotations

import abc
import math
from collections.abc import Iterable, Sequence
from functools import cached_property

from flashlight_py import system
from flashlight_py.distributed.rendezvous.secret import Secret
from flashlight_py.distributed.rendezvous.store import Roster, Store
from flashlight_py.distributed.rendezvous.tree import TreeNode
from flashlight_py.distributed.rendezvous.wire import Offer
from flashlight_py.errors import RendezvousError
from flashlight_py.interfaces import source_address

TREE_FROM = "FLASHLIGHT_TREE_FROM"
"""The environment variable with the number of ranks from which on they meet in a tree."""


class MeetingPoint(Store):
    """A store whose ranks connect to rank 0 there; its node of the tree asks it where and how."""

    timeout: float  # in seconds, for each exchange
    name: str  # for messages
    kind: str  # what the place is
    own: str  # what every run needs one of for itself
    known: Secret  # what rank 0 expects its clients to know
    # A process that knows the place ought to know that too: one of this user that does not was
    # started wrongly.
    is_common = False
    moves = False  # while ranks gather, another rank 0 may take the place of one that died
    patience = math.inf  # so many seconds a client waits for the answer of one offer
    next_look = math.inf  # when ``look`` has something to do, by ``time.monotonic``
    note = ""  # what rank 0 adds when it reports whom it waits for
    local_rank: int | None = None  # among the ranks of this host; None: not known

    def __init__(self, rank: int, size: int, timeout: float, loopback: Sequence[str] = ()) -> None:
        """``loopback`` are addresses of this host itself, one of which the ranks need."""
        self.rank, self.size, self.timeout = rank, size, timeout
        if size > 1 and loopback and not any(map(source_address, loopback)):
            raise self.error(
                f"this host cannot reach itself at {' or '.join(loopback)}: it has no loopback "
                "network; start it (ip link set lo up), as root of the container or sandbox"
            )
        self.node = TreeNode(self)
        self._has_ended = False

    @cached_property
    def is_tree(self) -> bool:
        """Whether ranks meet in a tree, one of each host for all of it. Equal on all of them."""
        text = system.environ.get(TREE_FROM, "64")
        if not text.isdecimal():
            raise self.error(f"{TREE_FROM} is to be a number of ranks, got {text!r}")
        return self.size >= int(text)

    def exchange(self, payload: bytes) -> Roster:
        """Pass ``payload`` and return every rank's, in rank order; see ``Store``."""
        if self._has_ended:
            raise self.error("this store was closed or has failed; make a new one")
        if self.size == 1:
            return Roster.of([payload])
        try:
            return self.node.exchange(bytes(payload))
        except RendezvousError:
            self._has_ended = True
            raise

    def close(self) -> None:
        """Leave; collective. Rank 0 blocks until all have left, and alone raises; see ``Store``.

        In a tree who has others below blocks until these have left.
        """
        if not self._has_ended:
            self._has_ended = True
            self.node.leave()

    def abort(self, reason: str) -> None:
        """Notify the connected ranks that this one aborts; waits up to 2 s until they know."""
        if not self._has_ended:
            self._has_ended = True
            self.node.abort(f"rank {self.rank} aborted: {reason}")

    # What its node asks of it --------------------------------------------------------------------

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
