"""The contract of a store: how processes that cannot talk yet tell each other small things."""

from __future__ import annotations

import abc
from collections.abc import Sequence

__all__ = ["Store"]


class Store(abc.ABC):
    """A meeting place of ``size`` processes, of which this one is ``rank``.

    A backend needs one thing of it: to give some bytes and get everybody's. Addresses, host
    identities and NCCL's unique id all travel so; after that the backend's own wires are used.
    ``people`` says which process each rank is, for messages; empty where they do not know yet.
    ``numbers`` are the ranks' among ``total``, where these are part of a larger whole. ``spaces``
    tell which of them see each other's processes; an empty text: not known.
    ``secret`` is what all ranks knew beforehand and no exchange shows; empty where there is none.
    """

    rank: int
    size: int
    people: Sequence[str] = ()
    numbers: Sequence[int] = ()
    total: int = 0
    spaces: Sequence[str] = ("",)
    secret: bytes = b""

    @abc.abstractmethod
    def exchange(self, payload: bytes) -> list[bytes]:
        """Give ``payload`` and return every rank's, in rank order. Collective, blocking.

        Raises:
            RendezvousError: a rank did not come in time (named), or ranks disagree on who they
                are. Raised on every rank that can still be told.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Leave; collective. When it has returned on every rank, nothing of it is left behind."""

    def abort(self, reason: str) -> None:  # noqa: B027  (optional: a store without waiters needs none)
        """Tell ranks that still wait in this store that this one gives up, and clean up."""
