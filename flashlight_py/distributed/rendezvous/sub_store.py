"""A store for some of another store's ranks, by wrapping it."""

from __future__ import annotations

from collections.abc import Sequence

from flashlight_py.distributed.rendezvous.store import Store

__all__ = ["SubStore"]


class SubStore(Store):
    """The ranks ``ranks`` of ``store`` (this one among them) as a store of their own.

    Every exchange is one of the whole store: all its ranks, in whichever sub-store, must make
    the same number of exchanges.
    """

    def __init__(self, store: Store, ranks: Sequence[int]) -> None:
        self._store = store
        self._ranks = list(ranks)
        self.rank, self.size = self._ranks.index(store.rank), len(self._ranks)
        self.people = [store.people[rank] for rank in self._ranks] if store.people else ()
        self.numbers, self.total = self._ranks, store.size
        if len(store.spaces) == store.size:
            self.spaces = [store.spaces[rank] for rank in self._ranks]

    def exchange(self, payload: bytes) -> list[bytes]:
        """Give ``payload`` and return that of every rank of the sub-store; collective, blocking.

        Raises:
            RendezvousError: as the store that is wrapped.
        """
        everyone = self._store.exchange(payload)
        return [everyone[rank] for rank in self._ranks]

    def close(self) -> None:
        """Do nothing: the store that is wrapped is closed by whoever made it."""
