"""The messages between rank 0 and the others, and the proofs that both know the run's secret.

A message is a header (magic, version, kind, length) and a body. Nothing is unpickled, and nothing
is believed before its header was checked. A connection begins with a handshake. Client: a nonce.
Rank 0: a nonce. Client: a proof made of both, and who it is. Rank 0: its own proof. Before a proof
was found right nothing but lengths is believed; and as a job may have no secret, a greeting is read
in a way that no content can harm.
"""

from __future__ import annotations

import enum
import errno
import hmac
import ipaddress
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from flashlight_py.distributed.rendezvous.secret import proof
from flashlight_py.distributed.rendezvous.store import ANY_RANK, Peer

_MAGIC = b"FLrv"
_VERSION = 2
_HEADER = struct.Struct("!4sHHQ")
_LENGTH = struct.Struct("!Q")
_MAPPED = "::ffff:"
# What a connection ends by whose other end is silent: it was not closed there.
_UNREACHABLE = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN}
_PROBES = 5
EMPTY_BYTES = _HEADER.size  # of a message without a body
CHUNK_BYTES = 1 << 20  # that are read at a time
PROOF_BYTES = 32
# Who has proven nothing yet may send at most this many bytes; only a handshake precedes it.
_UNPROVEN_LIMIT = 4096
_MEMBER_LIMIT = 1 << 40


class Kind(enum.IntEnum):
    """The purpose of a message."""

    HELLO = 1  # client: its nonce
    WELCOME = 2  # rank 0: its proof that it knows the secret; the client's was right
    PAYLOAD = 3  # client: its payload of the next round
    ROSTER = 4  # rank 0: everybody's payload
    LATE = 5  # client: my time is up; its body: the round, as decimal text
    FAILURE = 6  # either, after WELCOME: why the run fails, or has no place for the client, as text
    GOODBYE = 7  # client: I leave
    CHALLENGE = 8  # rank 0: its nonce
    PROOF = 9  # client: its proof that it knows the secret, and its greeting
    SECRET = 10  # rank 0: the proof is none, made with another secret


class Message(NamedTuple):
    kind: Kind
    body: bytes


class WireError(Exception):
    """The bytes that arrived are no message of this protocol."""


class Greeting(NamedTuple):
    """A client's rank, the world size that it was given, and its process."""

    rank: int
    size: int
    peer: Peer

    def pack(self) -> bytes:
        """Return lines of text."""
        peer = self.peer
        lines = (self.rank, self.size, peer.pid, peer.host, peer.machine, peer.started)
        return "\n".join(map(str, lines)).encode(errors="replace")

    def numbered(self, taken: Container[int]) -> Greeting:
        """Return the same with the least rank that is not ``taken``, if it asks for any."""
        free = (rank for rank in range(1, self.size) if rank not in taken)
        rank = next(free, self.size - 1) if self.rank == ANY_RANK else self.rank
        return self._replace(rank=rank)

    @classmethod
    def parse(cls, text: bytes) -> Greeting | None:
        """Read what ``pack`` wrote; None if it is none. What cannot be printed is replaced."""
        try:
            words = text.decode(errors="replace").split("\n")
            rank, size, pid = map(int, words[:3])
            host, machine, started = (
                "".join(char if char.isprintable() else "?" for char in word) for word in words[3:]
            )
        except ValueError:
            return None
        is_right = ANY_RANK <= rank < size < 1 << 31
        return cls(rank, size, Peer(host, pid, machine, started)) if is_right else None


class Handshake(NamedTuple):
    """One side's view of a handshake: the key that both sides should know, and both nonces."""

    key: bytes
    client_nonce: bytes
    server_nonce: bytes

    def of_client(self, greeting: bytes) -> bytes:
        """Return a client's proof and greeting."""
        return proof(self.key, b"client", *self[1:], greeting) + greeting

    def of_server(self) -> bytes:
        """Return the proof of rank 0."""
        return proof(self.key, b"server", *self[1:])

    def check_client(self, body: bytes) -> bool:
        """Return whether ``body`` is what a client with our key would send."""
        return hmac.compare_digest(body, self.of_client(body[PROOF_BYTES:]))


