"""The admission check of a rank: a connecting process must prove that it belongs to the run.

This module also finds the position of this rank in the tree. One rank of each host, the speaker,
asks rank 0 for a parent and connects to this parent. The other ranks of the host connect to the
speaker by a local socket. ``MeetingPoint`` defines where rank 0 listens.
"""

import abc
import errno
import itertools
import json
import logging
import math
import socket
from collections.abc import Iterable
from functools import cached_property, partial
from selectors import EVENT_READ, EVENT_WRITE

from flashlight_py import system
from flashlight_py.distributed.rendezvous import store, wire
from flashlight_py.distributed.rendezvous.secret import NONCE_BYTES, REMEDY, Secret, nonce, proof
from flashlight_py.errors import RendezvousError
from flashlight_py.interfaces import family_of

# Seconds between attempts to find rank 0: the first pause, its growth factor, the longest pause.
# With the longest pause, a waiting rank sends a file server ten requests a second.
FIRST_PAUSE, PAUSE_GROWTH, LONGEST_PAUSE = 0.002, 1.5, 0.1
_BUSY_SECONDS = 0.001  # a wait for rank 0 takes these seconds longer for each rank
# Seconds to wait for the assigned parent (plus one second per tree level), and for a silent rank 0
# after the loss of a parent.
_PARENT_SECONDS, _LOST_SECONDS = 5.0, 6.0
SHORT_SECONDS = 2.0  # seconds to send a short message, or to read why a rank failed
_SPARE_CANDIDATES = 64  # maximum of open connections without proof, minus the number of ranks
# In a tree: maximum number of connections without proof. After ``_CANDIDATE_SECONDS``, such a
# connection may be dropped for a new one. The kernel queues further connections.
_TREE_CANDIDATES, _CANDIDATE_SECONDS = 40, 1.0
_MAX_NAMED = 8  # Maximum number of hosts with rejected processes in an error
TREE_FROM = "FLASHLIGHT_TREE_FROM"
"""Environment variable: minimum number of ranks for a rendezvous in a tree."""
_log = logging.getLogger("flashlight_py")


class MeetingPoint(store.Store):
    """A store whose ranks connect to rank 0. Subclasses define where and how rank 0 listens."""

    timeout: float  # Seconds for each exchange
    name: str  # name for messages
    kind: str  # "path" or "address", for messages
    run_option: str  # name of the option that must differ between runs
    job_secret: Secret  # secret that clients of rank 0 must know
    is_common = False  # True: a process of this user with another secret makes the run fail
    can_move = False  # True: during the rendezvous, a new rank 0 may replace a dead one
    patience = math.inf  # seconds that a client waits for rank 0's answer at an offered address
    next_poll = math.inf  # time of the next call of ``poll`` (``time.monotonic``)
    note = ""  # text that rank 0 adds to its log messages about missing ranks
    local_rank: int | None = None  # rank on this host; None: unknown

    @cached_property
    def is_tree(self) -> bool:
        """Whether ranks meet in a tree with one speaker per host. Equal on all ranks."""
        text = system.environ.get(TREE_FROM, "64")
        if not text.isdecimal():
            raise self.error(f"{TREE_FROM} must be a number of ranks, got {text!r}")
        return self.size >= int(text)

    @abc.abstractmethod
    def remedy(self) -> str:
        """Return a remedy for ranks that have not joined."""

    @abc.abstractmethod
    def listen(self, backlog: int) -> list[system.Socket]:
        """Return the sockets on which rank 0 listens, or raise OSError with the reason."""

    def poll(self) -> system.Socket | None:
        """Do periodic work of rank 0 during the rendezvous. Return a new listener, or None.

        Raises RendezvousError if there is another rank 0, or the meeting point has become unusable.
        """

    @abc.abstractmethod
    def offers(self) -> Iterable[wire.Offer]:
        """Return the possible addresses of rank 0, the likeliest first."""

    def failed(self, offer: wire.Offer) -> None:
        """Record that no rank 0 answered at ``offer``."""

    def clear(self) -> None:
        """Remove the traces of this rank, such as files."""

    def error(self, reason: str) -> RendezvousError:
        """Return an error that begins with the name of this rank and ends with ``reason``."""
        prefix = f"rendezvous at {self.name}, rank {self.rank} of {self.size}"
        return RendezvousError(f"{prefix}: {reason}")


