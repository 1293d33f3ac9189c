"""The admission check of a rank: which processes connect to it and prove to be of this run.

And how it finds its own place: in a tree, it asks rank 0 and connects to the rank that rank 0
names, or to a socket inside the host if another rank speaks for the host. ``MeetingPoint`` says
where rank 0 listens.
"""

from __future__ import annotations

import abc
import errno
import itertools
import json
import logging
import math
import os
from collections.abc import Iterable
from functools import cached_property, partial
from selectors import EVENT_READ, EVENT_WRITE
from socket import AF_UNIX, SOCK_STREAM

from flashlight_py import system
from flashlight_py.distributed.rendezvous.secret import NONCE_BYTES, REMEDY, Secret, nonce, proof
from flashlight_py.distributed.rendezvous.store import (
    ANY_RANK,
    FIRST_SECONDS,
    Store,
    Waiting,
    missing_text,
    this_process,
)
from flashlight_py.distributed.rendezvous.wire import (
    LEAF,
    PROOF_BYTES,
    Connection,
    Greeting,
    Handshake,
    Kind,
    NobodyError,
    Offer,
    Seat,
    SilentError,
    WireError,
    WrongServerError,
    greet,
    user_of,
)
from flashlight_py.errors import RendezvousError
from flashlight_py.interfaces import family_of

# Seconds between two looks for rank 0: a long wait costs a file server ten requests a second.
FIRST_PAUSE, PAUSE_GROWTH, LONGEST_PAUSE = 0.002, 1.5, 0.1
_EACH = 0.001  # seconds per rank for which rank 0 may be busy with other ranks
# Seconds to wait for the parent that rank 0 assigned, plus one second per tree level; and seconds
# for which a rank that has lost its parent looks for a silent rank 0.
_ABOVE, _BEREFT = 5.0, 6.0
SHORTLY = 2.0  # seconds that a short message, or reading the reason of a failure, may take
_SPARE_CANDIDATES = 64  # connections without proof, beyond one per rank; more are a flood
# In a tree: the maximum number of connections without proof, and the seconds after which one makes
# room. The kernel keeps the others.
_TREE_CANDIDATES, _CANDIDATE_SECONDS = 40, 1.0
_MOST_NAMED = 8  # hosts whose processes were turned away, in the message of a failure
TREE_FROM = "FLASHLIGHT_TREE_FROM"
"""The environment variable with the number of ranks from which on they meet in a tree."""
_log = logging.getLogger("flashlight_py")


class MeetingPoint(Store):
    """A store whose ranks connect to rank 0. Subclasses say where rank 0 listens, and how."""

    timeout: float  # in seconds, for each exchange
    name: str  # for messages
    kind: str  # what the place is
    own: str  # what every run needs one of for itself
    known: Secret  # what rank 0 expects its clients to know
    is_common = False  # a process of this user that knows the place must know the secret, too
    moves = False  # while ranks gather, another rank 0 may replace one that died
    patience = math.inf  # seconds that a client waits for the answer to one offer
    next_look = math.inf  # the time of the next call of ``look``, by ``time.monotonic``
    note = ""  # added by rank 0 when it reports missing ranks
    local_rank: int | None = None  # among the ranks of this host; None: not known

    @cached_property
    def is_tree(self) -> bool:
        """Whether ranks meet in a tree, one of each host for all of it. Equal on all of them."""
        text = system.environ.get(TREE_FROM, "64")
        if not text.isdecimal():
            raise self.error(f"{TREE_FROM} is to be a number of ranks, got {text!r}")
        return self.size >= int(text)

    @abc.abstractmethod
    def remedy(self) -> str:
        """Return what to do about ranks that have not arrived."""

    @abc.abstractmethod
    def listen(self, backlog: int) -> list[system.Socket]:
        """Return the sockets on which rank 0 listens; raise OSError, which says why it cannot."""

    def look(self) -> system.Socket | None:
        """Do what rank 0 has to while ranks gather; may return one more listening socket.

        Raises RendezvousError if there is another rank 0, or the place cannot be used any more.
        """

    @abc.abstractmethod
    def offers(self) -> Iterable[Offer]:
        """Return where rank 0 may be, the likeliest first."""

    def failed(self, offer: Offer) -> None:
        """Note that nobody answered ``offer`` as rank 0 of its run."""

    def clear(self) -> None:
        """Remove what this rank has left at the place."""

    def error(self, reason: str) -> RendezvousError:
        """Return the error of this rank."""
        where = f"rendezvous at {self.name}, rank {self.rank} of {self.size}"
        return RendezvousError(f"{where}: {reason}")


