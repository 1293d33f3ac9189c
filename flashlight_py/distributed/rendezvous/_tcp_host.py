"""Rank 0 of a TCP rendezvous: listens, gathers a payload of every rank and sends all to all."""

from __future__ import annotations

import errno
import logging
import selectors
import socket
import time
from contextlib import suppress

from flashlight_py.distributed.rendezvous._peers import (
    Peer,
    have_not_come,
    name_ranks,
    this_process,
)
from flashlight_py.distributed.rendezvous._tcp_greeting import Greeting
from flashlight_py.distributed.rendezvous._tcp_listener import CannotListenError, listen
from flashlight_py.distributed.rendezvous._tcp_strangers import SecretsDifferError, Strangers
from flashlight_py.distributed.rendezvous._tcp_wire import (
    Connection,
    Kind,
    Message,
    WireError,
    join_payloads,
)
from flashlight_py.distributed.rendezvous.secret import REMEDY, Secret
from flashlight_py.distributed.rendezvous.waiting import Waiting
from flashlight_py.errors import RendezvousError

__all__ = ["TcpHost"]

# How long a reason for failing is kept readable for the others, in seconds, at most.
_FAREWELL = 2.0
# Connections that have not greeted yet, beyond one per rank; more are a flood.
_SPARE_STRANGERS = 64

_log = logging.getLogger("flashlight_py")