class Gate(abc.ABC):
    """A rank that finds its position in the tree, and listens for other ranks during its calls.

    Between calls, the kernel accepts connections and stores their data; there is no thread. A
    connection is a candidate until it has proven to be a rank and has a position.
    """

    def __init__(self, point: MeetingPoint) -> None:
        self._point, self._size = point, point.size
        self._secret: Secret = point.job_secret  # secret of ranks that connect to this rank
        self.selector = system.Selector()
        self._listeners: list[system.Socket] = []
        self._backlog = self._size + _SPARE_CANDIDATES
        self._is_open = True  # whether the selector watches the listeners
        self._candidates: list[wire.Connection] = []
        self._rejected_hosts: set[str] = set()  # hosts of processes with another secret
        self._round = 0
        self._verdict = ""  # why this run has failed, or ""
        self._notified: set[int] = set()  # ranks that were sent the verdict
        self._up: wire.Connection | None = None  # connection to the parent, if there is one
        self._process = store.this_process()
        self._position = wire.Position(point.rank, 0, 0, str(self._process))
        self._lost_parent = store.ANY_RANK  # rank of a parent that was lost; ANY_RANK: none
        self._loss = ""  # why the parent was lost, or ""
        self._problem = ""  # why the assigned parent was not reached, or ""
        self._deadline = math.inf
        self._host, self._is_speaker = "", False  # "": no address for other hosts yet

    @abc.abstractmethod
    def _failure(self, reason: str, joining: bool = False) -> RendezvousError:
        """Notify parent and children of ``reason``; return the error. See ``TreeNode._failure``."""

    @abc.abstractmethod
    def _admit(self, candidate: wire.Connection, greeting: wire.Greeting) -> None:
        """Assign a position to a process that knows the secret, or reject it with a reason."""

    @abc.abstractmethod
    def _handle_messages(self, connection: wire.Connection) -> None:
        """Handle messages of a rank. If ``connection`` has ended, handle its end as well."""

    def _listen(self, listener: system.Socket) -> None:
        listener.setblocking(False)
        self._listeners.append(listener)
        self.selector.register(listener, EVENT_READ, listener)

    def _serve(self, deadline: float) -> bool:
        """Handle events until ``deadline``; return whether an event occurred."""
        seconds = max(0.0, deadline - system.monotonic())
        if self._point.is_tree:
            seconds = min(seconds, self._open_or_close())
        ready = self.selector.select(seconds)
        for key, mask in ready:
            if not isinstance(key.data, wire.Connection):
                self._accept(key.data)
            elif key.data.wire.fileno() >= 0:  # the connection may be closed
                if mask & EVENT_WRITE and key.data.flush():
                    self.selector.modify(key.data.wire, EVENT_READ, key.data)
                if mask & EVENT_READ:
                    self._receive(key.data)
        return bool(ready)

    def _open_or_close(self) -> float:
        """While there are too many candidates, accept none; return the seconds until a change."""
        is_full = len(self._candidates) >= _TREE_CANDIDATES and self._round == 0
        oldest = self._candidates[0] if is_full else None
        left = oldest.since + _CANDIDATE_SECONDS - system.monotonic() if oldest else 0.0
        if self._is_open != (left <= 0.0):
            self._is_open = not self._is_open
            for listener in self._listeners:
                if self._is_open:
                    self.selector.register(listener, EVENT_READ, listener)
                else:
                    self.selector.unregister(listener)
        return left if left > 0.0 else 1e9

    def _accept(self, listener: system.Socket) -> None:
        limit = _TREE_CANDIDATES if self._point.is_tree else self._backlog
        try:
            connection = wire.Connection(listener.accept()[0])
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and self._candidates:
                self._drop(self._candidates[0])
            return  # the client hung up, or a later call accepts it
        self.selector.register(connection.wire, EVENT_READ, connection)
        self._candidates.append(connection)
        if len(self._candidates) > limit:
            self._drop(self._candidates[0])

    def _receive(self, connection: wire.Connection) -> None:
        try:
            connection.receive(0.0)
            if connection.is_rejected:
                connection.inbox.clear()
            elif connection.rank is None and connection.inbox:
                self._greet(connection)
        except wire.WireError as error:
            self._handle_invalid(connection, error)
            return
        if connection.rank is not None:
            self._handle_messages(connection)
        elif connection.has_ended:
            self._drop(connection)

    def _handle_invalid(self, connection: wire.Connection, error: wire.WireError) -> None:
        who = f"rendezvous at {self._point.name}: dropped a connection of"
        _log.info("%s %s: %s", who, connection.address[0], error)
        self._drop(connection)

    def _drop(self, connection: wire.Connection) -> None:
        if connection in self._candidates:
            self._candidates.remove(connection)
        if connection.wire in self.selector.get_map():
            self.selector.unregister(connection.wire)
        connection.wire.close()

    def _greet(self, candidate: wire.Connection) -> None:
        """Handle a message of ``candidate``. Raises WireError if it is no valid greeting."""
        kind, body = candidate.inbox.popleft()
        if kind is wire.Kind.HELLO and candidate.handshake is None and len(body) == NONCE_BYTES:
            own_nonce, key = nonce(), self._secret.key(candidate.address)
            candidate.handshake = wire.Handshake(key, body, own_nonce)
            candidate.send(wire.Kind.CHALLENGE, own_nonce, system.monotonic() + SHORT_SECONDS)
            return
        if kind is not wire.Kind.PROOF or candidate.handshake is None:
            raise wire.WireError("expected a greeting")
        greeting = wire.Greeting.parse(body[wire.PROOF_BYTES :])
        if greeting is None:
            raise wire.WireError("the greeting is invalid")
        if candidate.handshake.check_client(body):
            welcome = candidate.handshake.server_proof()
            candidate.send(wire.Kind.WELCOME, welcome, system.monotonic() + SHORT_SECONDS)
            self._admit(candidate, greeting)
        else:
            self._reject_secret(candidate, greeting)

    def _reject_secret(self, candidate: wire.Connection, greeting: wire.Greeting) -> None:
        """Reject a process with another secret. Raise if ``is_common`` and this user started it."""
        if not self._point.is_common:  # the process may belong to an earlier run
            self._reject(candidate, wire.Kind.SECRET, "")
            return
        # Find the user before the rejection: afterwards the client closes its socket.
        host = candidate.address[0]
        user = wire.socket_user(candidate.address, candidate.local_address)
        self._reject(candidate, wire.Kind.SECRET, "")
        reason = (
            f"the secrets differ: a process on {host}, as rank {greeting.rank} ({greeting.peer}), "
            f"has another secret than rank 0, whose secret comes from {self._secret.source}"
        )
        if user == system.user_id() and self._round == 0 and not self._verdict:
            raise self._disagreement(f"{reason}; {REMEDY}", greeting.rank, candidate)
        if host not in self._rejected_hosts and len(self._rejected_hosts) < _MAX_NAMED:
            self._rejected_hosts.add(host)
            _log.warning("rendezvous at %s: %s. It was rejected", self._point.name, reason)

    def _reject(self, candidate: wire.Connection, kind: wire.Kind, text: str) -> None:
        """Send ``text`` as the final message to ``candidate``, which reads it and hangs up."""
        candidate.send(kind, text.encode(), system.monotonic() + SHORT_SECONDS)
        candidate.is_rejected = True
        candidate.shut()

    def _disagreement(self, reason: str, rank: int, culprit: wire.Connection) -> RendezvousError:
        """Reject ``culprit`` (``rank``) and notify all ranks; return the error to raise."""
        self._notified.add(rank)
        if not culprit.is_rejected:
            self._reject(culprit, wire.Kind.FAILURE, reason)
        return self._failure(reason, joining=True)

    def _join(self) -> None:
        """Find this rank's position; retry until the deadline.

        If the speaker of this host does not appear in time, this rank becomes a speaker.
        """
        point, pause, problem = self._point, FIRST_PAUSE, ""
        is_first = self._round == 0  # in later rounds the address of rank 0 is known
        waiting = store.Waiting(f"rendezvous at {point.name}")
        speaks_from = system.monotonic()
        has_speaker = point.is_tree and system.IS_LINUX and bool(point.local_rank)
        if has_speaker and not self._loss:
            speaks_from += min(store.FIRST_SECONDS, point.timeout / 8)
        try:
            while (now := system.monotonic()) < self._deadline:
                goes_inside = has_speaker and not self._is_speaker
                inside_first = [True] if now < speaks_from else [False, True][: 1 + goes_inside]
                offers = point.offers() if is_first else [self._offer]
                for offer, is_inside in itertools.product(offers, inside_first):
                    try:
                        if self._reach(offer, max(speaks_from, now + 1.0) if is_inside else 0.0):
                            return
                    except wire.NoServerError as error:  # noqa: PERF203 - one for each
                        if is_inside:
                            continue
                        problem = f": {offer.source}{error}"
                        if isinstance(error, wire.WrongServerError) and not point.can_move:
                            raise self._failure(str(error)) from error
                        if is_first:
                            point.failed(offer)
                        had_parent = self._loss or self._problem
                        if had_parent and is_first and not point.can_move:  # the run has failed
                            if not isinstance(error, wire.SilentError):
                                self._problem = "the run has failed, and other ranks report why"
                                self._deadline = now
                            self._deadline = min(self._deadline, speaks_from + _LOST_SECONDS)
                # Report rank 0 only: after its start, rank 0 itself reports other missing ranks.
                waiting.log_missing([0] if problem else [], problem)
                system.sleep(max(0.0, min(pause, self._deadline - now)))
                pause = min(pause * PAUSE_GROWTH, LONGEST_PAUSE)
        finally:
            point.clear()
        missing = self._loss or self._problem or store.missing_text([0], self._size, point.timeout)
        raise self._failure(f"{missing}{problem}; {point.remedy()}", joining=True)

    def _reach(self, offer: wire.Offer, inside: float = 0.0, patience: float = 0.0) -> bool:
        """Greet rank 0 and connect to the assigned parent; return whether the parent answered.

        If ``inside`` is set, connect to the speaker of this host instead, until the time
        ``inside``. If ``patience`` is set, ``offer`` is the assigned parent: connect to it, for at
        most ``patience`` seconds. Raises NoServerError if no process with the secret answers.
        """
        point, is_asking = self._point, not (inside or patience)
        if inside:
            offer = offer._replace(addresses=[(self._local_socket_name(offer.secret), 0)])
        busy = self._size * _BUSY_SECONDS if point.is_tree else 0.0
        until = system.monotonic() + (patience or point.patience) + busy
        until = min(self._deadline, inside or until)
        if is_asking and offer.secret is point.job_secret:  # listen before rank 0 answers
            self._become_speaker(offer.secret)
        connection = wire.greet(offer, partial(self._make_greeting, is_asking=is_asking), until)
        point.secret = offer.secret.common
        connection.trust(point.host_timeout)
        if is_asking:
            point.ends, self._offer = {0: connection.ends}, offer
            self._become_speaker(offer.secret)
        try:
            message = connection.take(until)
        except wire.WireError as error:
            self._handle_invalid(connection, error)
            raise wire.NoServerError(str(error)) from error
        if message is None or message.kind is not wire.Kind.POSITION:
            connection.wire.close()
            if message is not None:
                prefix = f"{self._loss}; " if self._loss else ""
                reason = message.body.decode(errors="replace")
                raise self._failure(f"{prefix}{reason}", joining=True)
            raise wire.NoServerError("the listener closed the connection, or sent no position")
        position = wire.Position(*json.loads(message.body))
        if not position.host:
            self._up, self._position, self._lost_parent = connection, position, store.ANY_RANK
            self._loss = self._problem = ""
            connection.rank = position.parent
            self.selector.register(connection.wire, EVENT_READ, connection)
            return True
        try:
            parent_offer = wire.Offer([(position.host, position.port)], offer.secret)
            return self._reach(parent_offer, patience=_PARENT_SECONDS + position.depth)
        except wire.NoServerError as error:
            self._lost_parent, address = position.parent, f"{position.host}:{position.port}"
            who = f"rank {position.parent} of {self._size} ({position.peer})"
            self._problem = f"{who} does not answer at {address}, where rank 0 sees it: {error}"
            return False
        finally:
            connection.wire.close()

    def _make_greeting(self, connection: wire.Connection, is_asking: bool) -> wire.Greeting:
        """Return this rank's greeting. If ``is_asking``, tell rank 0 where this rank listens."""
        listens_at = ""
        if self._point.is_tree:
            listens_at = self._listen_at(connection.local_address) if is_asking else wire.LEAF
        return wire.Greeting(
            self._point.rank, self._size, self._process, listens_at, self._lost_parent
        )

    def _listen_at(self, local_address: tuple[str, int]) -> str:
        """Listen at the local address of the connection with rank 0; return address and port."""
        host = local_address[0]
        if self._host.startswith(f"{host} "):
            return self._host
        address, family = (host, 0, *local_address[2:]), family_of(host)
        try:
            listener = system.create_server(address, family=family, backlog=self._backlog)
        except OSError as error:
            raise self._point.error(f"cannot listen at {host} for other hosts: {error}") from error
        self._listen(listener)
        self._host = f"{host} {listener.getsockname()[1]}"
        return self._host

    def _become_speaker(self, secret: Secret) -> None:
        """Listen for other ranks of this host, unless another rank already listens for them."""
        self._secret = secret
        needs_none = self._point.local_rank is None or not system.IS_LINUX
        if self._is_speaker or not self._point.is_tree or needs_none:
            return
        listener = system.Socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(self._local_socket_name(secret))
            listener.listen(self._backlog)
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                raise self._point.error(f"cannot listen for ranks of this host: {error}") from error
            return
        self._listen(listener)
        self._is_speaker = True

    def _local_socket_name(self, secret: Secret) -> str:
        """Return the name of the abstract socket (unix(7)) for the ranks of this run and host."""
        facts = b"inside", self._point.name.encode(), str(self._size).encode()
        return f"\0flashlight-{proof(secret.from_job or secret.of_user, *facts).hex()}"
