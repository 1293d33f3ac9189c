"""Ranks meet at a TCP port of rank 0, as MASTER_ADDR and MASTER_PORT say.

Rank 0 listens on that address alone, and the others connect, again and again until it is there.
Both sides prove that they know the job's secret, which never travels; then a greeting says rank
and world size. Whatever else arrives is dropped without an answer, and nothing is unpickled.
Between hosts, a job that was given no secret has none: then whoever can reach the port can take
part.
"""

from __future__ import annotations

import socket

from flashlight_py.distributed.rendezvous.peers import check_member
from flashlight_py.distributed.rendezvous.place import Offer, Place
from flashlight_py.distributed.rendezvous.secret import Secret
from flashlight_py.distributed.rendezvous.sockets import listen


class TcpStore(Place):
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
