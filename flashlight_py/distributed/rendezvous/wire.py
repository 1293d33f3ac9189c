"""Connections between ranks: messages, and proofs that both know the run's secret.

A message is a header (magic, version, kind, length) and a body; nothing is unpickled. A connection
begins with a handshake. Client: a nonce. Server, such as rank 0: a nonce. Client: a proof made of
both nonces, and its greeting. Server: its own proof. Before the proof is checked, only lengths are
used; as a job may have no secret, no content of a greeting can do harm.
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
# Errors of a connection whose other end is silent and was not closed.
_UNREACHABLE = {errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN}
_PROBES = 5
_CHUNK_BYTES = 1 << 28  # read at a time at most
_SMALL_BYTES = 1 << 16  # a body up to this size is sent in one call with its header
PROOF_BYTES = 32
_UNPROVEN_LIMIT, _MEMBER_LIMIT = 4096, 1 << 40  # bytes of a message, without and with a proof
_HERE = ("127.0.0.1", 0)  # both ends of a connection inside a host, which has no addresses
LEAF = "leaf"  # in a greeting: no rank connects to its sender
_LONGEST_CONNECT = 5.0  # seconds after which hosts that do not answer are asked again
_NEXT_SECONDS = 0.25  # without an answer, until the next address is tried as well (RFC 8305)
# If one address refuses, rank 0 may not listen yet: other addresses get so many seconds more.
_REFUSED_SECONDS = 1.0


class Kind(enum.IntEnum):
    """The purpose of a message."""

    HELLO = 1  # client: its nonce
    WELCOME = 2  # server: its proof that it knows the secret; the client's was right
    PAYLOAD = 3  # upwards: all that the sender, and those below it, have to give in this round
    ROSTER = 4  # downwards: everybody's payload
    LATE = 5  # upwards: my time is up; downwards: show what you have; the round, as decimal text
    FAILURE = 6  # either, after WELCOME: why the run fails, or has no place for the client, as text
    GOODBYE = 7  # upwards: the sender, and those below it, leave
    CHALLENGE = 8  # server: its nonce
    PROOF = 9  # client: its proof that it knows the secret, and its greeting
    SECRET = 10  # server: the proof is none, made with another secret
    PLACE = 11  # server: where the client belongs, a ``Seat``
    PART = 12  # upwards: as PAYLOAD, and more may follow
    LOST = 13  # upwards: a rank, the one above it, as decimal text, and what has become of it


_KINDS = {int(kind): kind for kind in Kind}


class Packet(NamedTuple):
    kind: Kind
    body: bytes


class WireError(Exception):
    """The bytes that arrived are no message of this protocol."""


class Greeting(NamedTuple):
    """A client's rank, the world size that it was given, and its process.

    In a tree also its address and port for others, or ``LEAF``, and who was not there ``without``.
    """

    rank: int
    size: int
    peer: Peer
    at: str = ""
    without: int = ANY_RANK

    def pack(self) -> bytes:
        """Return lines of text."""
        lines = map(str, (self.rank, self.size, *self.peer, self.at, self.without))
        return "\n".join(lines).encode(errors="replace")

    @classmethod
    def parse(cls, text: bytes) -> Greeting | None:
        """Read what ``pack`` wrote; None if it is none. Unprintable characters are replaced."""
        try:
            rank, size, host, pid, machine, started, at, without = (
                "".join(char if char.isprintable() else "?" for char in word)
                for word in text.decode(errors="replace").split("\n")
            )
            peer = Peer(host, int(pid), machine, started)
            found = cls(int(rank), int(size), peer, at, int(without))
        except ValueError:
            return None
        return found if 0 <= found.rank < found.size < 1 << 31 else None


class Seat(NamedTuple):
    """The place of ``rank`` in the tree: below ``parent``, so many connections from rank 0.

    ``peer`` is the process of ``parent``, who listens at ``host`` and ``port``; "": it says so.
    """

    rank: int
    parent: int
    depth: int
    peer: str
    host: str = ""
    port: int = 0


# Pickled objects can run code on their receiver, so a rank that joins proves to know the secret. No
# TLS: no certificates to make and hand out, and no cost once connected.
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

    Raises OSError, and closes ``wire``, if the other end has hung up already.
    """

    def __init__(self, wire: system.Socket) -> None:
        try:
            self.is_local = wire.family == socket.AF_UNIX
            ends = wire.getpeername(), wire.getsockname()
            if self.is_local:
                ends = _HERE, _HERE
            else:
                wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError:
            wire.close()
            raise
        self.wire, self.address, self.here = wire, *map(plain, ends)
        self.ends = self.here[:2], self.address[:2]  # ours, and the other
        self.since = system.monotonic()
        self.handshake: Handshake | None = None
        self.rank: int | None = None  # the other's, once it is known to be a rank
        self.is_refused = False  # it has been sent its last message
        self.inbox: deque[Packet] = deque()  # what has arrived
        self.has_ended = False  # nothing more will
        self.is_unreachable = False  # has_ended, because nothing comes from the other host any more
        self._kind: Kind | None = None  # of the message whose body is arriving; None: its header is
        self._pieces, self._left = list[bytes](), _HEADER.size  # what is here, how much is not
        self._limit = _UNPROVEN_LIMIT
        self._unsent: deque[bytes | memoryview] = deque()  # what is left of messages

    def trust(self, host_timeout: float) -> None:
        """Accept long messages from now on; end if the other host is silent for so many seconds.

        0: do not end. The kernels ask and answer, whatever the processes do meanwhile.
        """
        self._limit = _MEMBER_LIMIT
        if host_timeout and not self.is_local:
            interval = max(1, int(host_timeout / _PROBES))
            self.wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in (
                (socket.TCP_KEEPIDLE, interval),
                (socket.TCP_KEEPINTVL, interval),
                (socket.TCP_KEEPCNT, _PROBES),
                (socket.TCP_USER_TIMEOUT, int(host_timeout * 1000)),
            ):
                self.wire.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, kind: Kind, body: bytes, deadline: float = 0.0) -> bool:
        """Send a message behind those that are left, as ``flush`` does."""
        self._unsent += _packed(kind, body)
        return self.flush(deadline)

    def flush(self, deadline: float = 0.0) -> bool:
        """Send what is left of messages; return whether nothing is any more.

        Waits until the deadline, a time of ``time.monotonic``, for the other end to take more.
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
            except OSError:  # the peer is gone; what it sent last may still be read
                self._unsent.clear()
        return not self._unsent

    def receive(self, timeout: float) -> None:
        """Take what arrives within ``timeout`` seconds; a message that is whole goes to the inbox.

        Nothing that follows a message is read with it. Raises WireError if it is no message of
        ours, or too long for a peer that has proven nothing.
        """
        self.wire.settimeout(max(0.001, timeout))
        try:
            data = self.wire.recv(min(_CHUNK_BYTES, self._left))
        except OSError as error:
            if isinstance(error, TimeoutError) and error.errno is None:  # ours, not the kernel's
                return
            self.is_unreachable = error.errno in _UNREACHABLE
            data = b""
        self.has_ended = not data
        self._pieces.append(data)
        self._left -= len(data)
        if self._kind is None:
            self._take_header()
        if self._kind is not None and self._left == 0:
            self.inbox.append(Packet(self._kind, b"".join(self._pieces)))
            self._kind, self._pieces, self._left = None, [], _HEADER.size

    def take(self, deadline: float) -> Packet | None:
        """Wait for a message and return it; None: the end, or time is up. Raises as ``receive``."""
        while not self.inbox and not self.has_ended:
            left = deadline - system.monotonic()
            if left <= 0:
                return None
            self.receive(left)
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

    def _take_header(self) -> None:
        head = b"".join(self._pieces)
        if not _MAGIC.startswith(head[: len(_MAGIC)]):
            raise WireError("no message of a flashlight_py rendezvous")
        if len(head) < _HEADER.size:
            return
        _, version, kind, length = _HEADER.unpack(head)
        if version != _VERSION:
            raise WireError(f"protocol version {version}, this process has {_VERSION}")
        if length > self._limit:
            raise WireError(f"a message of {length} bytes where at most {self._limit} are taken")
        if kind not in _KINDS:
            raise WireError(f"unknown kind of message {kind}")
        self._kind, self._pieces, self._left = _KINDS[kind], [], length


def _packed(kind: Kind, body: bytes) -> Sequence[bytes]:
    head = _HEADER.pack(_MAGIC, _VERSION, kind, len(body))
    return (head, body) if len(body) > _SMALL_BYTES else (head + body,)


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
    try:
        table = system.read_text("/proc/net/tcp6" if ":" in theirs[0] else "/proc/net/tcp")
    except OSError:  # there is no /proc
        return None
    for line in table.splitlines()[1:]:
        _, *ends, _, _, _, _, user, _, inode = line.split()[:10]
        if ends == wanted and inode != "0":
            return int(user)
    return None


def _in_hex(address: tuple[Any, ...]) -> str:
    """Return an address as net/tcp has it: words of 32 bits of the host's byte order."""
    host = address[0].partition("%")[0]
    packed = socket.inet_pton(family_of(host), host)
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return f"{''.join(f'{word:08X}' for word in words)}:{address[1]:04X}"


