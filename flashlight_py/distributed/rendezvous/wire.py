"""Connections between ranks: messages, and proofs that both ends know the run's secret.

A message is a header (magic, version, kind, length) and a body; nothing is unpickled. A connection
begins with a handshake. Client and server (such as rank 0) exchange nonces. The client sends a
proof made of both nonces, and its greeting; the server answers with its proof. A server uses only
lengths before it has checked the proof. If a job has no secret, no greeting can do harm.
"""

from __future__ import annotations

import enum
import errno
import hmac
import os
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from selectors import EVENT_WRITE
from typing import Any, NamedTuple

from flashlight_py import system
from flashlight_py.distributed.rendezvous.secret import NONCE_BYTES, REMEDY, Secret, nonce, proof
from flashlight_py.distributed.rendezvous.store import ANY_RANK, Peer, this_process
from flashlight_py.interfaces import family_of, resolved

_MAGIC = b"FLrv"
_VERSION = 5
_HEADER = struct.Struct("!4sHHQ")
_MAPPED = "::ffff:"
# Errors that mean: the other end is silent, but has not closed the connection.
_UNREACHABLE = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN}
_PROBES = 5
_CHUNK_BYTES = 1 << 28  # maximum bytes of one read
_SMALL_BYTES = 1 << 16  # a body up to this size is sent in one call with its header
PROOF_BYTES = 32
_UNPROVEN_LIMIT, _MEMBER_LIMIT = 4096, 1 << 40  # maximum bytes of a message: before a proof, after
_LOCAL_ENDS = ("127.0.0.1", 0)  # stands for both addresses of a local socket
LEAF = "leaf"  # in a greeting: no rank connects to its sender
_LONGEST_CONNECT = 5.0  # Maximum seconds of one attempt to connect to all addresses
_NEXT_SECONDS = 0.25  # Seconds until the next address is tried in parallel (RFC 8305)
# After a rejected connection: maximum seconds for other addresses. Rank 0 may not listen yet.
_REFUSED_SECONDS = 1.0


class Kind(enum.IntEnum):
    """The purpose of a message. Up: towards rank 0; down: away from it."""

    HELLO = 1  # client: its nonce
    WELCOME = 2  # server: accepts the client's proof and sends its own
    PAYLOAD = 3  # up: all payloads of the sender's subtree in this round
    ROSTER = 4  # down: the payloads of all ranks
    LATE = 5  # up: the sender's deadline has passed; down: send your payloads. Body: the round
    FAILURE = 6  # up or down: why the run fails; to a client after WELCOME: why it is rejected
    GOODBYE = 7  # up: all ranks of the sender's subtree leave
    CHALLENGE = 8  # server: its nonce
    PROOF = 9  # client: its proof and its greeting
    SECRET = 10  # server: the client's proof is wrong, so the secrets differ
    POSITION = 11  # server: the client's ``Position`` in the tree
    PART = 12  # up: like PAYLOAD, but more payloads may follow
    LOST = 13  # up: a lost rank, its parent, and the reason, as text


_KINDS = {int(kind): kind for kind in Kind}


class Packet(NamedTuple):
    kind: Kind
    body: bytes


class WireError(Exception):
    """The received bytes are not a message of this protocol."""


class Greeting(NamedTuple):
    """A client's rank, its world size, and its process.

    In a tree, ``listens_at`` is the client's listening address and port, or ``LEAF``. Else "".
    ``lost_parent`` is the rank of the lost parent, or ANY_RANK if the client has lost no parent.
    """

    rank: int
    size: int
    peer: Peer
    listens_at: str = ""
    lost_parent: int = ANY_RANK

    def pack(self) -> bytes:
        """Return the greeting as lines of text."""
        lines = map(str, (self.rank, self.size, *self.peer, self.listens_at, self.lost_parent))
        return "\n".join(lines).encode(errors="replace")

    @classmethod
    def parse(cls, text: bytes) -> Greeting | None:
        """Return the greeting in ``text``; None: invalid. Unprintable characters become "?"."""
        try:
            rank, size, host, pid, machine, started, listens_at, lost_parent = (
                "".join(char if char.isprintable() else "?" for char in word)
                for word in text.decode(errors="replace").split("\n")
            )
            peer = Peer(host, int(pid), machine, started)
            greeting = cls(int(rank), int(size), peer, listens_at, int(lost_parent))
        except ValueError:
            return None
        return greeting if 0 <= greeting.rank < greeting.size < 1 << 31 else None


