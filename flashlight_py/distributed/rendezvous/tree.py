"""The ranks of a meeting as a tree: their payloads go up to rank 0, and everybody's come down.

Where they are few, all are below rank 0. From some number on (``MeetingPoint.is_tree``) one of each
host speaks for it: the others connect to that one alone, by a socket inside the host. Speakers ask
rank 0 for their places, in order of arrival, and connect to whom it names. So no process has more
than some dozens of connections, besides those of its host. In the first exchange payloads go up as
they arrive, in batches, and who loses the one above it asks for another place and gives them again.
From then on each node sends all that is below it at once, and the end of a connection is a death.
Whoever sees why the meeting fails tells all neighbours, and these theirs.
"""

from __future__ import annotations

import errno
import itertools
import json
import logging
import math
from contextlib import suppress
from functools import partial
from operator import itemgetter
from selectors import EVENT_READ
from socket import AF_UNIX, SOCK_STREAM
from typing import TYPE_CHECKING, Any

from flashlight_py import system
from flashlight_py.distributed.rendezvous.gate import SHORTLY, Gate
from flashlight_py.distributed.rendezvous.places import Places, entry, identity
from flashlight_py.distributed.rendezvous.secret import REMEDY, Secret, proof
from flashlight_py.distributed.rendezvous.store import (
    ANY_RANK,
    FIRST_SECONDS,
    Roster,
    Waiting,
    cannot_be_reached,
    name_ranks,
    not_arrived,
    this_process,
)
from flashlight_py.distributed.rendezvous.wire import (
    LEAF,
    Connection,
    Greeting,
    Kind,
    NobodyError,
    Offer,
    Place,
    WireError,
    WrongServerError,
    greet,
)
from flashlight_py.errors import RendezvousError
from flashlight_py.interfaces import family_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flashlight_py.distributed.rendezvous.meeting import MeetingPoint

# Between two looks for rank 0, in seconds: ranks that start together meet at once, and a long wait
# costs a file server ten requests a second.
FIRST_PAUSE, PAUSE_GROWTH, LONGEST_PAUSE = 0.002, 1.5, 0.1
# So long rank 0 may take to report who is missing, in seconds; and more for each rank in between.
_ANSWER, _MORE = 2.0, 0.25
# So long rank 0 waits until all have shown what they have, in seconds.
_SETTLE = 1.0
# For so many seconds for each rank, rank 0 may be busy with the others.
_EACH = 0.001
_log = logging.getLogger("flashlight_py")


