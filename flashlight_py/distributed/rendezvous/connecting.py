"""Connections for a rendezvous: where rank 0 listens, how others reach it, and their greeting."""

from __future__ import annotations

import errno
import hmac
import ipaddress
import os
import selectors
import socket
import stat
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from flashlight_py.distributed.rendezvous.secret import NONCE_BYTES, REMEDY, Secret, nonce
from flashlight_py.distributed.rendezvous.wire import (
    Connection,
    Greeting,
    Handshake,
    Kind,
    Message,
    WireError,
)
from flashlight_py.interfaces import family_of, is_loopback, is_own, listen_everywhere

LISTENER = "FLASHLIGHT_LISTENER"
"""The environment variable with the descriptor of a socket that listens at MASTER_PORT already."""
LOOPBACK = "127.0.0.1"
# Hosts that answer no connection request at all are asked anew after so many seconds.
_LONGEST_CONNECT = 5.0
# After so many seconds without an answer the next address is tried as well, as RFC 8305 says.
_NEXT_SECONDS = 0.25
# Where one address refuses, rank 0 may not be there yet: then those that do not answer get so many
# seconds more, and all are tried again.
_REFUSED_SECONDS = 1.0


# Rank 0 ------------------------------------------------------------------------------------------


def listen(host: str, port: int, backlog: int, one_host: bool) -> list[socket.socket]:
    """Return sockets that listen at ``port`` for who reaches this host as ``host``; to be closed.

    At an address, on the loopback, and where all ranks are on ``one_host``, they listen at nothing
    but what ``host`` means here. What another host takes a name for, only that host knows: then
    they listen at all addresses, of both families.

    Raises:
        OSError: ``host`` is not this host, or the port is in use; says what to do.
    """
    listener = _handed_over(port)
    if listener is not None:
        return [listener]
    try:
        found = resolved(host, port)
    except OSError as error:
        raise OSError(f"cannot resolve MASTER_ADDR: {error}") from error
    try:
        if one_host or is_local(host) or _is_address(host):
            return _listen_at(found, backlog)
        if any(is_own(address[0], address[2:]) for address in found):
            return [listen_everywhere(port, backlog)]
        raise OSError(errno.EADDRNOTAVAIL, "")
    except OSError as error:
        raise OSError(_explain_bind(error)) from error


def _listen_at(addresses: Sequence[tuple[Any, ...]], backlog: int) -> list[socket.socket]:
    """Listen at those of ``addresses`` that are this host's."""
    listeners, problem = [], OSError(errno.EADDRNOTAVAIL, "")
    for address in addresses:
        try:
            # It sets SO_REUSEADDR, without which the port of a run that has just ended would stay
            # blocked for a minute.
            family = family_of(address[0])
            listeners.append(socket.create_server(address, family=family, backlog=backlog))
        except OSError as error:  # noqa: PERF203 - each for itself
            problem = error
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                for listener in listeners:
                    listener.close()
                raise
    if not listeners:
        raise problem
    return listeners


def resolved(host: str, port: int) -> list[tuple[Any, ...]]:
    """Return the socket addresses that ``host`` means here.

    Raises:
        OSError: it means none.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:  # of a name that cannot be one
        raise OSError(str(error)) from error
    return list(dict.fromkeys(address for *_, address in found))


def _is_address(host: str) -> bool:
    """Return whether ``host`` is an address, not a name."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def is_local(host: str) -> bool:
    """Return whether ``host``, a name or an address, means each host itself, wherever it is."""
    return host == "localhost" or (_is_address(host) and is_loopback(host.partition("%")[0]))


def _handed_over(port: int) -> socket.socket | None:
    """Return a copy of the socket that the launcher has handed over, if there is one for ``port``.

    A copy, so that the port stays ours for a later ``distributed_init``. A process that inherited
    the variable alone has some other file under that number, or none.
    """
    text = os.environ.get(LISTENER, "")
    descriptor = int(text) if text.isdecimal() else -1
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return None
    except OSError:
        return None
    listener = socket.socket(fileno=os.dup(descriptor))
    is_listening = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    if is_listening and listener.getsockname()[1:2] == (port,):
        os.set_inheritable(descriptor, False)
        return listener
    listener.close()
    return None


def _explain_bind(error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            "the port is in use, by another program or by a second rank 0; "
            "choose another MASTER_PORT for every rank"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            "MASTER_ADDR is no address of this host, where rank 0 runs; "
            "set it to one that the other hosts can reach"
        )
    return f"cannot listen: {os.strerror(error.errno or 0)}; choose another MASTER_PORT"


# The others --------------------------------------------------------------------------------------


class Offer(NamedTuple):
    """Addresses where a rank 0 may listen, and the secret by which it is recognised.

    ``run`` names its run, ``who`` says who made the offer, and ``advice`` what to do where another
    program listens.
    """

    addresses: Sequence[tuple[str, int]]
    secret: Secret
    run: str = ""
    who: str = ""
    advice: str = ""


class NobodyError(Exception):
    """There is no rank 0 at an address, or not yet; says why."""


class SilentError(NobodyError):
    """Somebody has accepted the connection and does not answer."""


class WrongServerError(NobodyError):
    """Somebody answers who is not the rank 0 that is meant."""


class SecretError(WrongServerError):
    """A rank 0 answers that knows another secret."""


# Of the problems with several addresses of one rank 0 the last of these kinds is raised: where it
# was silent, or knows another secret, it is there; another program may be at some address of ours.
_TELLING = (WrongServerError, NobodyError, SilentError, SecretError)


