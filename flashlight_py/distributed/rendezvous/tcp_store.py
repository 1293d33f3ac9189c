"""Ranks meet at a TCP port of rank 0, as MASTER_ADDR and MASTER_PORT say.

Rank 0 listens on that address alone, and the others connect, again and again until it is there.
Both sides prove that they know the job's secret, which never travels; then a greeting tells rank
and world size. Whatever else comes is dropped without an answer, and nothing is unpickled. Between
hosts, a job that was given no secret has none: then whoever can reach the port can take part.
"""

from __future__ import annotations

from flashlight_py.distributed.rendezvous._peers import check_member
from flashlight_py.distributed.rendezvous._tcp_guest import TcpGuest
from flashlight_py.distributed.rendezvous._tcp_host import TcpHost
from flashlight_py.distributed.rendezvous.secret import Secret
from flashlight_py.distributed.rendezvous.store import Store
from flashlight_py.errors import RendezvousError

__all__ = ["TcpStore"]


class TcpStore(Store):
    """A store at ``host``:``port``, an address of rank 0; ``timeout`` seconds per exchange.

    ``one_host``: all ranks are known to be on one host, so that they know the user's secret where
    the job was given none.

    Raises:
        ValueError: ``rank``, ``size``, ``timeout`` or ``port`` make no sense.
        RendezvousError: on rank 0, when it cannot listen there: the port is in use, or the
            address is not one of its host's. On every rank, when there is no secret and no
            place for one.
    """

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
        self.rank, self.size = rank, size
        secret = Secret.find(one_host)
        self.secret = secret.common
        role = TcpHost if rank == 0 and size > 1 else TcpGuest
        self._member: TcpHost | TcpGuest = role(host, port, rank, size, timeout, secret)
        self._has_ended = False

    def exchange(self, payload: bytes) -> list[bytes]:
        """Give ``payload`` and return every rank's, in rank order. Collective, blocking.

        Raises:
            RendezvousError: a rank did not come within the timeout or has gone (named), two
                processes claim one rank, a rank has another world size, another rank failed, or
                this store has ended. The store cannot be used again.
        """
        if self._has_ended:
            raise self._member.error("this store was closed or has failed; make a new one")
        if self.size == 1:
            return [bytes(payload)]
        try:
            return self._member.exchange(bytes(payload))
        except RendezvousError:
            self._has_ended = True
            raise

    def close(self) -> None:
        """Leave; collective. Rank 0 blocks until all have left, then stops listening.

        Raises:
            RendezvousError: on rank 0, when a rank has not left within the timeout or has died
                (named); it has stopped listening all the same.
        """
        if not self._has_ended:
            self._has_ended = True
            self._member.leave()

    def abort(self, reason: str) -> None:
        """Tell the connected ranks that this one gives up. Blocks up to 2 s for them to read it."""
        if not self._has_ended:
            self._has_ended = True
            self._member.give_up(f"rank {self.rank} gave up: {reason}")