class Node(Gate):
    """This rank in the tree: below another one, but for rank 0, and above others perhaps.

    Raises:
        RendezvousError: it is rank 0, and cannot listen at ``place``.
    """

    def __init__(self, place: MeetingPoint) -> None:
        super().__init__(place)
        self.members: dict[int, Connection] = {}  # right below
        self._up: Connection | None = None
        self._is_root = place.rank == 0
        process = this_process()
        self._processes = {place.rank: process}
        self._seat = Place(place.rank, 0, 0, str(process))
        self._number = place.rank  # or what rank 0 has given it
        self._has_handed_over = False
        self._places = Places(process)  # of rank 0
        self._own, self._roster = b"", b""
        self._deadline = math.inf
        self._pending: list[tuple[Kind, bytes]] = []  # to be sent up
        self._log: list[tuple[int, Kind, bytes]] = []  # what has been, in the first round, by whom
        self._complete: set[int] = set()  # of members: those that have given all in this round
        self._shows = True  # what is there goes up before all is
        self._is_late = False  # time is up, and those above know it
        self._is_leaving, self._gone = False, set[int]()
        self._without = ANY_RANK  # who was above this rank and is not there
        self._host, self._inside = "", False  # where it listens for other hosts; for its own one
        # Of rank 0: who has joined from where, and whom a stranger could have come before.
        self._ends: dict[int, tuple[Any, Any]] = {}
        self._unproven: set[int] = set()
        if self._is_root and place.size > 1:
            try:
                for listener in place.listen(self._backlog):
                    self._listen(listener)
            except OSError as error:
                raise place.error(str(error)) from error

    def exchange(self, payload: bytes) -> Roster:
        """Give ``payload`` and return everybody's."""
        place = self._place
        self._deadline = system.monotonic() + place.timeout
        self._own, self._roster, self._complete = payload, b"", set()
        self._shows, self._is_late = self._round == 0, False
        self._pending = [(Kind.PART, self._entry())] if self._round else []
        self._places.given = {0: payload}
        if self._is_root:
            self._speak(place.known)
        waiting = Waiting(f"rendezvous at {place.name}{place.note}", place.first_report)
        self._pass_on()
        while not self._roster:
            is_over = system.monotonic() >= self._deadline
            self._serve(min(self._deadline, waiting.due, place.next_look))
            self._pass_on()
            if not self._roster:
                if is_over and system.monotonic() >= self._deadline:  # it may have been moved
                    self._time_is_up()
                if self._is_root:
                    self._look_around(waiting)
        self._finish()
        return Roster(self._roster)

    def _entry(self) -> bytes:
        who = b"" if self._round else identity(self._processes[self._place.rank])
        return entry(self._seat.rank, self._seat.parent, who, self._own)

    def _pass_on(self) -> None:
        """Send up what is to be sent now; rank 0 sees whether all is there."""
        if self._is_root:
            if len(given := self._places.given) == self._size:
                self._roster = Roster.of([given[rank] for rank in range(self._size)]).body
            return
        if self._up is None:
            self._join()
        assert self._up is not None
        is_all = self._round > 0 and self._complete >= self.members.keys()
        if is_all or self._shows:
            pending, self._pending = self._pending, []
            for kind, group in itertools.groupby(pending, itemgetter(0)):
                what = Kind.PAYLOAD if is_all and kind is Kind.PART else kind
                self._up.send(what, b"".join(body for _, body in group), self._deadline)

    def _look_around(self, waiting: Waiting) -> None:
        """Do what rank 0 has to while ranks gather."""
        if system.monotonic() >= self._place.next_look:
            try:
                more = self._place.look()
            except RendezvousError as error:
                self._failure(str(error))
                raise
            if more is not None:
                self._listen(more)
        if system.monotonic() >= waiting.due:
            waiting.look(self._places.missing(self._size))

    def _finish(self) -> None:
        """Send everybody's payload down. Who cannot be reached any more is noticed later."""
        self._round += 1
        if self._round == 1 and self._is_root:
            self._place.next_look, self._place.ends = math.inf, self._ends
            if self._unproven:  # nothing keeps strangers out
                _log.warning(
                    "%s joined from another host, and this job has no secret: whoever can reach %s "
                    "could have joined, and had this program run what it sends; %s",
                    name_ranks(self._unproven),
                    self._place.name,
                    REMEDY,
                )
        self._log.clear()
        for member in self.members.values():
            member.send(Kind.ROSTER, self._roster, self._deadline)

    # What others say ------------------------------------------------------------------------------

    def _heard(self, connection: Connection) -> None:
        messages, is_up = connection.inbox, connection is self._up
        is_member = not is_up and self.members.get(connection.rank or 0) is connection
        while messages and not self._verdict:
            kind, body = messages.popleft()
            if kind is Kind.FAILURE:
                raise self._failure(body.decode(errors="replace"), joining=True)
            if kind is Kind.LATE:
                self._heard_late(is_up, body)
            elif kind is Kind.ROSTER and is_up:
                self._roster = body
            elif is_member:
                self._heard_below(connection.rank or 0, kind, body)
        messages.clear()
        if (is_up or is_member) and connection.is_unreachable and not self._verdict:
            raise self._failure(cannot_be_reached(self._who(connection), self._place.host_timeout))
        if connection.has_ended:
            self._heard_end(connection, is_up, is_member)

    def _heard_below(self, rank: int, kind: Kind, body: bytes) -> None:
        if kind is Kind.GOODBYE:
            self._gone.add(rank)
            return
        if kind is Kind.PAYLOAD:
            self._complete.add(rank)
        if self._is_root:
            if kind is Kind.LOST:
                for line in body.decode().splitlines():
                    self._places.lose(*map(int, line.split()))
            elif claim := self._places.take(body):
                advice = f"give every process a rank of its own, and every run a {self._place.own}"
                raise self._failure(f"{claim}; {advice} of its own", joining=True)
            return
        self._pending.append((Kind.LOST if kind is Kind.LOST else Kind.PART, body))
        if self._round == 0:
            self._log.append((rank, *self._pending[-1]))

    def _heard_late(self, is_up: bool, body: bytes) -> None:
        """Act on that time is up, unless the roster has crossed this on its way."""
        if body != str(self._round).encode():
            return
        if self._is_leaving:
            self._deadline = min(self._deadline, system.monotonic())
        elif is_up:
            self._shows = True
            self._ask(self._complete)
        elif not self._is_late:
            self._time_is_up()

    def _heard_end(self, connection: Connection, is_up: bool, is_member: bool) -> None:
        """Before the run stands who has gone may come again, or take another place."""
        rank = connection.rank or 0
        if self._verdict or (is_member and rank in self._gone) or (is_up and self._is_leaving):
            self.selector.unregister(connection.wire)
            return
        self._drop(connection)
        if not (is_up or is_member):
            return
        who = self._who(connection)
        if is_up:
            self._up, self._without = None, rank or ANY_RANK
        else:
            del self.members[rank]
        if self._round > 0 or (is_up and rank == 0 and not self._place.moves):
            raise self._failure(f"{who} has died or exited: it closed the connection")
        if self._is_root:
            self._places.lose(rank, 0)
        elif is_member:
            lost = Kind.LOST, f"{rank} {self._seat.rank}\n".encode()
            self._pending.append(lost)
            self._log = [(ANY_RANK, *lost), *(each for each in self._log if each[0] != rank)]

    def _who(self, connection: Connection) -> str:
        rank = connection.rank or 0
        peer = self._seat.peer if connection is self._up else self._processes[rank]
        return f"rank {rank} of {self._size} ({peer})"

    # Time is up -----------------------------------------------------------------------------------

    def _time_is_up(self) -> None:
        """Tell those above; as rank 0 ask all for what they have, and then say who is missing.

        Raises:
            RendezvousError: it is known who is missing, or nobody above answers.
        """
        place, now = self._place, system.monotonic()
        if not self._is_root:
            if self._is_late or self._up is None:
                above = self._seat.parent
                raise self._failure(not_arrived([above], self._size, place.timeout))
            self._up.send(Kind.LATE, str(self._round).encode(), now + _ANSWER)
            self._deadline = now + _ANSWER + _MORE * (self._seat.depth - 1)
        elif self._is_late or self._round == 0 or not place.is_tree:
            missing = self._places.missing(self._size) or [0]
            raise self._failure(self._not_arrived(missing))
        else:
            self._ask(self._complete)
            self._deadline = now + _SETTLE
        self._is_late = True

    def _ask(self, done: set[int]) -> None:
        """Have members that are not ``done`` show what they have, or say whom they wait for."""
        for rank in self.members.keys() - done:
            self.members[rank].send(Kind.LATE, str(self._round).encode(), self._deadline)

    def _not_arrived(self, missing: list[int]) -> str:
        known = self._places.left
        left = "".join(
            f"; rank {rank} ({known[rank]}) had joined and died or left"
            for rank in [rank for rank in missing if rank in known][:8]
        )
        sentence = not_arrived(missing, self._size, self._place.timeout)
        hosts = ", ".join(sorted(self._turned_away))
        strangers = f"processes on {hosts} were turned away, as they know another secret: {REMEDY}"
        return f"{sentence}{left}; {self._place.remedy()}{f'; {strangers}' if hosts else ''}"

    # Who is above ---------------------------------------------------------------------------------

    def _join(self) -> None:
        """Find this rank's place, trying again until the deadline, and have all sent there.

        Nobody may be listening yet, or a rank 0 that is just ending. Where another rank speaks for
        this host but has not come after a while, this one does.
        """
        place, pause = self._place, FIRST_PAUSE
        is_first = self._round == 0  # else who is rank 0 is known
        waiting = Waiting(f"rendezvous at {place.name}", place.first_report)
        patience = (
            min(FIRST_SECONDS, place.timeout / 4) if place.is_tree and place.local_rank else 0
        )
        speaks_from, problem = system.monotonic() + patience, ""
        try:
            while (now := system.monotonic()) < self._deadline:
                for offer in place.offers() if is_first else [self._offer]:
                    try:
                        return self._reach(offer, is_inside=now < speaks_from)
                    except NobodyError as error:  # noqa: PERF203 - each for itself
                        problem = f": {offer.who}{error}"
                        if now < speaks_from:
                            continue
                        if isinstance(error, WrongServerError) and not place.moves:
                            raise self._failure(str(error)) from error
                        if is_first:
                            place.failed(offer)
                # That rank 0 is merely late, it says itself once it is there.
                says = problem or place.first_report is not None
                waiting.look([0] if says else [], problem)
                system.sleep(max(0.0, min(pause, self._deadline - now)))
                pause = min(pause * PAUSE_GROWTH, LONGEST_PAUSE)
        finally:
            place.clear()
        missing = not_arrived([0], self._size, place.timeout)
        raise self._failure(f"{missing}{problem}; {place.remedy()}")

    def _reach(self, offer: Offer, is_inside: bool, above: int = 0) -> None:
        """Greet ``above`` and stay there, or go to whom it names.

        Raises:
            NobodyError: nobody who knows the secret is there, or whom rank 0 names is not.
        """
        place, at = self._place, offer.addresses
        if is_inside:
            at = [(self._name_inside(offer.secret), 0)]
        patience = place.patience + (self._size * _EACH if place.is_tree else 0)
        until = min(self._deadline, system.monotonic() + patience)
        introduce = partial(self._introduce, is_asking=not (is_inside or above))
        connection = greet(offer._replace(addresses=at), introduce, until)
        place.secret = offer.secret.common
        connection.trust(place.host_timeout)
        if not (is_inside or above):
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
                raise self._failure(message.body.decode(errors="replace"), joining=True)
            raise NobodyError("who listens there has gone, or names no place")
        seat = Place(*json.loads(message.body))
        self._number = seat.rank
        if not seat.host:
            self._up, self._seat, self._without = connection, seat, ANY_RANK
            connection.rank = seat.parent
            self.selector.register(connection.wire, EVENT_READ, connection)
            if self._round == 0:
                again = ((kind, body) for _, kind, body in self._log)
                self._pending = [(Kind.PART, self._entry()), *again]
            return
        try:
            there = Offer([(seat.host, seat.port)], offer.secret)
            self._reach(there, is_inside=False, above=seat.parent)
        except NobodyError as error:
            self._without = seat.parent
            where = f"rank {seat.parent} ({seat.peer}) at {seat.host}:{seat.port}"
            raise NobodyError(f"{where}, whom rank 0 names: {error}") from error
        finally:
            connection.wire.close()

    def _introduce(self, connection: Connection, is_asking: bool) -> Greeting:
        """Return who this is, and to who is asked for a place, where others may be below it."""
        process, at = self._processes[self._place.rank], ""
        if self._place.is_tree:
            at = self._listen_at(connection.here) if is_asking else LEAF
        return Greeting(self._number, self._size, process, at, self._without)

    # Who is below ---------------------------------------------------------------------------------

    def _listen_at(self, here: tuple[str, int]) -> str:
        """Listen at the address from which rank 0 was reached; return it and the port."""
        host = here[0]
        if not self._host.startswith(f"{host} "):
            family = family_of(host)
            try:
                new = system.create_server(
                    (host, 0, *here[2:]), family=family, backlog=self._backlog
                )
            except OSError as error:
                raise self._place.error(
                    f"cannot listen at {host}, for other hosts: {error}"
                ) from error
            self._listen(new)
            self._host = f"{host} {new.getsockname()[1]}"
        return self._host

    def _speak(self, secret: Secret) -> None:
        """Listen for the other ranks of this host, if it may have some and nobody else does."""
        self._secret = secret
        if self._inside or not self._place.is_tree or self._place.local_rank is None:
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
        self._inside = True

    def _name_inside(self, secret: Secret) -> str:
        """Return the name of the socket by which ranks of this host and run meet (unix(7))."""
        facts = b"inside", self._place.name.encode(), str(self._size).encode()
        return f"\0flashlight-{proof(secret.given or secret.of_user, *facts).hex()}"

    def _admit(self, candidate: Connection, greeting: Greeting) -> None:
        """Give a process its place, here or elsewhere, or report why there is none for it.

        Before the run stands nobody knows which of two processes that contradict each other is
        the right one, so it fails.
        """
        rank, size, peer, at, _ = greeting
        if rank == ANY_RANK:
            rank = min(self._places.free(), size - 1)
        reason, own = "", self._place.rank
        me = f"rank {own}: {self._processes[own]}"
        here = [self._processes[each] for each in (own, *self.members)]
        twin = next((each for each in here if each.machine and each.machine == peer.machine), None)
        if greeting.rank == ANY_RANK and twin and not self._place.one_host:
            reason = f"two processes of one host ask for a rank: {twin} and {peer}; "
        elif rank in self.members or rank == own:
            reason = f"two processes claim rank {rank}: {self._processes[rank]} and {peer}; "
        elif self._places.is_claimed(rank, identity(peer)):
            reason = f"two processes claim rank {rank}: {self._places.process(rank)} and {peer}; "
        if self._verdict:
            self._refuse(candidate, Kind.FAILURE, self._verdict)
            self._notified.add(rank)
        elif self._round > 0 and self._may_return(greeting):
            self._settle(candidate, rank, greeting)
        elif self._round > 0:
            reason += f"a run is under way at this {self._place.kind} already (its {me})"
            advice = f"wait for its end, or give every run a {self._place.own} of its own"
            self._refuse(candidate, Kind.FAILURE, f"{reason}; {advice}")
        elif size != self._size:
            reason = f"rank {rank} ({peer}) was started with world size {size}, rank {own} ("
            reason += f"{self._processes[own]}) with {self._size}; give every rank the same"
            raise self._disagreement(f"{reason} world size", rank, candidate)
        elif reason:
            advice = f"a rank of its own, and every run a {self._place.own} of its own"
            raise self._disagreement(f"{reason}give every process {advice}", rank, candidate)
        elif bool(at) != self._place.is_tree:
            reason = f"rank {rank} ({peer}) and rank {own} have different FLASHLIGHT_TREE_FROM"
            raise self._disagreement(f"{reason}; set the same on every rank", rank, candidate)
        else:
            self._settle(candidate, rank, greeting)

    def _may_return(self, greeting: Greeting) -> bool:
        """Return whether it is a rank of this run, whose connections were handed over."""
        is_other = self._is_root and self._places.is_claimed(greeting.rank, identity(greeting.peer))
        is_ours = self._has_handed_over and self._place.is_tree and greeting.size == self._size
        return is_ours and greeting.rank not in (ANY_RANK, self._number) and not is_other

    def _settle(self, candidate: Connection, rank: int, greeting: Greeting) -> None:
        """Tell a process its place; it becomes a member if that is here."""
        place, me = self._place, self._seat
        seat = Place(rank, me.rank, me.depth + 1, str(self._processes[place.rank]))
        if self._is_root and place.is_tree and greeting.at != LEAF:
            seat = self._places.place(rank, candidate, greeting)
        elif self._is_root:
            self._places.admit(rank, greeting.peer)
        candidate.rank, self._processes[rank] = rank, greeting.peer
        if self._is_root:
            self._ends[rank] = candidate.ends
            if candidate.handshake and not candidate.handshake.key:
                self._unproven.add(rank)
        candidate.trust(place.host_timeout)
        if not seat.host:
            self._candidates.remove(candidate)
            self.members[rank] = candidate
        candidate.send(Kind.PLACE, json.dumps(seat).encode(), system.monotonic() + SHORTLY)

    def _spoilt(self, connection: Connection, error: WireError) -> None:
        if connection.rank is not None and connection not in self._candidates:
            raise self._failure(f"{self._who(connection)} has sent what is no message: {error}")
        super()._spoilt(connection, error)

    # The end --------------------------------------------------------------------------------------

    def hand_over(self) -> dict[int, system.Socket]:
        """Return the connections of rank 0 to the others, or of these to rank 0."""
        up, self._up, self._has_handed_over = self._up, None, True
        found = self._take_out({self.above: up} if up else {})
        self._place.clear()
        if not self._place.is_tree and (self._place.moves or not self._is_root):
            self.close()
        return found

    @property
    def above(self) -> int:
        return self._seat.parent

    def take_in(self) -> dict[int, system.Socket]:
        """Serve who has come since, and return connections to those who have a place here."""
        for _ in range(self._size):  # who leaves makes room for who waits
            if not self.serve_ready(0.0):
                break
        return self._take_out({})

    def move(self, seconds: float) -> system.Socket:
        """Get another place, as the rank above is gone; returns the connection to the new one."""
        self._without, self._deadline = self.above, system.monotonic() + seconds
        self._join()
        return self.hand_over()[self.above]

    def _take_out(self, found: dict[int, Connection]) -> dict[int, system.Socket]:
        """Return the connections ``found`` and to members, which are the caller's from now on."""
        found |= self.members
        self.members = {}
        for each in found.values():
            if each.wire in self.selector.get_map():
                self.selector.unregister(each.wire)
            each.wire.setblocking(True)
        return {rank: each.wire for rank, each in found.items()}

    def leave(self) -> None:
        """Wait until all below have left, take leave, and stop listening. Rank 0 alone raises."""
        self._is_leaving, self._place.next_look = True, math.inf
        self._deadline = system.monotonic() + self._place.timeout
        has_asked = not self._place.is_tree
        try:
            while self.members.keys() - self._gone:
                is_over = system.monotonic() >= self._deadline
                self._serve(self._deadline)
                absent = self.members.keys() - self._gone
                if not is_over or not absent:
                    continue
                if has_asked:
                    raise self._failure(f"{name_ranks(absent)} joined and did not take leave")
                has_asked, self._deadline = True, system.monotonic() + _SETTLE / self._seat.depth
                self._ask(self._gone)
        except RendezvousError:  # which rank 0 has been told
            if self._is_root:
                raise
            return
        if self._up is not None:
            self._up.send(Kind.GOODBYE, b"", system.monotonic() + _ANSWER)
        self.close()

    def abort(self, reason: str) -> None:
        """Send the reason to all that are connected, or are about to be, and stop listening."""
        until = system.monotonic() + SHORTLY
        with suppress(RendezvousError):  # a second failure is no news
            if not self._is_root and self._up is None and self._round == 0:
                self._deadline = until
                self._join()  # the others wait for this rank to come
            # Take in who has joined since, and those that are just doing so.
            while (left := until - system.monotonic()) > 0:
                is_joining = any(not each.is_refused for each in self._candidates)
                if not self.serve_ready(left if is_joining else 0.0):
                    break
        self._failure(reason, joining=True)

    def _disagreement(self, reason: str, rank: int, culprit: Connection) -> RendezvousError:
        self._notified.add(rank)
        if not culprit.is_refused:
            self._refuse(culprit, Kind.FAILURE, reason)
        return self._failure(reason, joining=True)

    def _failure(self, reason: str, joining: bool = False) -> RendezvousError:
        """Notify all neighbours, and while ranks are ``joining`` those who do within two seconds.

        Ranks are started together: one that joins a moment later ought not to wait in vain.

        Returns:
            The error to raise.
        """
        error = self._place.error(reason)
        if self._verdict:
            return error
        self._verdict = reason
        deadline = system.monotonic() + SHORTLY
        for each in self._neighbours():
            each.send(Kind.FAILURE, reason.encode(), deadline)
        self._notified |= self.members.keys()
        if joining and self._round == 0 and self._listeners:
            expected = set(range(self._size)) - {self._place.rank} - self._places.given.keys()
            while expected - self._notified and system.monotonic() < deadline:
                self._serve(deadline)
        refused = (candidate for candidate in self._candidates if candidate.is_refused)
        for connection in (*self.members.values(), *refused):
            connection.shut()
            with suppress(WireError):
                while not connection.has_ended and system.monotonic() < deadline:
                    connection.receive(deadline - system.monotonic())
        self.close()
        return error

    def _neighbours(self) -> Iterable[Connection]:
        return (*([self._up] if self._up else []), *self.members.values())

    def close(self) -> None:
        """Stop listening, and close what is not handed over."""
        self.selector.close()
        wires = (each.wire for each in (*self._neighbours(), *self._candidates))
        for end in (*self._listeners, *wires):
            end.close()
        self._place.clear()