class Connection:
    """One connected socket: whole messages in, whole messages out.

    ``inbox`` holds what has arrived, ``has_ended``: nothing more will. ``address`` is the other
    end's, ``here`` our own. On rank 0, ``rank`` is the client's once it is a member, and
    ``is_refused``: it has been sent its last message.

    Raises:
        OSError: the other end has hung up already; ``wire`` is closed.
    """

    def __init__(self, wire: socket.socket) -> None:
        try:
            address, here = wire.getpeername(), wire.getsockname()
            wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            wire.close()
            raise
        self.wire, self.address, self.here = wire, plain(address), plain(here)
        self.handshake: Handshake | None = None
        self.rank: int | None = None
        self.is_refused = False
        self.is_unreachable = False  # has_ended, because nothing comes from the other host any more
        self.inbox: deque[Message] = deque()
        self.has_ended = False
        self._buffer = bytearray()
        self._limit = _UNPROVEN_LIMIT

    def trust(self, host_timeout: float) -> None:
        """Accept long messages from now on; end when the other host is silent for so many seconds.

        0: do not. The kernel asks, and answers, so that what a process does meanwhile is no matter,
        unless it takes nothing for so long while its kernel has no more room.
        """
        self._limit = _MEMBER_LIMIT
        if host_timeout:
            interval = max(1, int(host_timeout / _PROBES))
            self.wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self.wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, interval)
            self.wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, interval)
            self.wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
            milliseconds = int(host_timeout * 1000)
            self.wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)

    def send(self, kind: Kind, body: bytes, deadline: float) -> bool:
        """Send a message; return whether it went out before the deadline and the peer's end."""
        self.wire.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            self.wire.sendall(_HEADER.pack(_MAGIC, _VERSION, kind, len(body)) + body)
        except OSError:
            # Either too late or the peer is gone; what it sent last may still be read.
            return False
        return True

    def receive(self, timeout: float, most: int = CHUNK_BYTES) -> None:
        """Take what arrives within ``timeout`` seconds, one read of ``most`` bytes, into the inbox.

        Raises:
            WireError: it is no message of ours, or too long for who has proven nothing.
        """
        self.wire.settimeout(max(0.001, timeout))
        try:
            data = self.wire.recv(most)
        except OSError as error:
            if isinstance(error, TimeoutError) and error.errno is None:  # ours, not the kernel's
                return
            self.is_unreachable = error.errno in _UNREACHABLE
            data = b""
        self.has_ended = not data
        self._buffer += data
        while self._take_message():
            pass

    def take(self, deadline: float, most: int = CHUNK_BYTES) -> Message | None:
        """Wait for a message and return it; None: the other side hung up, or time is up.

        Of ``EMPTY_BYTES`` at a time, nothing is read that follows a message without a body.

        Raises:
            WireError: as ``receive``.
        """
        while not self.inbox and not self.has_ended:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self.receive(left, most)
        return self.inbox.popleft() if self.inbox else None

    def shut(self) -> None:
        """Send no more, and let what was sent arrive; the other side hangs up when it has read it.

        Closing with unread input would make the kernel send a reset, upon which the peer would
        lose what it has not read yet.
        """
        try:
            self.wire.shutdown(socket.SHUT_WR)
        except OSError:  # it has gone already
            self.has_ended = True

    def _take_message(self) -> bool:
        if not _MAGIC.startswith(bytes(self._buffer[: len(_MAGIC)])):
            raise WireError("no message of a flashlight_py rendezvous")
        if len(self._buffer) < _HEADER.size:
            return False
        _, version, kind, length = _HEADER.unpack_from(self._buffer)
        if version != _VERSION:
            raise WireError(f"protocol version {version}, this process has {_VERSION}")
        if length > self._limit:
            raise WireError(f"a message of {length} bytes where at most {self._limit} are taken")
        if kind not in list(Kind):
            raise WireError(f"unknown kind of message {kind}")
        end = _HEADER.size + length
        if len(self._buffer) < end:
            return False
        self.inbox.append(Message(Kind(kind), bytes(self._buffer[_HEADER.size : end])))
        del self._buffer[:end]
        return True


def plain(address: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return an IPv4 address that a socket for both families writes as one of IPv6, as it is."""
    host = str(address[0])
    return (host.removeprefix(_MAPPED), address[1]) if host.startswith(_MAPPED) else address


def user_of(theirs: tuple[Any, ...], ours: tuple[Any, ...]) -> int | None:
    """Return the user whose socket at ``theirs`` is connected to ours; None if none of this host.

    The kernel's own word, net/tcp of proc(5). A socket that its process has closed has no inode
    there and is listed as root's.
    """
    wanted = [_in_hex(theirs), _in_hex(ours)]
    table = Path("/proc/net/tcp6" if ":" in theirs[0] else "/proc/net/tcp")
    if not table.exists():
        return None
    for line in table.read_text().splitlines()[1:]:
        _, *ends, _, _, _, _, user, _, inode = line.split()[:10]
        if ends == wanted and inode != "0":
            return int(user)
    return None


def _in_hex(address: tuple[Any, ...]) -> str:
    """Return an address as net/tcp has it: words of 32 bits of the host's byte order."""
    packed = ipaddress.ip_address(address[0].partition("%")[0]).packed
    words = (packed[at : at + 4] for at in range(0, len(packed), 4))
    host = "".join(f"{int.from_bytes(word, sys.byteorder):08X}" for word in words)
    return f"{host}:{address[1]:04X}"


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
