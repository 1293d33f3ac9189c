"""A meeting of ranks: rank 0 gathers a payload of each of the others and sends all to all."""

from __future__ import annotations

import abc
import errno
import logging
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from selectors import EVENT_READ

from flashlight_py import system
from flashlight_py.distributed.rendezvous.secret import NONCE_BYTES, REMEDY, Secret, nonce
from flashlight_py.distributed.rendezvous.store import (
    ANY_RANK,
    Peer,
    Store,
    Waiting,
    cannot_be_reached,
    name_ranks,
    not_arrived,
    this_process,
)
from flashlight_py.distributed.rendezvous.wire import (
    PROOF_BYTES,
    Connection,
    Greeting,
    Handshake,
    Kind,
    NobodyError,
    Offer,
    Packet,
    WireError,
    WrongServerError,
    greet,
    join_payloads,
    split_payloads,
    user_of,
)
from flashlight_py.errors import RendezvousError

# Between two looks for rank 0, in seconds: ranks that start together meet at once, and a long wait
# costs a file server ten requests a second.
FIRST_PAUSE, PAUSE_GROWTH, LONGEST_PAUSE = 0.002, 1.5, 0.1
# So long rank 0 may take to report who is missing, in seconds.
_ANSWER = 2.0
# How long a short message may take, and a reason for failing is kept readable, in seconds.
_SHORTLY = 2.0
# Connections that have proven nothing yet, beyond one per rank; more are a flood.
_SPARE_CANDIDATES = 64
# Of hosts whose processes were turned away so many are remembered, for the message of a failure.
_MOST_NAMED = 8
_log = logging.getLogger("flashlight_py")


class MeetingPoint(Store):
    """A store whose ranks connect to rank 0 there; server and clients ask it where and how."""

    timeout: float  # in seconds, for each exchange
    name: str  # for messages
    kind: str  # what the place is
    own: str  # what every run needs one of for itself
    known: Secret  # what rank 0 expects its clients to know
    # Whoever knows the place ought to know that too: a process of this user that does not was
    # started wrongly.
    is_common = False
    moves = False  # while ranks gather, another rank 0 may take the place of one that died
    patience = math.inf  # so many seconds a client waits for the answer of one offer
    next_look = math.inf  # when ``look`` has something to do, by ``time.monotonic``
    note = ""  # what rank 0 adds when it reports whom it waits for
    # Rank 0 numbers who asks for ``ANY_RANK``, one process of each host unless all have one.
    unnumbered = False
    one_host = False
    # After so many seconds, not the usual ones, it is said who is missing, also with nobody there.
    first_report: float | None = None

    def __init__(self, rank: int, size: int, timeout: float) -> None:
        self.rank, self.size, self.timeout = rank, size, timeout
        is_server = rank == 0 and size > 1
        self._role: Server | Client = Server(self) if is_server else Client(self)
        self._has_ended = False

    def exchange(self, payload: bytes) -> list[bytes]:
        """Pass ``payload`` and return every rank's, in rank order; see ``Store``."""
        if self._has_ended:
            raise self.error("this store was closed or has failed; make a new one")
        if self.size == 1:
            return [bytes(payload)]
        try:
            return self._role.exchange(bytes(payload))
        except RendezvousError:
            self._has_ended = True
            raise

    def close(self) -> None:
        """Leave; collective. Rank 0 blocks until all have left, and alone raises; see ``Store``."""
        if not self._has_ended:
            self._has_ended = True
            self._role.leave()

    def hand_over(self) -> dict[int, system.Socket]:
        """End after an exchange, and return the connections that are proven; collective.

        Those of rank 0 to every other rank, by rank, and of these to rank 0. They block, and are
        the caller's to close. Rank 0 goes on listening where it says so: see ``late``.
        """
        self._has_ended = True
        return self._role.hand_over()

    @contextmanager
    def late(self) -> Iterator[tuple[int, Callable[[], object]]]:
        """After ``hand_over`` on rank 0: yield what can be read when somebody comes too late.

        And what to call then: it says that a run is under way, and does not block. At the end
        nobody listens any more.
        """
        assert isinstance(self._role, Server)
        try:
            yield self._role.selector.fileno(), partial(self._role.serve_ready, 0.0)
        finally:
            self._role.close()

    def abort(self, reason: str) -> None:
        """Notify the connected ranks that this one aborts; waits up to 2 s until they know."""
        if not self._has_ended:
            self._has_ended = True
            self._role.abort(f"{self._who} aborted: {reason}")

    @property
    def _who(self) -> str:
        return "one" if self.rank == ANY_RANK else f"rank {self.rank}"

    # What server and clients ask of it -----------------------------------------------------------

    @abc.abstractmethod
    def remedy(self) -> str:
        """Return what to do about ranks that have not arrived."""

    @abc.abstractmethod
    def listen(self, backlog: int) -> list[system.Socket]:
        """Return the sockets on which rank 0 listens for the others.

        Raises:
            OSError: it cannot listen there; says why.
        """

    def look(self) -> system.Socket | None:
        """Do what rank 0 has to while ranks gather; may return one more listening socket.

        Raises:
            RendezvousError: this is not the only rank 0, or the place cannot be used any more.
        """
        return None

    @abc.abstractmethod
    def offers(self) -> Iterable[Offer]:
        """Return where rank 0 may be, the likeliest first."""

    def failed(self, offer: Offer) -> None:
        """Note that nobody answered ``offer`` as rank 0 of its run."""

    def clear(self) -> None:
        """Remove what this rank has left at the place."""

    def error(self, reason: str) -> RendezvousError:
        """Return the error of this rank."""
        where = f"rendezvous at {self.name}, {self._who} of {self.size}"
        return RendezvousError(f"{where}: {reason}")


