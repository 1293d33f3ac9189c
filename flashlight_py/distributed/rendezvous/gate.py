"""The gate of a rank: who connects to it, proves to be one of this run, and gets a place."""

from __future__ import annotations

import abc
import errno
import logging
import os
from selectors import EVENT_READ
from typing import TYPE_CHECKING

from flashlight_py import system
from flashlight_py.distributed.rendezvous.secret import NONCE_BYTES, REMEDY, Secret, nonce
from flashlight_py.distributed.rendezvous.store import ANY_RANK
from flashlight_py.distributed.rendezvous.wire import (
    PROOF_BYTES,
    Connection,
    Greeting,
    Handshake,
    Kind,
    WireError,
    user_of,
)
from flashlight_py.errors import RendezvousError

if TYPE_CHECKING:
    from flashlight_py.distributed.rendezvous.meeting import MeetingPoint

# How long a short message may take, and a reason for failing is kept readable, in seconds.
SHORTLY = 2.0
# Connections that have proven nothing yet, beyond one per rank; more are a flood.
_SPARE_CANDIDATES = 64
# In a tree there are at most so many, and the kernel keeps who else is there. One that has not
# become a rank within so many seconds makes room.
_TREE_CANDIDATES, _CANDIDATE_SECONDS = 40, 1.0
# Of hosts whose processes were turned away so many are remembered, for the message of a failure.
_MOST_NAMED = 8
_log = logging.getLogger("flashlight_py")


class Gate(abc.ABC):
    """A rank that listens for others. It serves while it is in a call.

    In between, the kernel accepts connections and keeps what they send; so no thread is needed.
    A connection is a candidate until it has proven to be a rank and has its place here.
    """

    def __init__(self, place: MeetingPoint) -> None:
        self._place, self._size = place, place.size
        self._secret: Secret = place.known  # that who comes is to know
        self.selector = system.Selector()
        self._listeners: list[system.Socket] = []
        self._is_open = True  # listeners are looked at
        self._candidates: list[Connection] = []
        self._turned_away: set[str] = set()  # hosts whose processes know another secret
        self._round = 0
        self._verdict = ""  # once this run has failed: why
        self._notified: set[int] = set()  # and which ranks know it

    @abc.abstractmethod
    def _admit(self, candidate: Connection, greeting: Greeting) -> None:
        """Give a process that knows the secret its place, or report why there is none for it."""

    @abc.abstractmethod
    def _heard(self, connection: Connection) -> None:
        """Act on what a connection has sent, or on its end, which is no candidate any more."""

    @abc.abstractmethod
    def _disagreement(self, reason: str, rank: int, culprit: Connection) -> RendezvousError:
        """Notify everybody that a greeting contradicts, and return the error to raise."""

    def _listen(self, listener: system.Socket) -> None:
        listener.setblocking(False)
        self._listeners.append(listener)
        self.selector.register(listener, EVENT_READ, listener)

    @property
    def _backlog(self) -> int:
        return self._size + _SPARE_CANDIDATES

    def _serve(self, deadline: float) -> None:
        """Deal with what has arrived; wait for something until ``deadline`` if need be."""
        self.serve_ready(max(0.0, deadline - system.monotonic()))

    def serve_ready(self, seconds: float) -> bool:
        """Deal with what arrives within ``seconds``; False: nothing has."""
        if self._place.is_tree:
            seconds = min(seconds, self._open_or_close())
        ready = self.selector.select(seconds)
        for key, _ in ready:
            if not isinstance(key.data, Connection):
                self._accept(key.data)
            elif key.data.wire.fileno() >= 0:  # by a message of another one
                self._receive(key.data)
        return bool(ready)

    def _open_or_close(self) -> float:
        """Look at listeners only while there is room; return for how many seconds to, at most."""
        oldest = self._candidates[0] if len(self._candidates) >= _TREE_CANDIDATES else None
        left = oldest.since + _CANDIDATE_SECONDS - system.monotonic() if oldest else 0.0
        if self._is_open != (left <= 0.0):
            self._is_open = not self._is_open
            for each in self._listeners:
                if self._is_open:
                    self.selector.register(each, EVENT_READ, each)
                else:
                    self.selector.unregister(each)
        return left if left > 0.0 else 1e9

    def _accept(self, listener: system.Socket) -> None:
        most = _TREE_CANDIDATES if self._place.is_tree else self._backlog
        try:
            connection = Connection(listener.accept()[0])
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and self._candidates:
                self._drop(self._candidates[0])
            return  # whoever it was has gone again, or is still there at the next look
        self.selector.register(connection.wire, EVENT_READ, connection)
        self._candidates.append(connection)
        if len(self._candidates) > most:
            self._drop(self._candidates[0])

    def _receive(self, connection: Connection) -> None:
        try:
            connection.receive(0.0)
            if connection.is_refused:
                connection.inbox.clear()
            elif connection.rank is None and connection.inbox:
                self._greet(connection)
        except WireError as error:
            self._spoilt(connection, error)
            return
        if connection.rank is not None:
            self._heard(connection)
        elif connection.has_ended:
            self._drop(connection)

    def _spoilt(self, connection: Connection, error: WireError) -> None:
        """Deal with a connection on which something came that is no message."""
        who = f"rendezvous at {self._place.name}: dropped a connection of"
        _log.info("%s %s: %s", who, connection.address[0], error)
        self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        if connection in self._candidates:
            self._candidates.remove(connection)
        if connection.wire in self.selector.get_map():
            self.selector.unregister(connection.wire)
        connection.wire.close()

    # Who joins ------------------------------------------------------------------------------------

    def _greet(self, candidate: Connection) -> None:
        """Do what a candidate's next message calls for.

        Raises:
            WireError: it is none of ours, and ought to be dropped without a word.
        """
        kind, body = candidate.inbox.popleft()
        if kind is Kind.HELLO and candidate.handshake is None and len(body) == NONCE_BYTES:
            mine, key = nonce(), self._secret.key(candidate.address)
            candidate.handshake = Handshake(key, body, mine)
            candidate.send(Kind.CHALLENGE, mine, system.monotonic() + SHORTLY)
            return
        if kind is not Kind.PROOF or candidate.handshake is None:
            raise WireError("no greeting")
        greeting = Greeting.parse(body[PROOF_BYTES:])
        if greeting is None or (greeting.rank == ANY_RANK and not self._place.unnumbered):
            raise WireError("a greeting of nonsense")
        if candidate.handshake.check_client(body):
            welcome = candidate.handshake.of_server()
            candidate.send(Kind.WELCOME, welcome, system.monotonic() + SHORTLY)
            self._admit(candidate, greeting)
        else:
            self._turn_away(candidate, greeting)

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
            f"knows another secret than rank 0, whose is from {self._secret.source}"
        )
        if user == os.geteuid() and self._round == 0 and not self._verdict:
            raise self._disagreement(f"{reason}; {REMEDY}", greeting.rank, candidate)
        if host not in self._turned_away and len(self._turned_away) < _MOST_NAMED:
            self._turned_away.add(host)
            place = self._place.name
            _log.warning("rendezvous at %s: %s, and was turned away", place, reason)

    def _refuse(self, candidate: Connection, kind: Kind, words: str) -> None:
        """Send the last message, which is there when the other side has read it and hangs up."""
        candidate.send(kind, words.encode(), system.monotonic() + SHORTLY)
        candidate.is_refused = True
        candidate.shut()