# How others reach rank 0 -------------------------------------------------------------------------


class Offer(NamedTuple):
    """Addresses where a rank 0 may listen, and the secret by which it is recognised."""

    addresses: Sequence[tuple[str, int]]
    secret: Secret
    run: str = ""  # its name
    who: str = ""  # made the offer
    advice: str = ""  # what to do where another program listens


class NobodyError(Exception):
    """There is no rank 0 at an address, or not yet; says why."""


class SilentError(NobodyError):
    """Somebody has accepted the connection and does not answer."""


class WrongServerError(NobodyError):
    """Somebody answers who is not the rank 0 that is meant."""


class SecretError(WrongServerError):
    """A rank 0 answers that knows another secret."""


# Of the problems with several addresses of one rank 0, the last of these kinds is raised: a silent
# rank 0, or one with another secret, exists; another program may listen at some address of ours.
_TELLING = (WrongServerError, NobodyError, SilentError, SecretError)


def greet(offer: Offer, introduce: Callable[[Connection], Greeting], deadline: float) -> Connection:
    """Connect to the rank of ``offer``; both sides prove that they know its secret.

    ``introduce`` returns what this rank says of itself on a connection. Raises NobodyError if
    nobody who knows the secret answers at any of the addresses before the deadline.
    """
    attempts = Attempts(offer.addresses)
    problems: list[NobodyError] = []
    for wire in attempts.connected(min(deadline, system.monotonic() + _LONGEST_CONNECT)):
        now = system.monotonic()
        try:
            return _greet_at(wire, offer, introduce, now + (deadline - now) / (attempts.left + 1))
        except NobodyError as error:
            problems.append(error)
    if attempts.problems or not problems:
        refused = "; ".join(f"{host}: {why}" for host, why in attempts.problems.items())
        problems.append(NobodyError(refused or "it has no address"))
    raise max(problems, key=lambda problem: _TELLING.index(type(problem)))