class Position(NamedTuple):
    """The position of ``rank`` in the tree: below ``parent``, ``depth`` levels below rank 0.

    ``peer`` is the process of the parent, which listens at ``host`` and ``port``. If ``host`` is
    "", the parent itself has sent the position.
    """

    rank: int
    parent: int
    depth: int
    peer: str
    host: str = ""
    port: int = 0


# Pickled objects can run code on the receiver, so a rank must prove that it knows the secret. TLS
# would need certificates and slow down connected ranks.
class Handshake(NamedTuple):
    """One side's view of a handshake: the common key, and both nonces."""

    key: bytes
    client_nonce: bytes
    server_nonce: bytes

    def client_proof(self, greeting: bytes) -> bytes:
        """Return a client's proof and greeting."""
        return proof(self.key, b"client", *self[1:], greeting) + greeting

    def server_proof(self) -> bytes:
        return proof(self.key, b"server", *self[1:])

    def check_client(self, body: bytes) -> bool:
        """Return whether ``body`` is a proof and greeting made with this key."""
        return hmac.compare_digest(body, self.client_proof(body[PROOF_BYTES:]))


class Connection:
    """A connected socket that sends and receives whole messages.

    Raises OSError, and closes ``wire``, if the other end has hung up already.
    """

    def __init__(self, wire: system.Socket) -> None:
        try:
            self.is_local = wire.family == getattr(socket, "AF_UNIX", None)
            ends = wire.getpeername(), wire.getsockname()
            if self.is_local:
                ends = _LOCAL_ENDS, _LOCAL_ENDS
            else:
                wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            wire.close()
            raise
        self.wire, self.address, self.local_address = wire, *map(unmapped, ends)
        self.ends = self.local_address[:2], self.address[:2]  # of this end, and of the other end
        self.since = system.monotonic()
        self.handshake: Handshake | None = None
        self.rank: int | None = None  # rank of the other end; None before its proof
        self.is_rejected = False  # this end has sent the reason of a rejection as its final message
        self.inbox: deque[Packet] = deque()  # received messages
        self.has_ended = False  # no more messages arrive
        self.is_unreachable = False  # ``has_ended`` is True because the other host is silent
        self._kind: Kind | None = None  # kind of the incoming message; None: not read yet
        self._chunks, self._missing = list[bytes](), _HEADER.size  # chunks read; bytes missing
        self._limit = _UNPROVEN_LIMIT
        self._unsent: deque[bytes | memoryview] = deque()  # parts of messages

    def trust(self, host_timeout: float) -> None:
        """Accept long messages; close if the other host is silent for ``host_timeout`` seconds.

        0 means no limit. The kernels of both hosts exchange probes, even if the processes are busy.
        """
        self._limit = _MEMBER_LIMIT
        if host_timeout and not self.is_local:
            interval = max(1, int(host_timeout / _PROBES))
            self.wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in (
                ("TCP_KEEPIDLE", interval),
                ("TCP_KEEPALIVE", interval),  # macOS calls TCP_KEEPIDLE so
                ("TCP_KEEPINTVL", interval),
                ("TCP_KEEPCNT", _PROBES),
                ("TCP_USER_TIMEOUT", int(host_timeout * 1000)),  # only Linux
            ):
                if hasattr(socket, option):
                    self.wire.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    def send(self, kind: Kind, body: bytes, deadline: float = 0.0) -> bool:
        """Queue a message and call ``flush``; return the result of ``flush``."""
        header = _HEADER.pack(_MAGIC, _VERSION, kind, len(body))
        self._unsent += (header, body) if len(body) > _SMALL_BYTES else (header + body,)
        return self.flush(deadline)

    def flush(self, deadline: float = 0.0) -> bool:
        """Send queued messages; return whether all have been sent.

        Waits until ``deadline`` (``time.monotonic``) for the other end to read.
        """
        while self._unsent:
            self.wire.settimeout(0.0)
            data = self._unsent.popleft()
            try:
                if (sent := self.wire.send(data)) < len(data):
                    self._unsent.appendleft(memoryview(data)[sent:])
            except BlockingIOError:
                self._unsent.appendleft(data)
                if (left := deadline - system.monotonic()) <= 0.0:
                    break
                system.can_write(self.wire.fileno(), left)
            except OSError:  # the peer has ended; its last messages may still be read
                self._unsent.clear()
        return not self._unsent

    def receive(self, timeout: float) -> None:
        """Read once, for at most ``timeout`` seconds; a complete message goes to the inbox.

        Reads no byte beyond a message. Raises WireError if the bytes are not a message, or the
        message is too long for a peer without a proof.
        """
        self.wire.settimeout(max(0.001, timeout))
        try:
            data = self.wire.recv(min(_CHUNK_BYTES, self._missing))
        except OSError as error:
            if isinstance(error, TimeoutError) and error.errno is None:  # raised by Python
                return
            self.is_unreachable = error.errno in _UNREACHABLE
            data = b""
        self.has_ended = not data
        self._chunks.append(data)
        self._missing -= len(data)
        if self._kind is None:
            self._take_header()
        if self._kind is not None and self._missing == 0:
            self.inbox.append(Packet(self._kind, b"".join(self._chunks)))
            self._kind, self._chunks, self._missing = None, [], _HEADER.size

    def take(self, deadline: float) -> Packet | None:
        """Return the next message; None at the end or the deadline. Raises like ``receive``."""
        while not self.inbox and not self.has_ended:
            left = deadline - system.monotonic()
            if left <= 0:
                return None
            self.receive(left)
        return self.inbox.popleft() if self.inbox else None

    def shut(self) -> None:
        """End the sending direction. The other side reads the sent messages, then hangs up.

        If this side closed its socket with unread input, the kernel would send a reset, and the
        other side would lose messages that it has not read.
        """
        try:
            self.wire.shutdown(socket.SHUT_WR)
        except OSError:  # the peer has hung up
            self.has_ended = True

    def _take_header(self) -> None:
        header = b"".join(self._chunks)
        if not _MAGIC.startswith(header[: len(_MAGIC)]):
            raise WireError("it is not a message of a flashlight_py rendezvous")
        if len(header) < _HEADER.size:
            return
        _, version, kind, length = _HEADER.unpack(header)
        if version != _VERSION:
            raise WireError(f"expected protocol version {_VERSION}, got {version}")
        if length > self._limit:
            raise WireError(f"a message must have at most {self._limit} bytes, got {length}")
        if kind not in _KINDS:
            raise WireError(f"unknown kind of message, got {kind}")
        self._kind, self._chunks, self._missing = _KINDS[kind], [], length