def greet(offer: Offer, greeting: Greeting, deadline: float) -> Connection:
    """Connect to the rank 0 of ``offer``; both sides prove that they know its secret.

    Raises:
        NobodyError: nobody who does answers at any of its addresses before the deadline.
    """
    attempts = Attempts(offer.addresses)
    problems: list[NobodyError] = []
    now = time.monotonic()
    for wire in attempts.connected(min(deadline, now + _LONGEST_CONNECT)):
        now = time.monotonic()
        try:
            return _greet_at(wire, offer, greeting, now + (deadline - now) / (attempts.left + 1))
        except NobodyError as error:
            problems.append(error)
    if attempts.problems or not problems:
        refused = "; ".join(f"{host}: {why}" for host, why in attempts.problems.items())
        problems.append(NobodyError(refused or "it has no address"))
    raise max(problems, key=lambda problem: _TELLING.index(type(problem)))


def _greet_at(wire: socket.socket, offer: Offer, greeting: Greeting, deadline: float) -> Connection:
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
        answer = handshake.of_client(greeting.pack())
        welcome = _ask(connection, Kind.PROOF, answer, deadline, offer)
        is_proven = hmac.compare_digest(welcome.body, handshake.of_server())
        if welcome.kind is not Kind.WELCOME or not is_proven:
            ours = f"is from {offer.secret.source}" if handshake.key else "is missing"
            raise SecretError(
                f"the secrets differ: who listens there, as rank 0, does not know the secret of "
                f"this process, which {ours}; {REMEDY}"
            )
    except BaseException:
        connection.wire.close()
        raise
    return connection


def _ask(connection: Connection, kind: Kind, body: bytes, deadline: float, offer: Offer) -> Message:
    connection.send(kind, body, deadline)
    try:
        message = connection.take(deadline)
    except WireError as error:
        raise WrongServerError(f"another program listens there ({error}){offer.advice}") from error
    if message is not None:
        return message
    if connection.has_ended:
        raise NobodyError("who listens there has hung up")
    raise SilentError("who listens there has not answered the greeting")


def claim(offer: Offer, greeting: Greeting, deadline: float) -> str:
    """Greet the rank 0 of ``offer`` as another one; returns why it has no place for us.

    "": it has not answered before the deadline, but it is there.

    Raises:
        NobodyError: as ``greet``.
    """
    connection = greet(offer, greeting, deadline)
    try:
        answer = connection.take(deadline)
    except WireError as error:
        raise WrongServerError(str(error)) from error
    finally:
        connection.wire.close()
    has_failed = answer is not None and answer.kind is Kind.FAILURE
    return answer.body.decode(errors="replace") if answer and has_failed else ""


class Attempts:
    """Connections to ``addresses``, hosts and ports, a host being an address or a name.

    ``problems`` are why there is none to an address, by the address, in words.
    """

    def __init__(self, addresses: Iterable[tuple[str, int]]) -> None:
        self.problems: dict[str, str] = {}
        self._targets: deque[tuple[Any, ...]] = deque()
        for host, port in addresses:
            try:
                self._targets.extend(resolved(host, port))
            except OSError as error:  # noqa: PERF203 - each for itself
                self.problems[host] = str(error)
        self.left = len(self._targets)

    def connected(self, until: float) -> Iterator[socket.socket]:
        """Yield what connects before ``until``, a time of ``time.monotonic``, the first one first.

        Each is the caller's to close. ``left`` is how many addresses have not been heard of then.
        """
        with selectors.DefaultSelector() as selector:
            try:
                yield from self._race(selector, until)
            finally:
                for key in list(selector.get_map().values()):
                    assert isinstance(key.fileobj, socket.socket)
                    key.fileobj.close()

    def _race(self, selector: selectors.BaseSelector, until: float) -> Iterator[socket.socket]:
        due = time.monotonic()
        # All are tried in half of the time, however many do not answer.
        pause = min(_NEXT_SECONDS, (until - due) / (2 * max(1, len(self._targets))))
        while self._targets or selector.get_map():
            now = time.monotonic()
            if self._targets and (now >= due or not selector.get_map()):
                self._start(selector, self._targets.popleft())
                due = now + pause
                continue
            ready = selector.select(min(until, due if self._targets else until) - now)
            for key, _ in ready:
                wire = key.fileobj
                assert isinstance(wire, socket.socket)
                selector.unregister(wire)
                if error := wire.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    wire.close()
                    self._failed(key.data, OSError(error, os.strerror(error)))
                    due = 0.0  # nobody is there: the next one need not wait
                    until = min(until, time.monotonic() + _REFUSED_SECONDS)
                    continue
                self.left -= 1
                wire.setblocking(True)
                yield wire
            if not ready and time.monotonic() >= until:
                for key in selector.get_map().values():
                    self._failed(key.data, TimeoutError("timed out"))
                return

    def _start(self, selector: selectors.BaseSelector, address: tuple[Any, ...]) -> None:
        try:
            wire = socket.socket(family_of(address[0]), socket.SOCK_STREAM)
        except OSError as error:  # a family that this host does not have
            self._failed(address, error)
            return
        wire.setblocking(False)
        problem = wire.connect_ex(address)
        if problem in (0, errno.EINPROGRESS):
            selector.register(wire, selectors.EVENT_WRITE, address)
        else:
            wire.close()
            self._failed(address, OSError(problem, os.strerror(problem)))

    def _failed(self, address: tuple[Any, ...], error: OSError) -> None:
        self.left -= 1
        self.problems[address[0]] = str(error)
