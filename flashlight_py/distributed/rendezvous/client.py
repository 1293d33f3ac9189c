"""A rank other than 0: connects to rank 0, sends its payloads, receives everybody's."""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from flashlight_py.distributed.rendezvous.secret import REMEDY, nonce
from flashlight_py.distributed.rendezvous.sockets import resolved
from flashlight_py.distributed.rendezvous.store import (
    Waiting,
    cannot_be_reached,
    not_arrived,
    this_process,
)
from flashlight_py.distributed.rendezvous.wire import (
    CHUNK_BYTES,
    EMPTY_BYTES,
    Connection,
    Greeting,
    Handshake,
    Kind,
    Message,
    WireError,
    split_payloads,
)
from flashlight_py.errors import RendezvousError

if TYPE_CHECKING:
    from flashlight_py.distributed.rendezvous.place import MeetingPoint, Offer

# Between two looks for rank 0, in seconds: ranks that start together meet at once, and a long wait
# costs a file server ten requests a second.
FIRST_PAUSE, PAUSE_GROWTH, LONGEST_PAUSE = 0.002, 1.5, 0.1
# Hosts that answer no connection request at all are asked anew after so many seconds.
_LONGEST_CONNECT = 5.0
# So long rank 0 may take to report who is missing, in seconds.
_ANSWER = 2.0
# After so many seconds without an answer the next address is tried as well, as RFC 8305 says.
_NEXT_SECONDS = 0.25
# Where one address refuses, rank 0 may not be there yet: then those that do not answer get so many
# seconds more, and all are tried again.
_REFUSED_SECONDS = 1.0


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
        _shake_hands(connection, offer, greeting, deadline)
    except BaseException:
        connection.close()
        raise
    return connection


def _shake_hands(connection: Connection, offer: Offer, greeting: Greeting, deadline: float) -> None:
    mine = nonce()
    challenge = _ask(connection, Kind.HELLO, mine, deadline, offer)
    if challenge.kind is not Kind.CHALLENGE or not Handshake.is_nonce(challenge.body):
        raise WrongServerError(f"another program listens there{offer.advice}")
    handshake = Handshake(offer.secret.key(connection.address), mine, challenge.body)
    answer = handshake.of_client(greeting.pack())
    welcome = _ask(connection, Kind.PROOF, answer, deadline, offer)
    if welcome.kind is not Kind.WELCOME or not handshake.check_server(welcome.body):
        ours = f"is from {offer.secret.source}" if handshake.key else "is missing"
        raise SecretError(
            f"the secrets differ: who listens there, as rank 0, does not know the secret of this "
            f"process, which {ours}; {REMEDY}"
        )


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
        connection.close()
    has_failed = answer is not None and answer.kind is Kind.FAILURE
    return answer.body.decode(errors="replace") if answer and has_failed else ""


