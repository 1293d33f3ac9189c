"""Messages of a TCP rendezvous: a header with magic, version, kind and length, then the body.

Nothing is unpickled, and nothing is believed before its header was checked.
"""

from __future__ import annotations

import enum
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

from flashlight_py.distributed.rendezvous._tcp_greeting import Handshake

__all__ = ["Connection", "Kind", "Message", "WireError", "join_payloads", "split_payloads"]

_MAGIC = b"FLrv"
_VERSION = 2
_HEADER = struct.Struct("!4sHHQ")
_LENGTH = struct.Struct("!Q")
# A stranger may claim at most this many bytes; only a handshake comes before it is known.
_STRANGER_LIMIT = 4096
_MEMBER_LIMIT = 1 << 40


class Kind(enum.IntEnum):
    """What a message is for."""

    HELLO = 1  # guest: its nonce
    WELCOME = 2  # rank 0: its proof that it knows the secret; the greeting was right
    PAYLOAD = 3  # guest: its payload of the next round
    ROSTER = 4  # rank 0: everybody's payload
    LATE = 5  # guest: my time is up; its body: the round, as decimal text
    FAILURE = 6  # anybody: why this run fails, as text
    GOODBYE = 7  # guest: I leave
    CHALLENGE = 8  # rank 0: its nonce
    PROOF = 9  # guest: its proof that it knows the secret, and its greeting
    SECRET = 10  # rank 0: the proof is none, made with another secret


class Message(NamedTuple):
    kind: Kind
    body: bytes


class WireError(Exception):
    """What came is no message of this protocol."""


class Connection:
    """One connected socket: whole messages in, whole messages out.

    ``inbox`` holds what has come, ``has_ended`` tells that nothing more will. ``address`` is the
    other end's, ``here`` our own. ``is_refused``: rank 0 has said its last word to it.
    """

    def __init__(self, wire: socket.socket, address: tuple[Any, ...]) -> None:
        self.wire, self.address, self.here = wire, address, wire.getsockname()
        self.handshake: Handshake | None = None
        self.is_refused = False
        self.inbox: deque[Message] = deque()
        self.has_ended = False
        self._buffer = bytearray()
        self._limit = _STRANGER_LIMIT
        wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def welcome(self, deadline: float) -> None:
        """Make a guest whose proof was right a member, and prove that we are rank 0."""
        assert self.handshake is not None
        self.trust()
        self.send(Kind.WELCOME, self.handshake.of_host(), deadline)

    def is_unproven(self) -> bool:
        """Return whether its proof is one that anybody could have made: there is no secret."""
        return self.handshake is not None and not self.handshake.key

    def trust(self) -> None:
        """Accept long messages from now on."""
        self._limit = _MEMBER_LIMIT

    def send(self, kind: Kind, body: bytes, deadline: float) -> bool:
        """Send a message; tell whether it went out before the deadline and the peer's end."""
        self.wire.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            self.wire.sendall(_HEADER.pack(_MAGIC, _VERSION, kind, len(body)) + body)
        except OSError:
            # Either too late or the peer is gone; what it said last may still be read.
            return False
        return True

    def receive(self, timeout: float) -> None:
        """Take what comes within ``timeout`` seconds, one read of it, into the inbox.

        Raises:
            WireError: it is no message of ours, or too long for a stranger.
        """
        self.wire.settimeout(max(0.001, timeout))
        try:
            data = self.wire.recv(1 << 20)
        except TimeoutError:
            return
        except OSError:
            data = b""
        self.has_ended = not data
        self._buffer += data
        while self._take_message():
            pass

    def _take_message(self) -> bool:
        if len(self._buffer) < _HEADER.size:
            if not _MAGIC.startswith(bytes(self._buffer[: len(_MAGIC)])):
                raise WireError("no message of a flashlight_py rendezvous")
            return False
        kind, length = self._read_header()
        end = _HEADER.size + length
        if len(self._buffer) < end:
            return False
        self.inbox.append(Message(kind, bytes(self._buffer[_HEADER.size : end])))
        del self._buffer[:end]
        return True

    def _read_header(self) -> tuple[Kind, int]:
        magic, version, kind, length = _HEADER.unpack_from(self._buffer)
        if magic != _MAGIC:
            raise WireError("no message of a flashlight_py rendezvous")
        if version != _VERSION:
            raise WireError(f"protocol version {version}, this process has {_VERSION}")
        if length > self._limit:
            raise WireError(f"a message of {length} bytes where at most {self._limit} are taken")
        try:
            return Kind(kind), length
        except ValueError:
            raise WireError(f"unknown kind of message {kind}") from None

    def close(self) -> None:
        self.wire.close()

    def is_closed(self) -> bool:
        """Return whether this side has closed the socket."""
        return self.wire.fileno() < 0


def join_payloads(payloads: Iterable[bytes]) -> bytes:
    """Pack byte strings into one, each after its length."""
    return b"".join(_LENGTH.pack(len(payload)) + payload for payload in payloads)


def split_payloads(body: bytes) -> list[bytes]:
    """Undo ``join_payloads``."""
    payloads = []
    start = 0
    while start < len(body):
        (length,) = _LENGTH.unpack_from(body, start)
        start += _LENGTH.size + length
        payloads.append(body[start - length : start])
    return payloads