def unmapped(address: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return an IPv6-mapped IPv4 address as IPv4, and any other address unchanged."""
    host = str(address[0])
    return (host.removeprefix(_MAPPED), address[1]) if host.startswith(_MAPPED) else address


def socket_user(peer: tuple[Any, ...], local: tuple[Any, ...]) -> int | None:
    """Return the user id of the socket at ``peer`` that is connected to ``local``, or None.

    The kernel lists sockets of this host in net/tcp (proc(5)). Closed sockets are ignored: the
    kernel lists them without an inode, as sockets of root.
    """
    wanted_ends = [_hex_address(peer), _hex_address(local)]
    try:
        table = system.read_text("/proc/net/tcp6" if ":" in peer[0] else "/proc/net/tcp")
    except OSError:  # no /proc
        return None
    for line in table.splitlines()[1:]:
        _, *ends, _, _, _, _, user, _, inode = line.split()[:10]
        if ends == wanted_ends and inode != "0":
            return int(user)
    return None


def _hex_address(address: tuple[Any, ...]) -> str:
    """Return an address in the format of net/tcp: words of 32 bits in host byte order."""
    host = address[0].partition("%")[0]
    packed = socket.inet_pton(family_of(host), host)
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return f"{''.join(f'{word:08X}' for word in words)}:{address[1]:04X}"


class Offer(NamedTuple):
    """Addresses at which a rank 0 may listen, and the secret by which it is recognised."""

    addresses: Sequence[tuple[str, int]]
    secret: Secret
    run: str = ""  # name of the run
    source: str = ""  # origin of the offer, for errors
    advice: str = ""  # remedy if another program listens at the address


class NoServerError(Exception):
    """No rank 0 answers at an address, but it may answer later. The message has the reason."""


class SilentError(NoServerError):
    """A process accepted the connection and does not answer."""


class WrongServerError(NoServerError):
    """The process that answers is not the expected rank 0."""


class SecretError(WrongServerError):
    """The rank 0 that answers has another secret."""


# If all addresses of an offer fail, ``greet`` raises the error whose class is last in this list.
# Errors of a rank 0 (silent, or another secret) say more than errors of other programs.
_BY_PRIORITY = (WrongServerError, NoServerError, SilentError, SecretError)


def greet(offer: Offer, introduce: Callable[[Connection], Greeting], deadline: float) -> Connection:
    """Connect to the rank of ``offer``; both sides prove that they know its secret.

    ``introduce`` returns the greeting of this rank for a connection. Raises NoServerError if no
    process that knows the secret answers at any address before ``deadline``.
    """
    attempts = Attempts(offer.addresses)
    problems: list[NoServerError] = []
    for wire in attempts.connected(min(deadline, system.monotonic() + _LONGEST_CONNECT)):
        now = system.monotonic()
        try:
            share = (deadline - now) / (attempts.pending + 1)
            return _greet_at(wire, offer, introduce, now + share)
        except NoServerError as error:
            problems.append(error)
    if attempts.problems or not problems:
        refused = "; ".join(f"{host}: {why}" for host, why in attempts.problems.items())
        problems.append(NoServerError(refused or "rank 0 has no address"))
    raise max(problems, key=lambda problem: _BY_PRIORITY.index(type(problem)))


def _greet_at(
    wire: system.Socket, offer: Offer, introduce: Callable[[Connection], Greeting], deadline: float
) -> Connection:
    try:
        connection = Connection(wire)
    except OSError as error:
        raise NoServerError(str(error)) from error
    try:
        client_nonce = nonce()
        challenge = _ask(connection, Kind.HELLO, client_nonce, deadline, offer)
        if challenge.kind is not Kind.CHALLENGE or len(challenge.body) != NONCE_BYTES:
            raise WrongServerError(f"another program listens there{offer.advice}")
        handshake = Handshake(offer.secret.key(connection.address), client_nonce, challenge.body)
        answer = handshake.client_proof(introduce(connection).pack())
        welcome = _ask(connection, Kind.PROOF, answer, deadline, offer)
        is_proven = hmac.compare_digest(welcome.body, handshake.server_proof())
        if welcome.kind is not Kind.WELCOME or not is_proven:
            origin = f"comes from {offer.secret.source}" if handshake.key else "is missing"
            raise SecretError(
                "the secrets differ: the rank 0 that listens there does not know the secret of "
                f"this process. This secret {origin}; {REMEDY}"
            )
    except BaseException:
        connection.wire.close()
        raise
    return connection


def _ask(connection: Connection, kind: Kind, body: bytes, deadline: float, offer: Offer) -> Packet:
    connection.send(kind, body, deadline)
    try:
        message = connection.take(deadline)
    except WireError as error:
        raise WrongServerError(f"another program listens there ({error}){offer.advice}") from error
    if message is not None:
        return message
    if connection.has_ended:
        raise NoServerError("the listener closed the connection")
    raise SilentError("the listener did not answer the greeting")


def claim(offer: Offer, size: int, seconds: float) -> str:
    """Greet the rank 0 of ``offer`` as another rank 0; return its reason to reject this process.

    Return "" if no rejection arrives within ``seconds``. Raises like ``greet``.
    """
    greeting, deadline = Greeting(0, size, this_process()), system.monotonic() + seconds
    connection = greet(offer, lambda _: greeting, deadline)
    try:
        answer = connection.take(deadline)
    except WireError as error:
        raise WrongServerError(str(error)) from error
    finally:
        connection.wire.close()
    has_failed = answer is not None and answer.kind is Kind.FAILURE
    return answer.body.decode(errors="replace") if answer and has_failed else ""


# A host name may mean 127.0.1.1 on its own host and IPv6 elsewhere, so all addresses are tried.
class Attempts:
    """Connections to ``addresses``: pairs of a host (address or name) and a port.

    A host that begins with a NUL byte is a socket inside this host (unix(7): abstract).
    ``problems`` has the reasons, by address, why a connection failed.
    """

    def __init__(self, addresses: Iterable[tuple[str, int]]) -> None:
        self.problems: dict[str, str] = {}
        self._targets: deque[tuple[Any, ...]] = deque()
        for host, port in addresses:
            try:
                self._targets.extend([(host,)] if host[0] == "\0" else resolved(host, port))
            except OSError as error:  # noqa: PERF203 - an error for each address
                self.problems[host] = str(error)
        self.pending = len(self._targets)

    def connected(self, until: float) -> Iterator[system.Socket]:
        """Yield sockets that connect before ``until`` (``time.monotonic``), the fastest first.

        The caller closes each socket. ``pending`` is the number of addresses without a result.
        """
        due = system.monotonic()
        # All addresses are tried within half of the time, even if no address answers.
        pause = min(_NEXT_SECONDS, (until - due) / (2 * max(1, len(self._targets))))
        with system.Selector() as selector:
            try:
                while self._targets or selector.get_map():
                    now = system.monotonic()
                    if self._targets and (now >= due or not selector.get_map()):
                        self._start(selector, self._targets.popleft())
                        due = now + pause
                        continue
                    ready = selector.select(min(until, due if self._targets else until) - now)
                    for key, _ in ready:
                        wire, address = key.data
                        selector.unregister(wire)
                        if error := wire.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                            wire.close()
                            self._add_problem(address, OSError(error, os.strerror(error)))
                            due = 0.0  # rejected: try the next address immediately
                            until = min(until, system.monotonic() + _REFUSED_SECONDS)
                            continue
                        self.pending -= 1
                        wire.setblocking(True)
                        yield wire
                    if not ready and system.monotonic() >= until:
                        for key in selector.get_map().values():
                            self._add_problem(key.data[1], TimeoutError("timed out"))
                        return
            finally:
                for key in list(selector.get_map().values()):
                    key.data[0].close()

    def _start(self, selector: system.Selector, address: tuple[Any, ...]) -> None:
        inside = len(address) == 1
        family = socket.AF_UNIX if inside else family_of(address[0])
        try:
            wire = system.Socket(family, socket.SOCK_STREAM)
        except OSError as error:  # this host lacks the address family
            self._add_problem(address, error)
            return
        wire.setblocking(False)
        problem = wire.connect_ex(address[0] if inside else address)
        if problem in (0, errno.EINPROGRESS):
            selector.register(wire, EVENT_WRITE, (wire, address))
        else:
            wire.close()
            self._add_problem(address, OSError(problem, os.strerror(problem)))

    def _add_problem(self, address: tuple[Any, ...], error: OSError) -> None:
        self.pending -= 1
        self.problems[address[0]] = str(error)
