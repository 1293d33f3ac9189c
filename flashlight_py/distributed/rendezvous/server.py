"""Rank 0 of a rendezvous: listens, gathers a payload of every rank and sends all to all."""

from __future__ import annotations

import errno
import logging
import math
import os
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from flashlight_py.distributed.rendezvous.secret import REMEDY, TurnedAway, nonce, warn_if_open
from flashlight_py.distributed.rendezvous.sockets import user_of
from flashlight_py.distributed.rendezvous.store import (
    ANY_RANK,
    Peer,
    Waiting,
    cannot_be_reached,
    name_ranks,
    not_arrived,
    this_process,
)
from flashlight_py.distributed.rendezvous.wire import (
    Connection,
    Greeting,
    Handshake,
    Kind,
    Message,
    WireError,
    join_payloads,
)
from flashlight_py.errors import RendezvousError

if TYPE_CHECKING:
    from flashlight_py.distributed.rendezvous.place import MeetingPoint

# How long a short message may take, and a reason for failing is kept readable, in seconds.
_SHORTLY = 2.0
# Connections that have proven nothing yet, beyond one per rank; more are a flood.
_SPARE_CANDIDATES = 64
_log = logging.getLogger("flashlight_py")


class Server:
    """The rank that listens. It serves while it is in ``exchange`` or ``leave``.

    In between, the kernel accepts connections and keeps what they send; so no thread is needed.
    A connection is a candidate until it has proven to be a rank, a member from then on.

    Raises:
        RendezvousError: it cannot listen at ``place``.
    """

    def __init__(self, place: MeetingPoint) -> None:
        self._place, self._size = place, place.size
        self._selector = selectors.EpollSelector()
        self._listeners: list[socket.socket] = []
        try:
            for listener in place.listen(self._size + _SPARE_CANDIDATES):
                self._listen(listener)
        except OSError as error:
            raise self._place.error(str(error)) from error
        self._candidates: list[Connection] = []
        self._members: dict[int, Connection] = {}
        self._processes: dict[int, Peer] = {0: this_process()}
        self._turned_away = TurnedAway(place.name)
        self._round = 0
        self._departed: set[int] = set()
        # Once this run has failed: why, and which ranks know it.
        self._verdict = ""
        self._notified: set[int] = set()

    def exchange(self, payload: bytes) -> list[bytes]:
        """Gather a payload of every rank, in rank order."""
        deadline = time.monotonic() + self._place.timeout
        how = f"rendezvous at {self._place.name}{self._place.note}"
        waiting = Waiting(True, how, self._place.first_report)
        while absent := self._absent():
            self._look()
            is_over = not self._serve(min(waiting.until(deadline), self._place.next_look))
            if is_over and time.monotonic() >= deadline and (absent := self._absent()):
                raise self._failure(self._not_arrived(absent))
            waiting.look(absent)
        self._round += 1
        if self._round == 1:
            self._place.next_look = math.inf
            handshakes = ((rank, member.handshake) for rank, member in self._members.items())
            unproven = [rank for rank, handshake in handshakes if handshake and not handshake.key]
            if unproven:
                warn_if_open(self._place.name, name_ranks(unproven))
        others = (self._members[rank].inbox.popleft() for rank in range(1, self._size))
        payloads = [payload, *(message.body for message in others)]
        body = join_payloads(payloads)
        # Whoever cannot be reached any more is noticed when the next thing is awaited from it.
        for rank in range(1, self._size):
            self._members[rank].send(Kind.ROSTER, body, deadline)
        return payloads

    def connections(self) -> dict[int, Connection]:
        """Return those to the other ranks."""
        return self._members

    def _absent(self) -> set[int]:
        """Return the ranks of which the next payload has not arrived."""
        given = {rank for rank, member in self._members.items() if member.inbox}
        absent = set(range(1, self._size)) - given
        for rank in sorted(absent & self._members.keys()):
            if self._round > 0 and self._members[rank].has_ended:
                raise self._failure(
                    f"rank {rank} of {self._size} ({self._processes[rank]}) has died or exited: it "
                    "closed the connection"
                )
        return absent

    def _not_arrived(self, absent: set[int]) -> str:
        left = "".join(
            f"; rank {rank} ({self._processes[rank]}) had joined and died or left"
            for rank in sorted(absent & self._processes.keys() - self._members.keys())
        )
        sentence = not_arrived(absent, self._size, self._place.timeout)
        return f"{sentence}{left}; {self._place.remedy()}{self._turned_away}"

    def _look(self) -> None:
        """While ranks gather: keep the place in order."""
        if time.monotonic() < self._place.next_look:
            return
        try:
            more = self._place.look()
        except RendezvousError as error:
            self._publish_failure(str(error), set())
            raise
        if more is not None:
            self._listen(more)

    def _listen(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._listeners.append(listener)
        self._selector.register(listener, selectors.EVENT_READ)

    def _serve(self, deadline: float) -> bool:
        """Deal with what has arrived; wait for something if need be. False: time is up."""
        seconds = deadline - time.monotonic()
        # Strangers who never cease must not put off the end.
        return self._serve_ready(max(0.0, seconds)) and seconds > 0

    def _serve_ready(self, seconds: float) -> bool:
        """Deal with what arrives within ``seconds``; False: nothing has."""
        ready = self._selector.select(seconds)
        for key, _ in ready:
            if key.data is None:
                assert isinstance(key.fileobj, socket.socket)
                self._accept(key.fileobj)
            elif not key.data.is_closed():  # by a message of another one
                self._receive(key.data)
        return bool(ready)

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection = Connection(listener.accept()[0])
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and self._candidates:
                self._drop(self._candidates[0])
            return  # whoever it was has gone again, or is still there at the next look
        self._selector.register(connection.wire, selectors.EVENT_READ, connection)
        self._candidates.append(connection)
        if len(self._candidates) > self._size + _SPARE_CANDIDATES:
            self._drop(self._candidates[0])

    def _receive(self, connection: Connection) -> None:
        try:
            connection.receive(0.0)
            if connection.is_refused:
                connection.inbox.clear()
            elif connection.rank is None and connection.inbox:
                self._greet(connection)
        except WireError as error:
            who = f"rendezvous at {self._place.name}: dropped a connection of"
            _log.info("%s %s: %s", who, connection.address[0], error)
            self._drop(connection)
            return
        if connection.rank is not None and not self._verdict:
            self._handle(connection.rank, connection)
        if connection.is_unreachable and connection.rank is not None and not self._verdict:
            who = f"rank {connection.rank} of {self._size} ({self._processes[connection.rank]})"
            raise self._failure(cannot_be_reached(who, self._place.host_timeout))
        if connection.has_ended:
            self._end(connection)

    def _handle(self, rank: int, member: Connection) -> None:
        """Act on a member's messages other than payloads, which stay in its inbox.

        A member's complaint that is older than the roster it crossed on its way is void.
        """
        payloads: list[Message] = []
        while member.inbox:
            message = member.inbox.popleft()
            if message.kind is Kind.PAYLOAD:
                payloads.append(message)
            elif message.kind is Kind.GOODBYE:
                self._departed.add(rank)
            elif message.kind is Kind.FAILURE:
                raise self._failure(message.body.decode(errors="replace"))
            elif message.kind is Kind.LATE and message.body == str(self._round).encode():
                member.inbox.extend(payloads)
                raise self._failure(self._not_arrived(self._absent() or {0}))
        member.inbox.extend(payloads)

    def _end(self, connection: Connection) -> None:
        """Forget who has hung up; a member that did so before the run stands may join again."""
        if connection.rank is None or self._round == 0:
            self._drop(connection)
        else:
            self._selector.unregister(connection.wire)

    def _drop(self, connection: Connection) -> None:
        if connection.rank is not None:
            self._members.pop(connection.rank, None)
        elif connection in self._candidates:
            self._candidates.remove(connection)
        if connection.wire in self._selector.get_map():
            self._selector.unregister(connection.wire)
        connection.close()

    # Who joins ------------------------------------------------------------------------------------

    def _greet(self, candidate: Connection) -> None:
        """Do what a candidate's next message calls for.

        Raises:
            WireError: it is none of ours, and ought to be dropped without a word.
        """
        kind, body = candidate.inbox.popleft()
        if candidate.inbox:
            raise WireError("more than was asked for")
        if kind is Kind.HELLO and candidate.handshake is None and Handshake.is_nonce(body):
            mine, key = nonce(), self._place.known.key(candidate.address)
            candidate.handshake = Handshake(key, body, mine)
            candidate.send(Kind.CHALLENGE, mine, time.monotonic() + _SHORTLY)
            return
        if kind is not Kind.PROOF or candidate.handshake is None:
            raise WireError("no greeting")
        greeting = Greeting.parse(Handshake.greeting_of(body))
        if greeting is None or not self._place.takes(greeting.rank):
            raise WireError("a greeting of nonsense")
        if candidate.handshake.check_client(body):
            welcome = candidate.handshake.of_server()
            candidate.send(Kind.WELCOME, welcome, time.monotonic() + _SHORTLY)
            self._admit(candidate, greeting)
        else:
            self._turn_away(candidate, greeting)

    def _admit(self, candidate: Connection, greeting: Greeting) -> None:
        """Make a process that knows the secret a member, or report why there is no place for it.

        Before the run stands nobody knows which of two processes that contradict each other is
        the right one, so it fails.
        """
        rank, size, peer = greeting.numbered(self._members)
        reason, me = "", self._processes[0]
        here = [self._processes[each] for each in (0, *self._members)]
        twin = None if self._place.one_host else peer.twin(here)
        if greeting.rank == ANY_RANK and twin:
            reason = f"two processes of one host ask for a rank: {twin} and {peer}; "
        elif rank in self._members or rank == 0:
            reason = f"two processes claim rank {rank}: {self._processes[rank]} and {peer}; "
        if self._verdict:
            self._refuse(candidate, Kind.FAILURE, self._verdict)
            self._notified.add(rank)
        elif self._round > 0:
            reason += f"a run is under way at this {self._place.kind} already (its rank 0: {me})"
            advice = f"wait for its end, or give every run a {self._place.own} of its own"
            self._refuse(candidate, Kind.FAILURE, f"{reason}; {advice}")
        elif size != self._size:
            raise self._disagreement(
                f"rank {rank} ({peer}) was started with world size {size}, rank 0 ({me}) with "
                f"{self._size}; give every rank the same world size",
                rank,
                candidate,
            )
        elif reason:
            advice = f"a rank of its own, and every run a {self._place.own} of its own"
            raise self._disagreement(f"{reason}give every process {advice}", rank, candidate)
        else:
            self._candidates.remove(candidate)
            candidate.trust(self._place.host_timeout)
            candidate.rank, self._members[rank], self._processes[rank] = rank, candidate, peer

    def _turn_away(self, candidate: Connection, greeting: Greeting) -> None:
        """Answer who knows another secret, or none. Only a process of our own user is no enemy."""
        if not self._place.is_common:  # it means another run, which once listened here
            self._refuse(candidate, Kind.SECRET, "")
            return
        # Asked before the other side hangs up.
        host, user = candidate.address[0], user_of(candidate.address, candidate.here)
        self._refuse(candidate, Kind.SECRET, "")
        reason = (
            f"the secrets differ: a process on {host}, as rank {greeting.rank} ({greeting.peer}), "
            f"knows another secret than rank 0, whose is from {self._place.known.source}"
        )
        if user == os.geteuid() and self._round == 0 and not self._verdict:
            raise self._disagreement(f"{reason}; {REMEDY}", greeting.rank, candidate)
        self._turned_away.add(host, reason)

    def _refuse(self, candidate: Connection, kind: Kind, words: str) -> None:
        """Send the last message, which is there when the other side has read it and hangs up."""
        candidate.send(kind, words.encode(), time.monotonic() + _SHORTLY)
        candidate.is_refused = True
        candidate.shut()

    def hand_over(self) -> dict[int, socket.socket]:
        """Wait until every member has left, and return their connections."""
        self._await_leave()
        members, self._members = self._members, {}
        if self._place.moves:
            self.close()
        for member in members.values():
            if not self._place.moves and not member.has_ended:
                self._selector.unregister(member.wire)
            member.send(Kind.GOODBYE, b"", time.monotonic() + _SHORTLY)
            member.wire.setblocking(True)
        return {rank: member.wire for rank, member in members.items()}

    def late(self) -> tuple[int, Callable[[], object]]:
        """Return what can be read when somebody comes too late, and what to call then."""
        return self._selector.fileno(), partial(self._serve_ready, 0.0)

    def leave(self) -> None:
        """Wait until every member has left, then stop listening."""
        self._await_leave()
        self.close()

    def _await_leave(self) -> None:
        deadline = time.monotonic() + self._place.timeout
        while lingering := self._members.keys() - self._departed:
            if all(self._members[rank].has_ended for rank in lingering) or not self._serve(
                deadline
            ):
                self.close()
                names = name_ranks(lingering)
                raise self._place.error(f"{names} joined and did not take leave: died or stuck")

    def abort(self, reason: str) -> None:
        """Send the reason to all that are connected, and stop listening."""
        until = time.monotonic() + _SHORTLY
        with suppress(RendezvousError):  # a second failure is no news
            # Take in who has joined since, and those that are just doing so.
            while (left := until - time.monotonic()) > 0:
                is_joining = any(not each.is_refused for each in self._candidates)
                if not self._serve_ready(left if is_joining else 0.0):
                    break
        self._publish_failure(reason, set())

    def _disagreement(self, reason: str, rank: int, culprit: Connection) -> RendezvousError:
        """Notify everybody that a greeting contradicts, and return the error to raise.

        Ranks are started together: one that joins a moment later ought not to wait in vain.
        """
        self._notified.add(rank)
        if not culprit.is_refused:
            self._refuse(culprit, Kind.FAILURE, reason)
        self._publish_failure(reason, set(range(1, self._size)))
        return self._place.error(reason)

    def _failure(self, reason: str) -> RendezvousError:
        """Notify the members, and return the error to raise."""
        self._publish_failure(reason, set())
        return self._place.error(reason)

    def _publish_failure(self, reason: str, expected: set[int]) -> None:
        """Notify the members, and those of the ``expected`` who join within two seconds."""
        if self._verdict:
            return
        self._verdict = reason
        deadline = time.monotonic() + _SHORTLY
        for member in self._members.values():
            member.send(Kind.FAILURE, reason.encode(), deadline)
        self._notified |= self._members.keys()
        while expected - self._notified and self._serve(deadline):
            pass
        refused = (candidate for candidate in self._candidates if candidate.is_refused)
        for connection in (*self._members.values(), *refused):
            connection.shut()
            with suppress(WireError):
                while not connection.has_ended and time.monotonic() < deadline:
                    connection.receive(deadline - time.monotonic())
        self.close()

    def close(self) -> None:
        """Stop listening, and close what is not handed over."""
        self._selector.close()
        wires = (each.wire for each in (*self._members.values(), *self._candidates))
        for end in (*self._listeners, *wires):
            end.close()
        self._place.clear()
