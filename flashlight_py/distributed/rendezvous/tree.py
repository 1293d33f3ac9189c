"""A tree of ranks that exchange payloads: each rank sends its payload up and receives all payloads.

In a small job, rank 0 is the parent of all ranks. In a large one (``MeetingPoint.is_tree``) one
rank speaks for each host, and the other ranks of the host connect to this speaker by a local
socket. A speaker asks rank 0 for its parent and connects to it. A process has at most some dozens
of connections to other hosts. In the first exchange, payloads travel up in batches as they arrive;
a rank that loses its parent asks for another one and sends them again. In later exchanges each
node sends the payloads of its subtree at once, and a closed connection means a dead rank. A rank
that detects why the rendezvous fails notifies its neighbours, which notify theirs.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from operator import itemgetter
from selectors import EVENT_READ, EVENT_WRITE
from typing import Any

from flashlight_py import system
from flashlight_py.distributed.rendezvous.gate import SHORTLY, Gate, MeetingPoint
from flashlight_py.distributed.rendezvous.places import Places, entry, identity
from flashlight_py.distributed.rendezvous.secret import REMEDY
from flashlight_py.distributed.rendezvous.store import (
    ANY_RANK,
    Roster,
    Waiting,
    missing_text,
    name_ranks,
    unreachable_text,
)
from flashlight_py.distributed.rendezvous.wire import (
    LEAF,
    Connection,
    Greeting,
    Kind,
    Seat,
    WireError,
)
from flashlight_py.errors import RendezvousError
from flashlight_py.interfaces import source_address

# Seconds for rank 0 to report missing ranks, and additional seconds per tree level.
_ANSWER, _MORE = 2.0, 0.25
_SETTLE = 1.0  # seconds in which all ranks show what they have, when asked
_STALLED = 0.5  # seconds after which no rank waits for one that does not read its roster
_log = logging.getLogger("flashlight_py")


class TreeNode(Gate):
    """This rank in the tree: below another one, but for rank 0, and above others perhaps.

    Raises RendezvousError if this is rank 0, and it cannot listen at ``place``.
    """

    def __init__(self, place: MeetingPoint) -> None:
        super().__init__(place)
        self.members: dict[int, Connection] = {}  # right below
        self._is_root = place.rank == 0
        self._processes = {place.rank: self._process}
        self._places = Places(self._process)  # of rank 0
        self._own, self._roster = b"", b""
        self._pending: list[tuple[Kind, bytes]] = []  # to be sent up
        self._log: list[tuple[int, Kind, bytes]] = []  # what has been, in the first round, by whom
        self._complete: set[int] = set()  # members that have given all in this round
        self._shows = True  # payloads are sent up before all have arrived
        self._is_late = False  # time is up, and the parent knows it
        self._is_leaving, self._gone = False, set[int]()
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
        self._places.begin(payload, self._round == 0)
        if self._is_root:
            self._speak(place.known)
        waiting = Waiting(f"rendezvous at {place.name}{place.note}")
        self._pass_on()
        while not self._roster:
            is_over = system.monotonic() >= self._deadline
            due = min(waiting.due, place.next_look) if self._is_root else math.inf
            self._serve(min(self._deadline, due))
            if not self._roster:  # which is the last message upwards or downwards
                self._pass_on()
            if not self._roster:
                if is_over and system.monotonic() >= self._deadline:  # it may have been moved
                    self._time_is_up()
                if self._is_root:
                    self._look_around(waiting)
        self._finish()
        return Roster(self._roster)

    def _entry(self) -> bytes:
        who = b"" if self._round else identity(self._process)
        return entry(self._seat.rank, self._seat.parent, who, self._own)

    def _pass_on(self) -> None:
        """Send up what is to be sent now; rank 0 sees whether all is there."""
        if self._is_root:
            if len(given := self._places.given) == self._size:
                self._roster = Roster.of([given[rank] for rank in range(self._size)]).body
                self._places.end()
            return
        if self._up is None:
            self._join()
            again = ((kind, body) for _, kind, body in self._log)
            self._pending = [(Kind.PART, self._entry()), *again]
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
            waiting.log_missing(self._places.missing(self._size))

    def _finish(self) -> None:
        """Send all payloads down. A rank that reads nothing for a while gets the rest later."""
        self._round += 1
        if self._round == 1 and self._is_root:
            self._place.next_look, self._place.ends = math.inf, self._ends
            if self._unproven:  # nothing keeps strangers out
                _log.warning(
                    "%s joined from another host, and this job has no secret: anybody who can "
                    "reach %s could have joined, and had this program run what it sends; %s",
                    name_ranks(self._unproven),
                    self._place.name,
                    REMEDY,
                )
        self._log.clear()
        left = [each for each in self.members.values() if not each.send(Kind.ROSTER, self._roster)]
        with system.Selector() as selector:
            for member in left:
                selector.register(member.wire, EVENT_WRITE, member)
            while ready := selector.get_map() and selector.select(_STALLED):
                for key, _ in ready:
                    if key.data.flush():
                        selector.unregister(key.data.wire)
            for key in selector.get_map().values():
                self.selector.modify(key.data.wire, EVENT_READ | EVENT_WRITE, key.data)

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
            seconds = self._place.host_timeout
            raise self._failure(unreachable_text(self._who(connection), seconds), joining=True)
        if connection.has_ended:
            self._heard_end(connection, is_up, is_member)

    def _heard_below(self, rank: int, kind: Kind, body: bytes) -> None:
        if kind is Kind.GOODBYE:
            self._gone.add(rank)
            return
        if kind is Kind.PAYLOAD:
            self._complete.add(rank)
        if kind is Kind.LOST and self._round > 0 and self._up is not None:
            self._up.send(kind, body, self._deadline)
        elif self._is_root:
            if kind is Kind.LOST:
                self._heard_lost(body)
            elif claim := self._places.take(body):
                advice = f"give every process a rank of its own, and every run a {self._place.own}"
                raise self._failure(f"{claim}; {advice} of its own", joining=True)
        else:
            self._pending.append((Kind.LOST if kind is Kind.LOST else Kind.PART, body))
            if self._round == 0:
                self._log.append((rank, *self._pending[-1]))

    def _heard_lost(self, body: bytes) -> None:
        """Act as rank 0 on lost connections; ignore ranks that have another parent by now."""
        for line in body.decode().splitlines():
            rank, above, died = line.split(" ", 2)
            if self._round == 0:
                self._places.lose(int(rank), int(above))
            elif self._places.is_below(int(rank), int(above)):
                raise self._failure(died)

    def _heard_late(self, is_up: bool, body: bytes) -> None:
        """Act when time is up, unless the roster was sent meanwhile."""
        if body != str(self._round).encode():
            return
        if self._is_leaving:
            self._deadline = min(self._deadline, system.monotonic())
        elif is_up:
            self._shows = True
            self._pending.append((Kind.PART, self._entry()))
            self._ask(self._complete)
        elif not self._is_late:
            self._time_is_up()

    def _heard_end(self, connection: Connection, is_up: bool, is_member: bool) -> None:
        """Act on the end of a connection. In the first round, a rank may come again."""
        rank = connection.rank or 0
        if self._verdict or (is_member and rank in self._gone) or (is_up and self._is_leaving):
            self.selector.unregister(connection.wire)
            return
        self._drop(connection)
        if not (is_up or is_member):
            return
        died = f"{self._who(connection)} has died or exited: it closed the connection"
        lost = Kind.LOST, f"{rank} {self._seat.rank} {died}\n".encode()
        if is_up:
            self._up, self._without = None, rank or ANY_RANK
            self._bereft = died if rank else ""  # another rank 0 may come at any time
        else:
            del self.members[rank]
        if is_member and self._round > 0 and self._up is not None:
            self._up.send(*lost, self._deadline)
        elif self._round > 0 or (is_up and rank == 0 and not self._place.moves):
            raise self._failure(died)
        elif self._is_root:
            self._places.lose(rank, 0)
        elif is_member:
            self._pending.append(lost)
            self._log = [(ANY_RANK, *lost), *(each for each in self._log if each[0] != rank)]

    def _who(self, connection: Connection) -> str:
        rank = connection.rank or 0
        peer = self._seat.peer if connection is self._up else self._processes[rank]
        return f"rank {rank} of {self._size} ({peer})"

    # Time is up -----------------------------------------------------------------------------------

    def _time_is_up(self) -> None:
        """Notify the parent; rank 0 asks all ranks what they have.

        Raises RendezvousError once the missing ranks are known, or if the parent does not answer.
        """
        place, now = self._place, system.monotonic()
        if not self._is_root:
            if self._is_late or self._up is None:
                above = self._seat.parent
                raise self._failure(missing_text([above], self._size, place.timeout))
            self._up.send(Kind.LATE, str(self._round).encode(), now + _ANSWER)
            self._deadline = now + _ANSWER + _MORE * (self._seat.depth - 1)
        elif self._is_late or not place.is_tree:
            missing = self._places.missing(self._size) or [0]
            raise self._failure(self._not_arrived(missing))
        else:
            self._places.ask()
            self._ask(self._complete)
            self._deadline = now + _SETTLE
        self._is_late = True

    def _ask(self, done: set[int]) -> None:
        """Have members that are not ``done`` show what they have, or say whom they wait for."""
        for rank in self.members.keys() - done:
            self.members[rank].send(Kind.LATE, str(self._round).encode())

    def _not_arrived(self, missing: list[int]) -> str:
        known = self._places.left
        left = "".join(
            f"; rank {rank} ({known[rank]}) had joined and died or left"
            for rank in [rank for rank in missing if rank in known][:8]
        )
        sentence = missing_text(missing, self._size, self._place.timeout)
        hosts = ", ".join(sorted(self._turned_away))
        strangers = f"processes on {hosts} were turned away, as they know another secret: {REMEDY}"
        return f"{sentence}{left}; {self._place.remedy()}{f'; {strangers}' if hosts else ''}"

    # Who is below ---------------------------------------------------------------------------------

    def _admit(self, candidate: Connection, greeting: Greeting) -> None:
        """Give a process its place, here or elsewhere, or report why there is none for it.

        In the first round, two processes that contradict each other end the run.
        """
        rank, size, peer, at, _ = greeting
        if self._round == 0 and rank in self.members and self._processes[rank] == peer:
            self._heard_end(self.members[rank], False, True)  # it is read later that it has ended
        reason, own = "", self._place.rank
        me = f"rank {own}: {self._processes[own]}"
        if rank in self.members or rank == own:
            reason = f"two processes claim rank {rank}: {self._processes[rank]} and {peer}; "
        elif self._places.is_claimed(rank, identity(peer)):
            reason = f"two processes claim rank {rank}: {self._places.process(rank)} and {peer}; "
        if self._verdict:
            self._refuse(candidate, Kind.FAILURE, self._verdict)
            self._notified.add(rank)
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

    def _settle(self, candidate: Connection, rank: int, greeting: Greeting) -> None:
        """Tell a process its place; it becomes a member if that is here."""
        place, me = self._place, self._seat
        seat = Seat(rank, me.rank, me.depth + 1, str(self._processes[place.rank]))
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
                # A rank that is further from rank 0 gives up earlier, and says whom it waits for.
                settle = _SETTLE / (self._seat.depth or 0.5)
                has_asked, self._deadline = True, system.monotonic() + settle
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
            while system.monotonic() < until:
                is_joining = any(not each.is_refused for each in self._candidates)
                if not self._serve(until if is_joining else 0.0):
                    break
        self._failure(reason, joining=True)

    def _failure(self, reason: str, joining: bool = False) -> RendezvousError:
        """Notify all neighbours, and return the error to raise.

        While ranks are ``joining``, ranks that come within two seconds are notified, too.
        """
        error = self._place.error(reason)
        if self._verdict:
            return error
        self._verdict = reason
        deadline = system.monotonic() + SHORTLY
        for each in self._neighbours():
            each.send(Kind.FAILURE, reason.encode())
        self._notified |= self.members.keys()
        if joining and self._round == 0 and self._listeners:
            expected = set(range(self._size)) - {self._place.rank} - self._places.given.keys()
            while expected - self._notified and system.monotonic() < deadline:
                self._serve(deadline)
        refused = (candidate for candidate in self._candidates if candidate.is_refused)
        for connection in (*self._neighbours(), *refused):
            connection.flush(deadline)
            connection.shut()
            with suppress(WireError):
                while connection.take(deadline):
                    pass
        self.close()
        return error

    def _neighbours(self) -> Iterable[Connection]:
        return (*([self._up] if self._up else []), *self.members.values())

    def close(self) -> None:
        """Stop listening, and close all connections."""
        self.selector.close()
        wires = (each.wire for each in (*self._neighbours(), *self._candidates))
        for end in (*self._listeners, *wires):
            end.close()
        self._place.clear()


class TreeStore(MeetingPoint):
    """A store whose ranks meet in a tree."""

    def __init__(self, rank: int, size: int, timeout: float, loopback: Sequence[str] = ()) -> None:
        """``loopback`` are addresses of this host itself, one of which the ranks need."""
        self.rank, self.size, self.timeout = rank, size, timeout
        if size > 1 and loopback and not any(map(source_address, loopback)):
            raise self.error(
                f"this host cannot reach itself at {' or '.join(loopback)}: it has no loopback "
                "network; start it (ip link set lo up), as root of the container or sandbox"
            )
        self.node = TreeNode(self)
        self._has_ended = False

    def exchange(self, payload: bytes) -> Roster:
        if self._has_ended:
            raise self.error("this store was closed or has failed; make a new one")
        if self.size == 1:
            return Roster.of([payload])
        try:
            return self.node.exchange(bytes(payload))
        except RendezvousError:
            self._has_ended = True
            raise

    def close(self) -> None:
        """Leave; blocks until the ranks below have left. Rank 0 alone raises; see ``Store``."""
        if not self._has_ended:
            self._has_ended = True
            self.node.leave()

    def abort(self, reason: str) -> None:
        """Notify the connected ranks that this one aborts; waits up to 2 s until they know."""
        if not self._has_ended:
            self._has_ended = True
            self.node.abort(f"rank {self.rank} aborted: {reason}")
