"""Ranks meet at a TCP port of rank 0, as MASTER_ADDR and MASTER_PORT say.

Where MASTER_ADDR is an address rank 0 listens there alone, where it is a name at all addresses of
its host, and the others connect, again and again until it is there, to whichever they can reach.
Both sides prove that they know the job's secret, which never travels; then a greeting says rank
and world size. Whatever else arrives is dropped without an answer, and nothing is unpickled.
Between hosts, a job that was given no secret has none: then whoever can reach the port can take
part.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from contextlib import suppress

from flashlight_py.distributed.rendezvous.connecting import (
    NobodyError,
    Offer,
    claim,
    is_local,
    listen,
    resolved,
)
from flashlight_py.distributed.rendezvous.meeting import MeetingPoint
from flashlight_py.distributed.rendezvous.secret import Secret
from flashlight_py.distributed.rendezvous.store import check_member, this_process
from flashlight_py.distributed.rendezvous.wire import Greeting
from flashlight_py.interfaces import is_own

# So long another rank 0 at our address may take to answer.
_RIVAL_SECONDS = 2.0


class TcpStore(MeetingPoint):
    """A store at ``host``:``port``, an address of rank 0; ``timeout`` seconds per exchange.

    ``one_host``: all ranks are known to be on one host, so that they know the user's secret where
    the job was given none. ``also`` are further addresses of rank 0.
    ``unnumbered``: ``rank`` may be ``ANY_RANK``, to take any but 0; rank 0 then numbers those.
    ``is_strict``: a rank 0 that cannot listen has the one that does, which waits there, fail too.

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
        also: Sequence[str] = (),
        unnumbered: bool = False,
        is_strict: bool = False,
    ) -> None:
        check_member(max(rank, 0) if unnumbered else rank, size, timeout)
        if not 0 < port < 65536:
            raise ValueError(f"the port must be in [1, 65535], got {port}")
        self.name, self._host, self._port = f"{host}:{port}", host, port
        self._addresses = [(each, port) for each in dict.fromkeys([host, *also])]
        self.one_host, self.unnumbered = one_host, unnumbered
        self._is_strict = is_strict
        self.known = Secret.find(one_host)
        self.secret = self.known.common
        super().__init__(rank, size, timeout)

    def remedy(self) -> str:
        """See ``MeetingPoint``."""
        return (
            "see whether every rank was started, with the same MASTER_ADDR and MASTER_PORT, and "
            f"can reach that address{self._own_address()}"
        )

    def _own_address(self) -> str:
        """Return what is wrong if MASTER_ADDR means this host, and rank 0 may be on another one."""
        if self.note:
            return f". Rank 0 listens at {self._host}{self.note}"
        if self.rank == 0 or self.one_host:
            return ""
        try:
            found = [each for address in self._addresses for each in resolved(*address)]
        except OSError:
            return ""
        if not all(is_own(each[0], each[2:]) for each in found):
            return ""
        return (
            f". Here {self._host} is this host, {socket.gethostname()}, itself: if rank 0 runs on "
            "another one, set MASTER_ADDR to a name or an address of that one, on every rank"
        )

    def listen(self, backlog: int) -> list[socket.socket]:
        """Listen at the address, or for a name at all that this host has; see ``MeetingPoint``."""
        try:
            listeners = listen(self._host, self._port, backlog, self.one_host)
        except OSError as error:
            rival = self._rival() if self._is_strict else ""
            raise OSError(f"{error}{rival}") from error
        if not self.one_host and all(is_local(each.getsockname()[0]) for each in listeners):
            self.note = f", the loopback of {socket.gethostname()}, which no other host reaches"
        return listeners

    def _rival(self) -> str:
        """Greet a rank 0 that listens there already, so that it does not wait for us in vain."""
        (offer,) = self.offers()
        with suppress(NobodyError):
            deadline = time.monotonic() + _RIVAL_SECONDS
            reason = claim(offer, Greeting(0, self.size, this_process()), deadline)
            return f"; another rank 0 is there{reason and ': '}{reason}"
        return ""

    def offers(self) -> list[Offer]:
        """Return the address; see ``MeetingPoint``."""
        return [Offer(self._addresses, self.known, advice="; choose another MASTER_PORT")]