class Client:
    """A rank that connects to rank 0, in its first exchange."""

    def __init__(self, place: MeetingPoint) -> None:
        self._place = place
        self._greeting = Greeting(place.rank, place.size, this_process())
        self.members: dict[int, Connection] = {}  # rank 0, once it is connected
        self._round, self._problem = 0, ""

    def exchange(self, payload: bytes) -> list[bytes]:
        """Send ``payload`` and return everybody's, in rank order."""
        deadline = system.monotonic() + self._place.timeout
        try:
            while (message := self._exchange(payload, deadline)) is None:
                pass
        except RendezvousError:
            self._disconnect()
            raise
        self._round += 1
        return split_payloads(message.body)

    def _exchange(self, payload: bytes, deadline: float) -> Packet | None:
        """Return what rank 0 sends; None: it has died, and another one may take its place."""
        place = self._place
        if not self.members:
            self.members[0] = self._connect(deadline)
        connection = self.members[0]
        connection.send(Kind.PAYLOAD, payload, deadline)
        message = self._take(connection, deadline)
        if message is None and not connection.has_ended:
            connection.send(Kind.LATE, str(self._round).encode(), system.monotonic() + _ANSWER)
            message = self._take(connection, system.monotonic() + _ANSWER)
        if message is not None:
            return message
        if not connection.has_ended:
            raise place.error(not_arrived([0], place.size, place.timeout))
        self._disconnect()
        if connection.is_unreachable:
            raise place.error(cannot_be_reached(f"rank 0 of {place.size}", place.host_timeout))
        if self._round > 0 or not place.moves:
            died = "has died or exited: it closed the connection"
            raise place.error(f"rank 0 of {place.size} {died}")
        return None

    def _take(self, connection: Connection, deadline: float) -> Packet | None:
        """Return the next message; None at the deadline. Raises if rank 0 reports a failure."""
        try:
            message = connection.take(deadline)
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
        waiting = Waiting(f"rendezvous at {self._place.name}", self._place.first_report)
        try:
            while (now := system.monotonic()) < deadline:
                for offer in self._place.offers():
                    connection = self._greet(offer, deadline)
                    if connection is not None:
                        connection.trust(self._place.host_timeout)
                        self._place.ends = {0: connection.ends}
                        return connection
                # That rank 0 is merely late, it says itself once it is there.
                says = self._problem or self._place.first_report is not None
                waiting.look([0] if says else [], self._problem)
                system.sleep(max(0.0, min(pause, deadline - now)))
                pause = min(pause * PAUSE_GROWTH, LONGEST_PAUSE)
        finally:
            self._place.clear()
        missing = not_arrived([0], self._place.size, self._place.timeout)
        raise self._place.error(f"{missing}{self._problem}; {self._place.remedy()}")

    def _greet(self, offer: Offer, deadline: float) -> Connection | None:
        until = min(deadline, system.monotonic() + self._place.patience)
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

    def hand_over(self) -> dict[int, system.Socket]:
        """Return the connection to rank 0."""
        wire = self.members.pop(0).wire
        wire.setblocking(True)
        return {0: wire}

    def leave(self) -> None:
        """Take leave of rank 0."""
        self._send_last(Kind.GOODBYE, b"")

    def abort(self, reason: str) -> None:
        """Report the reason to rank 0, which notifies everybody."""
        if self._round == 0 and not self.members:  # the others wait for this rank to come
            with suppress(RendezvousError):
                self.members[0] = self._connect(system.monotonic() + _SHORTLY)
        self._send_last(Kind.FAILURE, reason.encode())

    def _send_last(self, kind: Kind, body: bytes) -> None:
        for connection in self.members.values():
            connection.send(kind, body, system.monotonic() + _ANSWER)
        self._disconnect()

    def _disconnect(self) -> None:
        for connection in self.members.values():
            connection.wire.close()
        self.members.clear()


