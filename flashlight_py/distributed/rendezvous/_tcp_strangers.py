"""Who has connected to rank 0 of a TCP rendezvous and has not proven yet to be a rank."""

from __future__ import annotations

import logging
import os
import socket
import time
from contextlib import suppress

from flashlight_py.distributed.rendezvous._tcp_greeting import Greeting, Handshake, user_of
from flashlight_py.distributed.rendezvous._tcp_wire import Connection, Kind, WireError
from flashlight_py.distributed.rendezvous.secret import REMEDY, Secret, nonce

__all__ = ["SecretsDifferError", "Strangers"]

# How long a short message may take, in seconds: it fits into what the kernel keeps for us.
_SHORTLY = 2.0
# Of hosts whose processes were turned away so many are remembered, for the message of a failure.
_MOST_NAMED = 8

_log = logging.getLogger("flashlight_py")


class SecretsDifferError(Exception):
    """A process of our own user, as rank ``rank``, knows another secret; says so."""

    def __init__(self, reason: str, rank: int) -> None:
        super().__init__(reason)
        self.rank = rank


class Strangers:
    """Connections in the order in which they came. ``place`` is the rendezvous, for messages."""

    def __init__(self, secret: Secret, place: str) -> None:
        self._secret, self._place = secret, place
        self.here: list[Connection] = []
        self._turned_away: set[str] = set()

    def hear(self, stranger: Connection) -> Greeting | None:
        """Do what the stranger's next message calls for; returns who it is once it is proven.

        Raises:
            WireError: it is none of ours, and ought to be dropped without a word.
            SecretsDifferError: it was turned away, but must be a rank that was started wrongly.
        """
        if stranger.is_refused:
            stranger.inbox.clear()
        if not stranger.inbox:
            return None
        kind, body = stranger.inbox.popleft()
        if stranger.inbox:
            raise WireError("more than was asked for")
        if kind is Kind.HELLO and stranger.handshake is None and Handshake.is_nonce(body):
            mine = nonce()
            stranger.handshake = Handshake(self._secret.key(stranger.address), body, mine)
            stranger.send(Kind.CHALLENGE, mine, time.monotonic() + _SHORTLY)
            return None
        if kind is not Kind.PROOF or stranger.handshake is None:
            raise WireError("no greeting")
        greeting = Greeting.parse(Handshake.greeting_of(body))
        if greeting is None:
            raise WireError("a greeting of nonsense")
        if stranger.handshake.check_guest(body):
            self.here.remove(stranger)
            return greeting
        self._turn_away(stranger, greeting)
        return None

    def refuse(self, stranger: Connection, kind: Kind, body: bytes) -> None:
        """Say a last word, which is there when the other side has read it and hangs up."""
        stranger.send(kind, body, time.monotonic() + _SHORTLY)
        stranger.is_refused = True
        with suppress(OSError):  # it has gone already
            stranger.wire.shutdown(socket.SHUT_WR)

    def turned_away(self) -> str:
        """Complete a sentence about ranks that are missing: who knew another secret."""
        hosts = ", ".join(sorted(self._turned_away))
        listed = f"; processes on {hosts} were turned away, as they know another secret: {REMEDY}"
        return listed if hosts else ""

    def _turn_away(self, stranger: Connection, greeting: Greeting) -> None:
        """Answer who knows another secret, or none. Only a process of our own user is no enemy."""
        host, user = stranger.address[0], user_of(stranger.address, stranger.here)
        self.refuse(stranger, Kind.SECRET, b"")
        reason = (
            f"the secrets differ: a process on {host}, as rank {greeting.rank} ({greeting.peer}), "
            f"knows another secret than rank 0, whose is from {self._secret.source}"
        )
        if user == os.geteuid():
            raise SecretsDifferError(f"{reason}; {REMEDY}", greeting.rank)
        if host not in self._turned_away and len(self._turned_away) < _MOST_NAMED:
            self._turned_away.add(host)
            _log.warning("rendezvous at %s: %s, and was turned away", self._place, reason)
