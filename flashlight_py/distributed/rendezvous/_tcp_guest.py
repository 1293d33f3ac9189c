"""A rank other than 0 in a TCP rendezvous: connects, gives its payload, waits for all."""

from __future__ import annotations

import socket
import time

from flashlight_py.distributed.rendezvous._peers import have_not_come, this_process
from flashlight_py.distributed.rendezvous._tcp_greeting import Greeting, Handshake
from flashlight_py.distributed.rendezvous._tcp_wire import (
    Connection,
    Kind,
    Message,
    WireError,
    split_payloads,
)
from flashlight_py.distributed.rendezvous.secret import REMEDY, Secret, nonce
from flashlight_py.errors import RendezvousError

__all__ = ["TcpGuest"]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.01, 0.5
# A host that answers no connection request at all is asked anew after so many seconds.
_LONGEST_CONNECT = 5.0
# So long rank 0 may take to say who is missing, in seconds.
_ANSWER = 2.0


class TcpGuest:
    """A rank that connects to rank 0, in its first exchange."""

    def __init__(
        self, host: str, port: int, rank: int, size: int, timeout: float, secret: Secret
    ) -> None:
        self._secret = secret
        self._address, self.rank, self.size, self._timeout = (host, port), rank, size, timeout
        self._connection: Connection | None = None
        self._round = 0

    def exchange(self, payload: bytes) -> list[bytes]:
        """Give ``payload`` and return everybody's, in rank order."""
        deadline = time.monotonic() + self._timeout
        try:
            message = self._exchange(payload, deadline)
        except RendezvousError:
            self._disconnect()
            raise
        self._round += 1
        return split_payloads(message.body)

    def _exchange(self, payload: bytes, deadline: float) -> Message:
        if self._connection is None:
            self._connection = self._connect(deadline)
        connection = self._connection
        connection.send(Kind.PAYLOAD, payload, deadline)
        message = self._await(connection, deadline)
        if message is None:
            connection.send(Kind.LATE, str(self._round).encode(), deadline + _ANSWER)
            message = self._await(connection, time.monotonic() + _ANSWER)
        if message is None:
            raise self.error(have_not_come([0], self.size, self._timeout))
        return message

    # Connecting -------------------------------------------------------------------------------

    def _connect(self, deadline: float) -> Connection:
        """Connect and be welcomed, trying again until the deadline.

        Nobody may be listening yet, or a rank 0 that is just ending.
        """
        pause = _FIRST_PAUSE
        reason = "nobody answered"
        while time.monotonic() < deadline:
            try:
                connection = self._greet(deadline)
                if connection is not None:
                    return connection
                reason = "who listens there has not answered the greeting"
            except OSError as error:
                reason = str(error)
            time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
            pause = min(2 * pause, _LONGEST_PAUSE)
        raise self.error(
            f"{have_not_come([0], self.size, self._timeout)}: {reason}; see whether rank 0 was "
            "started, with the same MASTER_ADDR and MASTER_PORT, and can be reached from here"
        )

    def _greet(self, deadline: float) -> Connection | None:
        """Return a connection to a rank 0 that welcomes us; None if it hung up or was silent."""
        timeout = min(_LONGEST_CONNECT, max(0.001, deadline - time.monotonic()))
        wire = socket.create_connection(self._address, timeout)
        connection = Connection(wire, wire.getpeername())
        is_welcome = False
        try:
            is_welcome = self._shake_hands(connection, deadline)
        finally:
            if not is_welcome:
                connection.close()
        return connection if is_welcome else None

    def _shake_hands(self, connection: Connection, deadline: float) -> bool:
        """Prove that we know the secret, and have it proven; False if nobody answers."""
        mine = nonce()
        challenge = self._ask(connection, Kind.HELLO, mine, deadline)
        if challenge is None:
            return False
        if challenge.kind is not Kind.CHALLENGE or not Handshake.is_nonce(challenge.body):
            raise self.error("another program listens there; choose another MASTER_PORT")
        handshake = Handshake(self._secret.key(connection.address), mine, challenge.body)
        greeting = Greeting(self.rank, self.size, this_process()).pack()
        welcome = self._ask(connection, Kind.PROOF, handshake.of_guest(greeting), deadline)
        if welcome is None:
            return False
        if welcome.kind is not Kind.WELCOME or not handshake.check_host(welcome.body):
            mine_is = f"is from {self._secret.source}" if handshake.key else "is missing"
            raise self.error(
                f"the secrets differ: who listens there, as rank 0, does not know the secret of "
                f"this process, which {mine_is}; {REMEDY}"
            )
        connection.trust()
        return True

    def _ask(
        self, connection: Connection, kind: Kind, body: bytes, deadline: float
    ) -> Message | None:
        """Send a message and return the answer; None if there is none."""
        is_sent = connection.send(kind, body, deadline)
        return self._await_any(connection, deadline) if is_sent else None

    # Messages ---------------------------------------------------------------------------------

    def _await(self, connection: Connection, deadline: float) -> Message | None:
        """Return the next message; None at the deadline. Raises if rank 0 fails or has gone."""
        message = self._await_any(connection, deadline)
        if message is None and connection.has_ended:
            raise self.error(f"rank 0 of {self.size} has gone: it closed the connection")
        return message

    def _await_any(self, connection: Connection, deadline: float) -> Message | None:
        while not connection.inbox and not connection.has_ended:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            try:
                connection.receive(left)
            except WireError as error:
                raise self.error(
                    f"another program listens there ({error}); choose another MASTER_PORT"
                ) from error
        if not connection.inbox:
            return None
        message = connection.inbox.popleft()
        if message.kind is Kind.FAILURE:
            raise self.error(message.body.decode(errors="replace"))
        return message

    # The end ----------------------------------------------------------------------------------

    def leave(self) -> None:
        """Say goodbye to rank 0."""
        self._say(Kind.GOODBYE, b"")

    def give_up(self, reason: str) -> None:
        """Tell rank 0 the reason, which tells everybody."""
        self._say(Kind.FAILURE, reason.encode())

    def _say(self, kind: Kind, body: bytes) -> None:
        if self._connection is not None:
            self._connection.send(kind, body, time.monotonic() + _ANSWER)
        self._disconnect()

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def error(self, reason: str) -> RendezvousError:
        host, port = self._address
        where = f"rendezvous at {host}:{port}, rank {self.rank} of {self.size}"
        return RendezvousError(f"{where}: {reason}")