def _greet_at(
    wire: system.Socket, offer: Offer, introduce: Callable[[Connection], Greeting], deadline: float
) -> Connection:
    try:
        connection = Connection(wire)
    except OSError as error:
        raise NobodyError(str(error)) from error
    try:
        mine = nonce()
        challenge = _ask(connection, Kind.HELLO, mine, deadline, offer)
        if challenge.kind is not Kind.CHALLENGE or len(challenge.body) != NONCE_BYTES:
            raise WrongServerError(f"another program listens there{offer.advice}")
        handshake = Handshake(offer.secret.key(connection.address), mine, challenge.body)
        answer = handshake.of_client(introduce(connection).pack())
        welcome = _ask(connection, Kind.PROOF, answer, deadline, offer)
        is_proven = hmac.compare_digest(welcome.body, handshake.of_server())
        if welcome.kind is not Kind.WELCOME or not is_proven:
            ours = f"is from {offer.secret.source}" if handshake.key else "is missing"
            raise SecretError(
                f"the secrets differ: the listener there, as rank 0, does not know the secret of "
                f"this process, which {ours}; {REMEDY}"
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
        raise NobodyError("the listener there has hung up")
    raise SilentError("the listener there has not answered the greeting")


def claim(offer: Offer, size: int, seconds: float) -> str:
    """Greet the rank 0 of ``offer`` as another one; return why it has no place for us.

    "" if it is there and has not answered within ``seconds``. Raises as ``greet``.
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


# A name means 127.0.1.1 on its own host and perhaps an IPv6 address elsewhere: all are tried.
class Attempts:
    """Connections to ``addresses``: a host (an address or a name) and a port each.

    A host that begins with a NUL byte is a socket inside this host (unix(7): abstract).
    ``problems`` are the reasons, by address, why there is no connection.
    """

    def __init__(self, addresses: Iterable[tuple[str, int]]) -> None:
        self.problems: dict[str, str] = {}
        self._targets: deque[tuple[Any, ...]] = deque()
        for host, port in addresses:
            try:
                self._targets.extend([(host,)] if host[0] == "\0" else resolved(host, port))
            except OSError as error:  # noqa: PERF203 - each for itself
                self.problems[host] = str(error)
        self.left = len(self._targets)

    def connected(self, until: float) -> Iterator[system.Socket]:
        """Yield what connects before ``until``, a time of ``time.monotonic``, the first one first.

        Each is the caller's to close. ``left`` is how many addresses have not been heard of then.
        """
        due = system.monotonic()
        # All are tried in half of the time, however many do not answer.
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
                            self._failed(address, OSError(error, os.strerror(error)))
                            due = 0.0  # nobody is there: the next one need not wait
                            until = min(until, system.monotonic() + _REFUSED_SECONDS)
                            continue
                        self.left -= 1
                        wire.setblocking(True)
                        yield wire
                    if not ready and system.monotonic() >= until:
                        for key in selector.get_map().values():
                            self._failed(key.data[1], TimeoutError("timed out"))
                        return
            finally:
                for key in list(selector.get_map().values()):
                    key.data[0].close()

    def _start(self, selector: system.Selector, address: tuple[Any, ...]) -> None:
        inside = len(address) == 1
        family = socket.AF_UNIX if inside else family_of(address[0])
        try:
            wire = system.Socket(family, socket.SOCK_STREAM)
        except OSError as error:  # a family that this host does not have
            self._failed(address, error)
            return
        wire.setblocking(False)
        problem = wire.connect_ex(address[0] if inside else address)
        if problem in (0, errno.EINPROGRESS):
            selector.register(wire, EVENT_WRITE, (wire, address))
        else:
            wire.close()
            self._failed(address, OSError(problem, os.strerror(problem)))

    def _failed(self, address: tuple[Any, ...], error: OSError) -> None:
        self.left -= 1
        self.problems[address[0]] = str(error)