class TcpHost:
    """The rank that listens. It serves while it is in ``exchange`` or ``leave``.

    In between, the kernel accepts connections and keeps what they send; so no thread is needed.

    Raises:
        RendezvousError: the address is not one of this host's, or the port is in use.
    """

    def __init__(
        self, host: str, port: int, rank: int, size: int, timeout: float, secret: Secret
    ) -> None:
        self._place, self.rank, self.size, self._timeout = f"{host}:{port}", rank, size, timeout
        self._me = this_process()
        try:
            self._listener = listen(host, port, size + _SPARE_STRANGERS)
        except CannotListenError as error:
            raise self.error(str(error)) from error
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._strangers = Strangers(secret, self._place)
        self._members: dict[int, Connection] = {}
        self._people: dict[int, Peer] = {rank: self._me}
        self._round = 0
        self._departed: set[int] = set()
        # Once this run has failed: why, which ranks know it, and who of them is no member.
        self._verdict = ""
        self._told: set[int] = set()
        self._late: list[Connection] = []

    @property
    def _is_complete(self) -> bool:
        return self._round > 0

    def exchange(self, payload: bytes) -> list[bytes]:
        """Gather a payload of every rank, in rank order."""
        deadline = time.monotonic() + self._timeout
        waiting = Waiting(self.rank, f"rendezvous at {self._place}")
        while absent := self._absent():
            is_over = not self._serve(waiting.until(deadline)) and time.monotonic() >= deadline
            if is_over and (absent := self._absent()):
                raise self.failure(self._not_come(absent))
            waiting.look(absent)
        self._round += 1
        if self._round == 1:
            self._warn_if_open()
        payloads = [payload, *(self._take_payload(rank) for rank in range(1, self.size))]
        body = join_payloads(payloads)
        # Whoever cannot be reached any more is noticed when the next thing is awaited from it.
        for rank in range(1, self.size):
            self._members[rank].send(Kind.ROSTER, body, deadline)
        return payloads

    def _absent(self) -> set[int]:
        """Return the ranks of which the next payload has not come."""
        given = {rank for rank, member in self._members.items() if member.inbox}
        absent = set(range(1, self.size)) - given
        for rank in sorted(absent & self._members.keys()):
            if self._is_complete and self._members[rank].has_ended:
                raise self.failure(f"rank {rank} of {self.size} ({self._people[rank]}) has gone")
        return absent

    def _take_payload(self, rank: int) -> bytes:
        return self._members[rank].inbox.popleft().body

    def _not_come(self, absent: set[int]) -> str:
        return (
            f"{have_not_come(absent, self.size, self._timeout)}; see whether they were started "
            "with the same MASTER_ADDR and MASTER_PORT and can reach that address"
            f"{self._strangers.turned_away()}"
        )

    def _warn_if_open(self) -> None:
        """Say, once, that nothing keeps strangers out."""
        unproven = [rank for rank, member in self._members.items() if member.is_unproven()]
        if unproven:
            _log.warning(
                "%s joined from another host, and this job has no secret: whoever can reach %s "
                "could have joined, and had this program run what it sends; %s",
                name_ranks(unproven),
                self._place,
                REMEDY,
            )

    # Serving ----------------------------------------------------------------------------------

    def _serve(self, deadline: float) -> bool:
        """Deal with what has come; wait for something if need be. False: time is up."""
        seconds = deadline - time.monotonic()
        # Strangers who never cease must not put off the end.
        return self._serve_ready(max(0.0, seconds)) and seconds > 0

    def _serve_ready(self, seconds: float) -> bool:
        """Deal with what comes within ``seconds``; False: nothing has."""
        ready = self._selector.select(seconds)
        for key, _ in ready:
            if key.fileobj is self._listener:
                self._accept()
            elif not key.data.is_closed():  # by what came from another one
                self._receive(key.data)
        return bool(ready)

    def _accept(self) -> None:
        self._listener.setblocking(False)
        try:
            wire, address = self._listener.accept()
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and self._strangers.here:
                self._drop(self._strangers.here[0])
            return  # whoever it was has gone again, or is still there at the next look
        connection = Connection(wire, address)
        self._selector.register(wire, selectors.EVENT_READ, connection)
        self._strangers.here.append(connection)
        if len(self._strangers.here) > self.size + _SPARE_STRANGERS:
            self._drop(self._strangers.here[0])

    def _receive(self, connection: Connection) -> None:
        try:
            connection.receive(0.0)
            if connection in self._strangers.here:
                self._greet(connection)
        except WireError as error:
            host = connection.address[0]
            _log.info("rendezvous at %s: dropped a connection of %s: %s", self._place, host, error)
            self._drop(connection)
            return
        rank = self._rank_of(connection)
        if rank is not None and not self._verdict:
            self._heed(rank, connection)
        if connection.has_ended:
            self._end(connection)

    def _greet(self, connection: Connection) -> None:
        """Make a stranger a member once it has proven to be one."""
        try:
            greeting = self._strangers.hear(connection)
        except SecretsDifferError as error:
            if not self._is_complete and not self._verdict:
                raise self._disagreement(str(error), error.rank, connection) from error
            return
        if greeting is not None:
            self._admit(connection, greeting)

    def _admit(self, connection: Connection, greeting: Greeting) -> None:
        rank, size, peer = greeting
        if self._verdict:
            connection.send(Kind.FAILURE, self._verdict.encode(), time.monotonic() + _FAREWELL)
            self._told.add(rank)
            self._late.append(connection)
            return
        self._check_size(connection, rank, size, peer)
        if rank in self._members or rank == 0:
            self._answer_second(connection, rank, peer)
            return
        self._members[rank], self._people[rank] = connection, peer
        connection.welcome(time.monotonic() + _FAREWELL)

    def _check_size(self, connection: Connection, rank: int, size: int, peer: Peer) -> None:
        if size != self.size:
            reason = (
                f"rank {rank} ({peer}) was started with world size {size}, rank 0 ({self._me}) "
                f"with {self.size}; give every rank the same world size"
            )
            raise self._disagreement(reason, rank, connection)

    def _answer_second(self, connection: Connection, rank: int, peer: Peer) -> None:
        """Two processes claim one rank: before the run stands nobody knows which is right."""
        claim = f"two processes claim rank {rank}: {self._people[rank]} and {peer}"
        if not self._is_complete:
            reason = f"{claim}; give every process a rank of its own"
            raise self._disagreement(reason, rank, connection)
        reason = f"{claim}; the run with the first one is under way"
        self._strangers.here.append(connection)
        self._strangers.refuse(connection, Kind.FAILURE, reason.encode())

    def _heed(self, rank: int, connection: Connection) -> None:
        """Act on a member's messages other than payloads, which stay in its inbox.

        A member's complaint that is older than the roster it crossed on its way is void.
        """
        payloads: list[Message] = []
        while connection.inbox:
            message = connection.inbox.popleft()
            if message.kind is Kind.PAYLOAD:
                payloads.append(message)
            elif message.kind is Kind.GOODBYE:
                self._departed.add(rank)
            elif message.kind is Kind.FAILURE:
                raise self.failure(message.body.decode(errors="replace"))
            elif message.kind is Kind.LATE and message.body == str(self._round).encode():
                connection.inbox.extend(payloads)
                raise self.failure(self._not_come(self._absent() or {0}))
        connection.inbox.extend(payloads)

    def _rank_of(self, connection: Connection) -> int | None:
        ranks = (rank for rank, member in self._members.items() if member is connection)
        return next(ranks, None)

    def _end(self, connection: Connection) -> None:
        """Forget who has hung up; a member that did so before the run stands may come again."""
        rank = self._rank_of(connection)
        if rank is None or not self._is_complete:
            self._drop(connection)
        else:
            self._selector.unregister(connection.wire)

    def _drop(self, connection: Connection) -> None:
        rank = self._rank_of(connection)
        if rank is not None:
            del self._members[rank]
        elif connection in self._strangers.here:
            self._strangers.here.remove(connection)
        if connection.wire in self._selector.get_map():
            self._selector.unregister(connection.wire)
        connection.close()

    # The end ----------------------------------------------------------------------------------

    def leave(self) -> None:
        """Wait until every member has left, then stop listening."""
        deadline = time.monotonic() + self._timeout
        while lingering := self._lingering():
            is_hopeless = all(self._members[rank].has_ended for rank in lingering)
            if is_hopeless or not self._serve(deadline):
                self._close()
                raise self.error(f"{name_ranks(lingering)} came and did not leave: died or stuck")
        self._close()

    def _lingering(self) -> set[int]:
        return self._members.keys() - self._departed

    def give_up(self, reason: str) -> None:
        """Tell the reason to all that are connected, and stop listening."""
        with suppress(RendezvousError):
            # Take in who has come since: a second failure is no news.
            until = time.monotonic() + _FAREWELL
            while time.monotonic() < until and self._serve_ready(0.0):
                pass
        self._tell_failure(reason, set())

    def _disagreement(self, reason: str, rank: int, culprit: Connection) -> RendezvousError:
        """Tell everybody that a greeting contradicts, and return the error to raise.

        Ranks are started together: one that comes a moment later ought not to wait in vain.
        """
        self._told.add(rank)
        self._late.append(culprit)
        culprit.send(Kind.FAILURE, reason.encode(), time.monotonic() + _FAREWELL)
        self._tell_failure(reason, set(range(1, self.size)))
        return self.error(reason)

    def failure(self, reason: str) -> RendezvousError:
        """Tell the members, and return the error to raise."""
        self._tell_failure(reason, set())
        return self.error(reason)

    def _tell_failure(self, reason: str, expected: set[int]) -> None:
        """Tell the members, and those of the ``expected`` who come within two seconds."""
        self._verdict = reason
        deadline = time.monotonic() + _FAREWELL
        for member in self._members.values():
            member.send(Kind.FAILURE, reason.encode(), deadline)
        self._told |= self._members.keys()
        while expected - self._told and self._serve(deadline):
            pass
        for connection in (*self._members.values(), *self._late):
            _part(connection, deadline)
        self._close()

    def _close(self) -> None:
        self._selector.close()
        self._listener.close()
        for connection in (*self._members.values(), *self._strangers.here):
            connection.close()

    def error(self, reason: str) -> RendezvousError:
        where = f"rendezvous at {self._place}, rank {self.rank} of {self.size}"
        return RendezvousError(f"{where}: {reason}")


def _part(connection: Connection, deadline: float) -> None:
    """Close so that the last message arrives.

    Closing with unread input makes the kernel send a reset, upon which the peer would lose what
    it has not read yet. So we close our direction only, and read until the peer closes its own.
    """
    with suppress(OSError, WireError):
        connection.wire.shutdown(socket.SHUT_WR)
        while not connection.has_ended and time.monotonic() < deadline:
            connection.receive(deadline - time.monotonic())
    connection.close()
