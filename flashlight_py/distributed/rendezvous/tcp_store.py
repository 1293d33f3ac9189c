"""Ranks meet at a TCP port of rank 0, as MASTER_ADDR and MASTER_PORT say.

Rank 0 listens on that address alone, and the others connect, again and again until it is there.
Both sides prove that they know the job's secret, which never travels; then a greeting says rank
and world size. Whatever else arrives is dropped without an answer, and nothing is unpickled.
Between hosts, a job that was given no secret has none: then whoever can reach the port can take
part.
"""

from __future__ import annotations

import socket

from flashlight_py.distributed.rendezvous.client import Client
from flashlight_py.distributed.rendezvous.peers import check_member
from flashlight_py.distributed.rendezvous.place import Offer, Place
from flashlight_py.distributed.rendezvous.secret import Secret
from flashlight_py.distributed.rendezvous.server import Server
from flashlight_py.distributed.rendezvous.sockets import listen
from flashlight_py.errors import RendezvousError


class PlaceStore(Place):
    """A store of ranks that connect to rank 0 at a place."""

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
        the caller's to close.

        Raises:
            RendezvousError: a rank has not left within the timeout or has died (named).
        """
        self._has_ended = True
        return self._role.hand_over()

    def abort(self, reason: str) -> None:
        """Notify the connected ranks that this one aborts; waits up to 2 s until they know."""
        if not self._has_ended:
            self._has_ended = True
            self._role.abort(f"rank {self.rank} aborted: {reason}")


class TcpStore(PlaceStore):
    """A store at ``host``:``port``, an address of rank 0; ``timeout`` seconds per exchange.

    ``one_host``: all ranks are known to be on one host, so that they know the user's secret where
    the job was given none.

    Raises:
        ValueError: ``rank``, ``size``, ``timeout`` or ``port`` make no sense.
        RendezvousError: on rank 0, when it cannot listen there: the port is in use, or the
            address is not one of its host's. On every rank, when there is no secret and no
            place for one.
    """

    kind, own, is_common = "address", "MASTER_PORT", True

    def __init__(
        self,
        host: str,
        port: int,
        rank: int,
        size: int,
        timeout: float,
        one_host: bool = False,
    ) -> None:
        check_member(rank, size, timeout)
        if not 0 < port < 65536:
            raise ValueError(f"the port must be in [1, 65535], got {port}")
        self.name, self._address = f"{host}:{port}", (host, port)
        self.known = Secret.find(one_host)
        self.secret = self.known.common
        super().__init__(rank, size, timeout)

    def remedy(self) -> str:
        """See ``Place``."""
        return (
            "see whether every rank was started, with the same MASTER_ADDR and MASTER_PORT, and "
            "can reach that address"
        )

    def listen(self, backlog: int) -> socket.socket:
        """Listen at the address; see ``Place``."""
        return listen(*self._address, backlog)

    def offers(self) -> list[Offer]:
        """Return the address; see ``Place``."""
        return [Offer([self._address], self.known, advice="; choose another MASTER_PORT")]