class Client:
    """A rank that connects to rank 0, in its first exchange."""

    def __init__(self, place: MeetingPoint) -> None:
        self._place = place
        self._greeting = Greeting(place.rank, place.size, this_process())
        self._connection: Connection | None = None
        self._round, self._problem = 0, ""

    def exchange(self, payload: bytes) -> list[bytes]:
        """Send ``payload`` and return everybody's, in rank order."""
        deadline = time.monotonic() + self._place.timeout
        try:
            message = None
            while message is None:
                message = self._exchange(payload, deadline)
        except RendezvousError:
            self._disconnect()
            raise
        self._round += 1
        return split_payloads(message.body)

    def connections(self) -> dict[int, Connection]:
        """Return that to rank 0, if there is one."""
        return {} if self._connection is None else {0: self._connection}

    def _exchange(self, payload: bytes, deadline: float) -> Message | None:
        """Return what rank 0 sends; None: it has died, and another one may take its place."""
        if self._connection is None:
            self._connection = self._connect(deadline)
        connection = self._connection
        connection.send(Kind.PAYLOAD, payload, deadline)
        message = self._take(connection, deadline)
        if message is None and not connection.has_ended:
            connection.send(Kind.LATE, str(self._round).encode(), time.monotonic() + _ANSWER)
            message = self._take(connection, time.monotonic() + _ANSWER)
            if message is None and not connection.has_ended:
                raise self._place.error(not_arrived([0], self._place.size, self._place.timeout))
        if message is None:
            self._disconnect()
            if connection.is_unreachable:
                who = f"rank 0 of {self._place.size}"
                raise self._place.error(cannot_be_reached(who, self._place.host_timeout))
            if self._round > 0 or not self._place.moves:
                raise self._place.error(
                    f"rank 0 of {self._place.size} has died or exited: it closed the connection"
                )
        return message

    def _take(
        self, connection: Connection, deadline: float, most: int = CHUNK_BYTES
    ) -> Message | None:
        """Return the next message; None at the deadline. Raises if rank 0 reports a failure."""
        try:
            message = connection.take(deadline, most)
        except WireError as error:
            raise self._place.error(f"rank 0 has sent what is no message: {error}") from error
        if message is not None and message.kind is Kind.FAILURE:
            raise self._place.error(message.body.decode(errors="replace"))
        return message

    def _connect(self, deadline: float) -> Connection:
        """Connect and be welcomed, trying again until the deadline.

        Nobody may be listening yet, or a rank 0 that is just ending.
        """
        pause = FIRST_PAUSE
        waiting = Waiting(True, f"rendezvous at {self._place.name}", self._place.first_report)
        try:
            while (now := time.monotonic()) < deadline:
                for offer in self._place.offers():
                    connection = self._greet(offer, deadline)
                    if connection is not None:
                        connection.trust(self._place.host_timeout)
                        return connection
                # That rank 0 is merely late, it says itself once it is there.
                says = self._problem or self._place.first_report is not None
                waiting.look([0] if says else [], self._problem)
                time.sleep(max(0.0, min(pause, deadline - now)))
                pause = min(pause * PAUSE_GROWTH, LONGEST_PAUSE)
        finally:
            self._place.clear()
        missing = not_arrived([0], self._place.size, self._place.timeout)
        raise self._place.error(f"{missing}{self._problem}; {self._place.remedy()}")

    def _greet(self, offer: Offer, deadline: float) -> Connection | None:
        until = min(deadline, time.monotonic() + self._place.patience)
        try:
            connection = greet(offer, self._greeting, until)
        except NobodyError as error:
            if isinstance(error, WrongServerError) and not self._place.moves:
                raise self._place.error(str(error)) from error
            self._problem = f": {offer.who}{error}"
            self._place.failed(offer)
            return None
        self._place.secret = offer.secret.common
        return connection

    # The end --------------------------------------------------------------------------------------

    def hand_over(self) -> dict[int, socket.socket]:
        """Take leave of rank 0, and return the connection to it."""
        connection, self._connection = self._connection, None
        assert connection
        deadline = time.monotonic() + self._place.timeout
        connection.send(Kind.GOODBYE, b"", deadline)
        try:
            if self._take(connection, deadline, EMPTY_BYTES) is None:
                raise self._place.error(not_arrived([0], self._place.size, self._place.timeout))
        except BaseException:
            connection.close()
            raise
        connection.wire.setblocking(True)
        return {0: connection.wire}

    def leave(self) -> None:
        """Take leave of rank 0."""
        self._send_last(Kind.GOODBYE, b"")

    def abort(self, reason: str) -> None:
        """Report the reason to rank 0, which notifies everybody."""
        self._send_last(Kind.FAILURE, reason.encode())

    def _send_last(self, kind: Kind, body: bytes) -> None:
        if self._connection is not None:
            self._connection.send(kind, body, time.monotonic() + _ANSWER)
        self._disconnect()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None


class Attempts:
    """Connections to ``addresses``, hosts and ports, a host being an address or a name.

    ``problems`` are why there is none to an address, by the address, in words.
    """

    def __init__(self, addresses: Iterable[tuple[str, int]]) -> None:
        self.problems: dict[str, str] = {}
        self._targets: deque[tuple[socket.AddressFamily, tuple[Any, ...]]] = deque()
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
                self._start(selector, *self._targets.popleft())
                due = now + pause
                continue
            ready = selector.select(min(until, due if self._targets else until) - now)
            for key, _ in ready:
                assert isinstance(key.fileobj, socket.socket)
                selector.unregister(key.fileobj)
                wire, error = (
                    key.fileobj,
                    key.fileobj.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR),
                )
                if error:
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

    def _start(
        self,
        selector: selectors.BaseSelector,
        family: socket.AddressFamily,
        address: tuple[Any, ...],
    ) -> None:
        try:
            wire = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:  # a family that this host does not have
            self._failed(address, error)
            return
        wire.setblocking(False)
        try:
            wire.connect(address)
        except BlockingIOError:
            pass
        except OSError as error:
            wire.close()
            self._failed(address, error)
            return
        selector.register(wire, selectors.EVENT_WRITE, address)

    def _failed(self, address: tuple[Any, ...], error: OSError) -> None:
        self.left -= 1
        self.problems[address[0]] = str(error)