class Server:
    """The rank that listens. It serves while it is in ``exchange`` or ``leave``.

    In between, the kernel accepts connections and keeps what they send; so no thread is needed.
    A connection is a candidate until it has proven to be a rank, a member from then on.

    Raises:
        RendezvousError: it cannot listen at ``place``.
    """

    def __init__(self, place: MeetingPoint) -> None:
        self._place, self._size = place, place.size
        self.selector = system.Selector()
        self._listeners: list[system.Socket] = []
        try:
            for listener in place.listen(self._size + _SPARE_CANDIDATES):
                self._listen(listener)
        except OSError as error:
            raise self._place.error(str(error)) from error
        self._candidates: list[Connection] = []
        self.members: dict[int, Connection] = {}
        self._processes: dict[int, Peer] = {0: this_process()}
        self._turned_away: set[str] = set()  # hosts whose processes know another secret
        self._round = 0
        self._verdict = ""  # once this run has failed: why
        self._notified: set[int] = set()  # and which ranks know it

    def exchange(self, payload: bytes) -> list[bytes]:
        """Gather a payload of every rank, in rank order."""
        deadline = self._await(Kind.PAYLOAD)
        self._round += 1
        if self._round == 1:
            self._place.next_look = math.inf
            self._place.ends = {rank: member.ends for rank, member in self.members.items()}
            handshakes = ((rank, member.handshake) for rank, member in self.members.items())
            unproven = [rank for rank, handshake in handshakes if handshake and not handshake.key]
            if unproven:  # nothing keeps strangers out
                _log.warning(
                    "%s joined from another host, and this job has no secret: whoever can reach %s "
                    "could have joined, and had this program run what it sends; %s",
                    name_ranks(unproven),
                    self._place.name,
                    REMEDY,
                )
        others = (self.members[rank].inbox.popleft() for rank in range(1, self._size))
        payloads = [payload, *(message.body for message in others)]
        body = join_payloads(payloads)
        # Whoever cannot be reached any more is noticed when the next thing is awaited from it.
        for rank in range(1, self._size):
            self.members[rank].send(Kind.ROSTER, body, deadline)
        return payloads

    def _await(self, kind: Kind) -> float:
        """Serve until every rank has sent a message of this ``kind``; return the deadline."""
        deadline = system.monotonic() + self._place.timeout
        how = f"rendezvous at {self._place.name}{self._place.note}"
        waiting = Waiting(how, self._place.first_report)
        while absent := self._absent(kind):
            if system.monotonic() >= self._place.next_look:
                try:
                    more = self._place.look()
                except RendezvousError as error:
                    self._failure(str(error))
                    raise
                if more is not None:
                    self._listen(more)
            is_over = not self._serve(min(deadline, waiting.due, self._place.next_look))
            if is_over and system.monotonic() >= deadline and (absent := self._absent(kind)):
                stuck = f"{name_ranks(absent)} joined and did not take leave"
                raise self._failure(stuck if kind is Kind.GOODBYE else self._not_arrived(absent))
            waiting.look(absent)
        return deadline

    def _absent(self, kind: Kind = Kind.PAYLOAD) -> set[int]:
        """Return the ranks of which the next message is not here, or of another ``kind``."""
        inboxes = {rank: member.inbox for rank, member in self.members.items()}
        given = {rank for rank, inbox in inboxes.items() if inbox and inbox[0].kind is kind}
        absent = {*(range(1, self._size) if kind is Kind.PAYLOAD else inboxes)} - given
        for rank in sorted(absent & self.members.keys()):
            if self._round > 0 and self.members[rank].has_ended:
                raise self._failure(
                    f"rank {rank} of {self._size} ({self._processes[rank]}) has died or exited: it "
                    "closed the connection"
                )
        return absent

    def _not_arrived(self, absent: set[int]) -> str:
        left = "".join(
            f"; rank {rank} ({self._processes[rank]}) had joined and died or left"
            for rank in sorted(absent & self._processes.keys() - self.members.keys())
        )
        sentence = not_arrived(absent, self._size, self._place.timeout)
        hosts = ", ".join(sorted(self._turned_away))
        strangers = f"processes on {hosts} were turned away, as they know another secret: {REMEDY}"
        return f"{sentence}{left}; {self._place.remedy()}{f'; {strangers}' if hosts else ''}"

    def _listen(self, listener: system.Socket) -> None:
        listener.setblocking(False)
        self._listeners.append(listener)
        self.selector.register(listener, EVENT_READ, listener)

    def _serve(self, deadline: float) -> bool:
        """Deal with what has arrived; wait for something if need be. False: time is up."""
        seconds = deadline - system.monotonic()
        # Strangers who never cease must not put off the end.
        return self.serve_ready(max(0.0, seconds)) and seconds > 0

    def serve_ready(self, seconds: float) -> bool:
        """Deal with what arrives within ``seconds``; False: nothing has."""
        ready = self.selector.select(seconds)
        for key, _ in ready:
            if isinstance(key.data, system.Socket):
                self._accept(key.data)
            elif key.data.wire.fileno() >= 0:  # by a message of another one
                self._receive(key.data)
        return bool(ready)

    def _accept(self, listener: system.Socket) -> None:
        try:
            connection = Connection(listener.accept()[0])
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and self._candidates:
                self._drop(self._candidates[0])
            return  # whoever it was has gone again, or is still there at the next look
        self.selector.register(connection.wire, EVENT_READ, connection)
        self._candidates.append(connection)
        if len(self._candidates) > self._size + _SPARE_CANDIDATES:
            self._drop(self._candidates[0])

    def _receive(self, connection: Connection) -> None:
        try:
            connection.receive(0.0)
            if connection.is_refused:
                connection.inbox.clear()
            elif connection.rank is None and connection.inbox:
                self._greet(connection)
        except WireError as error:
            who = f"rendezvous at {self._place.name}: dropped a connection of"
            _log.info("%s %s: %s", who, connection.address[0], error)
            self._drop(connection)
            return
        if connection.rank is not None and not self._verdict:
            self._handle(connection.rank, connection)
            if connection.is_unreachable:
                who = f"rank {connection.rank} of {self._size} ({self._processes[connection.rank]})"
                raise self._failure(cannot_be_reached(who, self._place.host_timeout))
        if not connection.has_ended:
            return
        if connection.rank is None or self._round == 0:  # it may join again
            self._drop(connection)
        else:
            self.selector.unregister(connection.wire)

    def _handle(self, rank: int, member: Connection) -> None:
        """Act on a member's messages other than payloads and its last, which stay in its inbox.

        A member's complaint that is older than the roster it crossed on its way is void.
        """
        messages = list(member.inbox)
        stay = Kind.PAYLOAD, Kind.GOODBYE
        member.inbox = deque(each for each in messages if each.kind in stay)
        for kind, body in messages:
            if kind is Kind.FAILURE:
                raise self._failure(body.decode(errors="replace"), joining=True)
            if kind is Kind.LATE and body == str(self._round).encode():
                raise self._failure(self._not_arrived(self._absent() or {0}))

    def _drop(self, connection: Connection) -> None:
        if connection.rank is not None:
            self.members.pop(connection.rank, None)
        elif connection in self._candidates:
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
            mine, key = nonce(), self._place.known.key(candidate.address)
            candidate.handshake = Handshake(key, body, mine)
            candidate.send(Kind.CHALLENGE, mine, system.monotonic() + _SHORTLY)
            return
        if kind is not Kind.PROOF or candidate.handshake is None:
            raise WireError("no greeting")
        greeting = Greeting.parse(body[PROOF_BYTES:])
        if greeting is None or (greeting.rank == ANY_RANK and not self._place.unnumbered):
            raise WireError("a greeting of nonsense")
        if candidate.handshake.check_client(body):
            welcome = candidate.handshake.of_server()
            candidate.send(Kind.WELCOME, welcome, system.monotonic() + _SHORTLY)
            self._admit(candidate, greeting)
        else:
            self._turn_away(candidate, greeting)

    def _admit(self, candidate: Connection, greeting: Greeting) -> None:
        """Make a process that knows the secret a member, or report why there is no place for it.

        Before the run stands nobody knows which of two processes that contradict each other is
        the right one, so it fails.
        """
        rank, size, peer = greeting
        if rank == ANY_RANK:
            rank = next((each for each in range(1, size) if each not in self.members), size - 1)
        reason, me = "", self._processes[0]
        here = [self._processes[each] for each in (0, *self.members)]
        twin = next((each for each in here if each.machine and each.machine == peer.machine), None)
        if greeting.rank == ANY_RANK and twin and not self._place.one_host:
            reason = f"two processes of one host ask for a rank: {twin} and {peer}; "
        elif rank in self.members or rank == 0:
            reason = f"two processes claim rank {rank}: {self._processes[rank]} and {peer}; "
        if self._verdict:
            self._refuse(candidate, Kind.FAILURE, self._verdict)
            self._notified.add(rank)
        elif self._round > 0:
            reason += f"a run is under way at this {self._place.kind} already (its rank 0: {me})"
            advice = f"wait for its end, or give every run a {self._place.own} of its own"
            self._refuse(candidate, Kind.FAILURE, f"{reason}; {advice}")
        elif size != self._size:
            reason = f"rank {rank} ({peer}) was started with world size {size}, rank 0 ({me}) with "
            reason += f"{self._size}; give every rank the same world size"
            raise self._disagreement(reason, rank, candidate)
        elif reason:
            advice = f"a rank of its own, and every run a {self._place.own} of its own"
            raise self._disagreement(f"{reason}give every process {advice}", rank, candidate)
        else:
            self._candidates.remove(candidate)
            candidate.trust(self._place.host_timeout)
            candidate.rank, self.members[rank], self._processes[rank] = rank, candidate, peer

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
            f"knows another secret than rank 0, whose is from {self._place.known.source}"
        )
        if user == os.geteuid() and self._round == 0 and not self._verdict:
            raise self._disagreement(f"{reason}; {REMEDY}", greeting.rank, candidate)
        if host not in self._turned_away and len(self._turned_away) < _MOST_NAMED:
            self._turned_away.add(host)
            place = self._place.name
            _log.warning("rendezvous at %s: %s, and was turned away", place, reason)

    def _refuse(self, candidate: Connection, kind: Kind, words: str) -> None:
        """Send the last message, which is there when the other side has read it and hangs up."""
        candidate.send(kind, words.encode(), system.monotonic() + _SHORTLY)
        candidate.is_refused = True
        candidate.shut()

    # The end --------------------------------------------------------------------------------------

    def hand_over(self) -> dict[int, system.Socket]:
        """Return the connections of the members."""
        members, self.members = self.members, {}
        for member in members.values():
            if not member.has_ended:
                self.selector.unregister(member.wire)
            member.wire.setblocking(True)
        if self._place.moves:
            self.close()
        return {rank: member.wire for rank, member in members.items()}

    def leave(self) -> None:
        """Wait until every member has left, then stop listening."""
        self._place.next_look = math.inf
        self._await(Kind.GOODBYE)
        self.close()

    def abort(self, reason: str) -> None:
        """Send the reason to all that are connected, or are about to be, and stop listening."""
        until = system.monotonic() + _SHORTLY
        with suppress(RendezvousError):  # a second failure is no news
            # Take in who has joined since, and those that are just doing so.
            while (left := until - system.monotonic()) > 0:
                is_joining = any(not each.is_refused for each in self._candidates)
                if not self.serve_ready(left if is_joining else 0.0):
                    break
        self._failure(reason, joining=True)

    def _disagreement(self, reason: str, rank: int, culprit: Connection) -> RendezvousError:
        """Notify everybody that a greeting contradicts, and return the error to raise."""
        self._notified.add(rank)
        if not culprit.is_refused:
            self._refuse(culprit, Kind.FAILURE, reason)
        return self._failure(reason, joining=True)

    def _failure(self, reason: str, joining: bool = False) -> RendezvousError:
        """Notify the members, and while ranks are ``joining`` those who do within two seconds.

        Ranks are started together: one that joins a moment later ought not to wait in vain.

        Returns:
            The error to raise.
        """
        error = self._place.error(reason)
        if self._verdict:
            return error
        self._verdict = reason
        deadline = system.monotonic() + _SHORTLY
        for member in self.members.values():
            member.send(Kind.FAILURE, reason.encode(), deadline)
        self._notified |= self.members.keys()
        expected = set(range(1, self._size)) if joining and self._round == 0 else set()
        while expected - self._notified and self._serve(deadline):
            pass
        refused = (candidate for candidate in self._candidates if candidate.is_refused)
        for connection in (*self.members.values(), *refused):
            connection.shut()
            with suppress(WireError):
                while not connection.has_ended and system.monotonic() < deadline:
                    connection.receive(deadline - system.monotonic())
        self.close()
        return error

    def close(self) -> None:
        """Stop listening, and close what is not handed over."""
        self.selector.close()
        wires = (each.wire for each in (*self.members.values(), *self._candidates))
        for end in (*self._listeners, *wires):
            end.close()
        self._place.clear()
