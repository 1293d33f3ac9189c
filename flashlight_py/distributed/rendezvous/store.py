"""The contract of a store: how processes that are not connected yet exchange small things."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from typing import Any


class Store(abc.ABC):
    """A meeting place of ``size`` processes, of which this one is ``rank``.

    A backend needs one thing of it: to pass some bytes and get everybody's. Addresses, host
    identities and NCCL's unique id all travel so; after that the backend's own wires are used.
    ``processes`` says which process each rank is, for messages; empty where that is not known yet.
    ``numbers`` are the ranks' among ``total``, where these are part of a larger whole. ``spaces``
    are equal for those that see each other's processes; an empty text: not known.
    ``ends`` are, of each rank that is connected with this one for the rendezvous, the address and
    port of our end and of the other; empty where that is not known.
    ``secret`` is what all ranks knew beforehand and no exchange shows; empty where there is none.
    ``host_timeout``: a host that is silent for so many seconds is lost; 0: that is not looked at.
    """

    rank: int
    size: int
    processes: Sequence[str] = ()
    numbers: Sequence[int] = ()
    total: int = 0
    spaces: Sequence[str] = ("",)
    secret: bytes = b""
    host_timeout: float = 0.0

    @property
    def ends(self) -> Mapping[int, tuple[Any, Any]]:
        """See above."""
        return {}

    @abc.abstractmethod
    def exchange(self, payload: bytes) -> list[bytes]:
        """Pass ``payload`` and return every rank's, in rank order. Collective, blocking.

        Raises:
            RendezvousError: a rank did not arrive in time (named), or ranks disagree on who they
                are. Raised on every rank that can still be notified.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Leave; collective. When it has returned on every rank, nothing of it is left behind."""

    def abort(self, reason: str) -> None:  # noqa: B027  (optional: a store without waiters needs none)
        """Notify ranks that still wait in this store that this one aborts, and clean up."""


class SubStore(Store):
    """The ranks ``ranks`` of ``store`` (this one among them) as a store of their own.

    Every exchange is one of the whole store: all its ranks, in whichever sub-store, must make
    the same number of exchanges.
    """

    def __init__(self, store: Store, ranks: Sequence[int]) -> None:
        self._store = store
        self._ranks = list(ranks)
        self.rank, self.size = self._ranks.index(store.rank), len(self._ranks)
        self.processes = [store.processes[rank] for rank in self._ranks] if store.processes else ()
        self.numbers, self.total = self._ranks, store.size
        if len(store.spaces) == store.size:
            self.spaces = [store.spaces[rank] for rank in self._ranks]

    def exchange(self, payload: bytes) -> list[bytes]:
        """Pass ``payload`` and return that of every rank of the sub-store; collective, blocking.

        Raises:
            RendezvousError: as the store that is wrapped.
        """
        everyone = self._store.exchange(payload)
        return [everyone[rank] for rank in self._ranks]

    def close(self) -> None:
        """Do nothing: the store that is wrapped is closed by whoever made it."""