class Gate(abc.ABC):
    """A rank that looks for its place in the tree, and listens for others while it is in a call.

    Between calls, the kernel accepts connections and keeps what they send, without a thread here.
    A connection is a candidate until it has proven to be a rank and has its place here.
    """

    def __init__(self, place: MeetingPoint) -> None:
        self._place, self._size = place, place.size
        self._secret: Secret = place.known  # of ranks that connect here
        self.selector = system.Selector()
        self._listeners: list[system.Socket] = []
        self._backlog = self._size + _SPARE_CANDIDATES
        self._is_open = True  # listeners are looked at
        self._candidates: list[Connection] = []
        self._turned_away: set[str] = set()  # hosts whose processes know another secret
        self._round = 0
        self._verdict = ""  # once this run has failed: why
        self._notified: set[int] = set()  # and which ranks know it
        self._up: Connection | None = None  # to who is above
        self._process = this_process()
        self._seat = Seat(place.rank, 0, 0, str(self._process))
        self._without = ANY_RANK  # who was above this rank and is not there
        self._bereft = ""  # and what has become of it
        self._missed = ""  # whom rank 0 has named, and why that one was not to be had
        self._deadline = math.inf
        self._host, self._speaks = "", False  # where it listens for other hosts; for its own one

    @abc.abstractmethod
    def _failure(self, reason: str, joining: bool = False) -> RendezvousError:
        """Notify all neighbours, and return the error to raise."""

    @abc.abstractmethod
    def _admit(self, candidate: Connection, greeting: Greeting) -> None:
        """Give a process that knows the secret its place, or report why there is none for it."""

    @abc.abstractmethod
    def _heard(self, connection: Connection) -> None:
        """Act on what a connection has sent, or on its end, which is no candidate any more."""

    def _listen(self, listener: system.Socket) -> None:
        listener.setblocking(False)
        self._listeners.append(listener)
        self.selector.register(listener, EVENT_READ, listener)

    def _serve(self, deadline: float) -> bool:
        """Deal with what has arrived, or else arrives until ``deadline``; False: nothing has."""
        seconds = max(0.0, deadline - system.monotonic())
        if self._place.is_tree:
            seconds = min(seconds, self._open_or_close())
        ready = self.selector.select(seconds)
        for key, mask in ready:
            if not isinstance(key.data, Connection):
                self._accept(key.data)
            elif key.data.wire.fileno() >= 0:  # else it was closed by a message of another one
                if mask & EVENT_WRITE and key.data.flush():
                    self.selector.modify(key.data.wire, EVENT_READ, key.data)
                if mask & EVENT_READ:
                    self._receive(key.data)
        return bool(ready)

    def _open_or_close(self) -> float:
        """Look at listeners only while there is room; return for how many seconds to, at most."""
        is_full = len(self._candidates) >= _TREE_CANDIDATES and self._round == 0
        oldest = self._candidates[0] if is_full else None
        left = oldest.since + _CANDIDATE_SECONDS - system.monotonic() if oldest else 0.0
        if self._is_open != (left <= 0.0):
            self._is_open = not self._is_open
            for each in self._listeners:
                if self._is_open:
                    self.selector.register(each, EVENT_READ, each)
                else:
                    self.selector.unregister(each)
        return left if left > 0.0 else 1e9

    def _accept(self, listener: system.Socket) -> None:
        most = _TREE_CANDIDATES if self._place.is_tree else self._backlog
        try:
            connection = Connection(listener.accept()[0])
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE) and self._candidates:
                self._drop(self._candidates[0])
            return  # whoever it was has gone again, or is still there at the next look
        self.selector.register(connection.wire, EVENT_READ, connection)
        self._candidates.append(connection)
        if len(self._candidates) > most:
            self._drop(self._candidates[0])

    def _receive(self, connection: Connection) -> None:
        try:
            connection.receive(0.0)
            if connection.is_refused:
                connection.inbox.clear()
            elif connection.rank is None and connection.inbox:
                self._greet(connection)
        except WireError as error:
            self._spoilt(connection, error)
            return
        if connection.rank is not None:
            self._heard(connection)
        elif connection.has_ended:
            self._drop(connection)

    def _spoilt(self, connection: Connection, error: WireError) -> None:
        """Deal with a connection on which something came that is no message."""
        who = f"rendezvous at {self._place.name}: dropped a connection of"
        _log.info("%s %s: %s", who, connection.address[0], error)
        self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        if connection in self._candidates:
            self._candidates.remove(connection)
        if connection.wire in self.selector.get_map():
            self.selector.unregister(connection.wire)
        connection.wire.close()

    # Who joins ------------------------------------------------------------------------------------

    def _greet(self, candidate: Connection) -> None:
        """Handle a candidate's next message. Raises WireError if it must be dropped silently."""
        kind, body = candidate.inbox.popleft()
        if kind is Kind.HELLO and candidate.handshake is None and len(body) == NONCE_BYTES:
            mine, key = nonce(), self._secret.key(candidate.address)
            candidate.handshake = Handshake(key, body, mine)
            candidate.send(Kind.CHALLENGE, mine, system.monotonic() + SHORTLY)
            return
        if kind is not Kind.PROOF or candidate.handshake is None:
            raise WireError("no greeting")
        greeting = Greeting.parse(body[PROOF_BYTES:])
        if greeting is None:
            raise WireError("a greeting of nonsense")
        if candidate.handshake.check_client(body):
            welcome = candidate.handshake.of_server()
            candidate.send(Kind.WELCOME, welcome, system.monotonic() + SHORTLY)
            self._admit(candidate, greeting)
        else:
            self._turn_away(candidate, greeting)

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
            f"knows another secret than rank 0, whose is from {self._secret.source}"
        )
        if user == os.geteuid() and self._round == 0 and not self._verdict:
            raise self._disagreement(f"{reason}; {REMEDY}", greeting.rank, candidate)
        if host not in self._turned_away and len(self._turned_away) < _MOST_NAMED:
            self._turned_away.add(host)
            place = self._place.name
            _log.warning("rendezvous at %s: %s, and was turned away", place, reason)

    def _refuse(self, candidate: Connection, kind: Kind, words: str) -> None:
        """Send the last message, which is there when the other side has read it and hangs up."""
        candidate.send(kind, words.encode(), system.monotonic() + SHORTLY)
        candidate.is_refused = True
        candidate.shut()

    def _disagreement(self, reason: str, rank: int, culprit: Connection) -> RendezvousError:
        """Notify everybody that a greeting contradicts, and return the error to raise."""
        self._notified.add(rank)
        if not culprit.is_refused:
            self._refuse(culprit, Kind.FAILURE, reason)
        return self._failure(reason, joining=True)

    # Its own place -------------------------------------------------------------------------------

    def _join(self) -> None:
        """Find this rank's place, trying again until the deadline.

        If another rank speaks for this host but has not come after a while, this one speaks.
        """
        place, pause, problem = self._place, FIRST_PAUSE, ""
        is_first = self._round == 0  # else who is rank 0 is known
        waiting = Waiting(f"rendezvous at {place.name}")
        speaks_from = system.monotonic()
        has_speaker = place.is_tree and bool(place.local_rank)
        if has_speaker and not self._bereft:
            speaks_from += min(FIRST_SECONDS, place.timeout / 8)
        try:
            while (now := system.monotonic()) < self._deadline:
                goes_inside = has_speaker and not self._speaks
                inside = [True] if now < speaks_from else [False, True][: 1 + goes_inside]
                offers = place.offers() if is_first else [self._offer]
                for offer, is_inside in itertools.product(offers, inside):
                    try:
                        if self._reach(offer, max(speaks_from, now + 1.0) if is_inside else 0.0):
                            return
                    except NobodyError as error:  # noqa: PERF203 - each for itself
                        if is_inside:
                            continue
                        problem = f": {offer.who}{error}"
                        if isinstance(error, WrongServerError) and not place.moves:
                            raise self._failure(str(error)) from error
                        if is_first:
                            place.failed(offer)
                        has_been = self._bereft or self._missed
                        if has_been and is_first and not place.moves:  # the run has failed
                            if not isinstance(error, SilentError):
                                self._missed = "the run has failed, and other ranks say why"
                                self._deadline = now
                            self._deadline = min(self._deadline, speaks_from + _BEREFT)
                # That rank 0 is merely late, it says itself once it is there.
                waiting.log_missing([0] if problem else [], problem)
                system.sleep(max(0.0, min(pause, self._deadline - now)))
                pause = min(pause * PAUSE_GROWTH, LONGEST_PAUSE)
        finally:
            place.clear()
        missing = self._bereft or self._missed or missing_text([0], self._size, place.timeout)
        raise self._failure(f"{missing}{problem}; {place.remedy()}", joining=True)

    def _reach(self, offer: Offer, inside: float = 0.0, patience: float = 0.0) -> bool:
        """Greet rank 0 and go to the rank that it names, for so many seconds of ``patience``.

        Or, until ``inside``, the rank that speaks for this host. Returns False if the named rank
        does not answer. Raises NobodyError if no process that knows the secret answers.
        """
        place, is_asking = self._place, not (inside or patience)
        if inside:
            offer = offer._replace(addresses=[(self._name_inside(offer.secret), 0)])
        busy = self._size * _EACH if place.is_tree else 0.0
        until = system.monotonic() + (patience or place.patience) + busy
        until = min(self._deadline, inside or until)
        if is_asking and offer.secret is place.known:  # others of this host wait, and need not ask
            self._speak(offer.secret)
        connection = greet(offer, partial(self._introduce, is_asking=is_asking), until)
        place.secret = offer.secret.common
        connection.trust(place.host_timeout)
        if is_asking:
            place.ends, self._offer = {0: connection.ends}, offer
            self._speak(offer.secret)
        try:
            message = connection.take(until)
        except WireError as error:
            self._spoilt(connection, error)
            raise NobodyError(str(error)) from error
        if message is None or message.kind is not Kind.PLACE:
            connection.wire.close()
            if message is not None:
                before = f"{self._bereft}; " if self._bereft else ""
                reason = message.body.decode(errors="replace")
                raise self._failure(f"{before}{reason}", joining=True)
            raise NobodyError("the listener there has gone, or names no place")
        seat = Seat(*json.loads(message.body))
        if not seat.host:
            self._up, self._seat, self._without = connection, seat, ANY_RANK
            self._bereft = self._missed = ""
            connection.rank = seat.parent
            self.selector.register(connection.wire, EVENT_READ, connection)
            return True
        try:
            there = Offer([(seat.host, seat.port)], offer.secret)
            return self._reach(there, patience=_ABOVE + seat.depth)
        except NobodyError as error:
            self._without, where = seat.parent, f"{seat.host}:{seat.port}"
            who = f"rank {seat.parent} of {self._size} ({seat.peer})"
            self._missed = f"{who} is not at {where}, where rank 0 sees it: {error}"
            return False
        finally:
            connection.wire.close()

    def _introduce(self, connection: Connection, is_asking: bool) -> Greeting:
        """Return who this is, and to who is asked for a place, where others may be below it."""
        at = ""
        if self._place.is_tree:
            at = self._listen_at(connection.here) if is_asking else LEAF
        return Greeting(self._place.rank, self._size, self._process, at, self._without)

    def _listen_at(self, here: tuple[str, int]) -> str:
        """Listen at the address from which rank 0 was reached; return it and the port."""
        host = here[0]
        if self._host.startswith(f"{host} "):
            return self._host
        address, family = (host, 0, *here[2:]), family_of(host)
        try:
            new = system.create_server(address, family=family, backlog=self._backlog)
        except OSError as error:
            raise self._place.error(f"cannot listen at {host}, for other hosts: {error}") from error
        self._listen(new)
        self._host = f"{host} {new.getsockname()[1]}"
        return self._host

    def _speak(self, secret: Secret) -> None:
        """Listen for the other ranks of this host, if it may have some and nobody else does."""
        self._secret = secret
        if self._speaks or not self._place.is_tree or self._place.local_rank is None:
            return
        listener = system.Socket(AF_UNIX, SOCK_STREAM)
        try:
            listener.bind(self._name_inside(secret))
            listener.listen(self._backlog)
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                raise self._place.error(f"cannot listen for ranks of this host: {error}") from error
            return
        self._listen(listener)
        self._speaks = True

    def _name_inside(self, secret: Secret) -> str:
        """Return the name of the socket by which ranks of this host and run meet (unix(7))."""
        facts = b"inside", self._place.name.encode(), str(self._size).encode()
        return f"\0flashlight-{proof(secret.given or secret.of_user, *facts).hex()}"
