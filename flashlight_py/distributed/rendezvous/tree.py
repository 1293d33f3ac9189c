"""A tree of ranks: each rank sends its payload towards rank 0, and receives all payloads.

In a small job, rank 0 is the parent of all ranks. In a large job (``MeetingPoint.is_tree``), the
speakers of the hosts form the tree (gate.py), so a process has at most some dozens of connections
to other hosts. In the first exchange, payloads travel up in batches as they arrive. A rank that
loses its parent asks for another parent and sends the payloads again.
In later exchanges, each rank waits for its whole subtree and sends all of its payloads together,
and a closed connection means a dead rank. A rank that detects a failure notifies its neighbours,
which notify their neighbours.
"""

import itertools
import json
import logging
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from selectors import EVENT_READ, EVENT_WRITE
from typing import Any

from flashlight_py import system
from flashlight_py.distributed.rendezvous import store, wire
from flashlight_py.distributed.rendezvous.gate import SHORT_SECONDS, Gate, MeetingPoint
from flashlight_py.distributed.rendezvous.secret import REMEDY
from flashlight_py.distributed.rendezvous.wire import Connection, Greeting, Kind
from flashlight_py.errors import RendezvousError
from flashlight_py.interfaces import family_of, is_loopback, source_address

FAN = 8  # children of a host: a larger value loads each host more, a smaller value adds levels

# A rank that asks again for a parent within ``_SOON`` seconds has not reached its parent. On its
# second and third request, rank 0 has ``_SPARE`` extra slots, and then ``_ANY`` (no limit).
_SOON, _SPARE, _ANY = 30.0, 16, 1 << 31

# Header of an entry: rank, parent's rank, length of the identity, length of the payload.
_ENTRY = struct.Struct("!4I")


def entry(rank: int, parent: int, who: bytes, payload: bytes) -> bytes:
    """Return the entry that ``rank`` sends to ``parent``; ``who`` is its ``identity``, or b""."""
    return _ENTRY.pack(rank, parent, len(who), len(payload)) + who + payload


def _entries(body: bytes) -> Iterator[tuple[int, int, bytes, bytes]]:
    offset = 0
    while offset < len(body):
        rank, parent, *lengths = _ENTRY.unpack_from(body, offset)
        middle = offset + _ENTRY.size + lengths[0]
        end = middle + lengths[1]
        yield rank, parent, body[offset + _ENTRY.size : middle], body[middle:end]
        offset = end


def identity(peer: store.Peer) -> bytes:
    """Return lines that identify the process ``peer``. Errors show only the first line."""
    return f"{peer}\n{peer.machine}\n{peer.started}".encode(errors="replace")


@dataclass
class _Opening:
    """A rank that listens for children, and the number of its free slots."""

    rank: int
    depth: int
    peer: str
    host: str
    port: int
    room: int

    def accepts(self, address: str) -> bool:
        """Return whether a rank that rank 0 sees at ``address`` can probably reach this rank."""
        is_near = not is_loopback(self.host) or is_loopback(address)
        return self.room > 0 and is_near and family_of(self.host) == family_of(address)


class TreeRecord:
    """The tree below rank 0, the process ``peer``. Hosts get positions in the order of requests."""

    def __init__(self, peer: store.Peer) -> None:
        self.payloads: dict[int, bytes] = {}  # payloads of this round, by rank
        # Whether all ranks were asked for their payloads, and the ranks that have answered since.
        self.is_asked, self.answered = False, set[int]()
        self.departed: dict[int, str] = {}  # descriptions of ranks that joined and left
        self._identities: dict[int, bytes] = {}
        self._parents: dict[int, int] = {}
        self._root = _Opening(0, 0, str(peer), "", 0, FAN)
        self._openings: dict[int, _Opening] = {}
        # For each rank that lost its parent: time of its last request, and number of requests.
        self._returned: dict[int, tuple[float, int]] = {}

    def begin(self, payload: bytes, is_first: bool) -> None:
        """Begin a round with the ``payload`` of rank 0. Ranks join only in the first round."""
        if not is_first:
            self._identities.clear()
            self._openings.clear()
        self.payloads, self.is_asked = {0: payload}, False

    def end(self) -> None:
        """End the round. Keep the ranks, but not their payloads: the roster contains them."""
        self.payloads = dict.fromkeys(self.payloads, b"")

    def ask(self) -> None:
        """Record that all ranks were asked for their payloads."""
        self.is_asked, self.answered = True, set()

    def add_entries(self, body: bytes) -> str:
        """Record the entries in ``body``. Return why two entries contradict each other, or ""."""
        for rank, parent, who, payload in _entries(body):
            if who:
                if self.is_claimed(rank, who):
                    first, second = self.process(rank), who.decode().partition("\n")[0]
                    return f"two processes claim rank {rank}: {first} and {second}"
                self._identities[rank], self._parents[rank] = who, parent
                self.departed.pop(rank, None)
            self.payloads[rank] = payload
            self.answered.add(rank)
        return ""

    def is_claimed(self, rank: int, who: bytes) -> bool:
        """Return whether a process other than ``who`` has sent an entry of ``rank``."""
        return rank in self.payloads and self._identities.get(rank, who) != who

    def process(self, rank: int) -> str:
        return self._identities.get(rank, b"unknown").decode().partition("\n")[0]

    def remove(self, rank: int, parent: int) -> None:
        """If ``parent`` is the parent of ``rank``, remove ``rank`` and all payloads of its subtree.

        Live ranks of the subtree send their payloads again, from their new position.
        """
        if not self.is_below(rank, parent):
            return  # the rank already has another parent
        self.departed[rank] = self.process(rank)
        self._openings.pop(rank, None)
        lost, more = set[int](), {rank}
        while more:
            lost |= more
            more = {child for child, parent in self._parents.items() if parent in more} - lost
        for child in lost:
            self.payloads.pop(child, None)
        del self._parents[rank]

    def is_below(self, rank: int, parent: int) -> bool:
        return self._parents.get(rank) == parent

    def missing(self, size: int) -> list[int]:
        """Return the ranks without a payload; if a rank's ancestor is silent, return the ancestor.

        All live ranks answer after ``ask``, so a silent ancestor is the cause.
        """
        named, silent = set(), set(range(size)) - self.payloads.keys()
        silent_parents = set[int]()
        if self.is_asked and not silent <= self._parents.keys():  # some ranks have never joined
            silent_parents = self._parents.keys() - self.answered
        for rank in silent | silent_parents:
            ancestor = rank
            while self.is_asked and (parent := self._parents.get(ancestor, 0)):
                if parent in self.answered:
                    break
                ancestor = parent
            named.add(ancestor)
        return sorted(named)

    def admit(self, rank: int, peer: store.Peer) -> None:
        """Record that ``rank``, the process ``peer``, is a child of rank 0."""
        self._parents[rank], self._identities[rank] = 0, identity(peer)

    def assign(self, rank: int, candidate: Connection, greeting: Greeting) -> wire.Position:
        """Return the position of ``candidate``, the speaker of its host."""
        opening, address = self._root, candidate.address[0]
        room = self._root.room
        if greeting.lost_parent != store.ANY_RANK:
            now = system.monotonic()
            last, times = self._returned.get(rank, (-math.inf, 0))
            times = times + 1 if now < last + _SOON else 1
            self._returned[rank] = now, times
            room += (0, _SPARE, _SPARE, _ANY)[min(times, 4) - 1]
            if silent := self._openings.pop(greeting.lost_parent, None):
                self._openings[silent.rank] = silent  # move it to the end: other ranks use it last
        if room <= 0:
            for other in self._openings.values():
                is_usable = other.accepts(address) and other.rank != greeting.lost_parent
                if is_usable and not self._is_in_subtree(rank, other.rank):
                    opening = other
                    break
        opening.room -= 1
        if opening.room == 0 and opening.rank:
            del self._openings[opening.rank]
        self._parents[rank] = opening.rank
        self._identities[rank] = identity(greeting.peer)
        # A rank gets children only if its own address is the one that rank 0 sees (behind a NAT
        # they differ), without a zone: an IPv6 address with a zone is valid on one link only.
        host, _, port = greeting.listens_at.partition(" ")
        if host == address and port.isdecimal() and not any(candidate.address[3:]):
            room = self._openings[rank].room if rank in self._openings else FAN
            new = _Opening(rank, opening.depth + 1, str(greeting.peer), host, int(port), room)
            self._openings[rank] = new
        endpoint = opening.peer, opening.host, opening.port
        return wire.Position(rank, opening.rank, opening.depth + 1, *endpoint)

    def _is_in_subtree(self, rank: int, other: int) -> bool:
        """Return whether ``other`` is ``rank`` or in the subtree of ``rank``."""
        while other and other != rank:
            other = self._parents.get(other, 0)
        return other != 0


# Seconds for rank 0 to report missing ranks, and additional seconds per tree level.
_ANSWER_SECONDS, _LEVEL_SECONDS = 2.0, 0.25
_QUERY_SECONDS = 1.0  # seconds that ranks have to send the payloads that rank 0 asks for
_STALL_SECONDS = 0.5  # seconds to wait for a child that does not read the roster
_log = logging.getLogger("flashlight_py")


class TreeNode(Gate):
    """This rank in the tree. RendezvousError if it is rank 0 and cannot listen at ``point``."""

    def __init__(self, point: MeetingPoint) -> None:
        super().__init__(point)
        self.members: dict[int, Connection] = {}  # connections to children
        self._is_root = point.rank == 0
        self._processes = {point.rank: self._process}
        self._record = TreeRecord(self._process)  # used by rank 0
        self._payload, self._roster = b"", b""
        self._pending: list[tuple[Kind, bytes]] = []  # messages for the parent
        self._log: list[tuple[int, Kind, bytes]] = []  # messages of round 0: (child, kind, body)
        self._complete: set[int] = set()  # children that sent all payloads of their subtree
        self._sends_partial = True  # True: send payloads up before the subtree is complete
        self._is_late = False  # whether the deadline has passed and the parent was notified
        self._is_leaving, self._departed = False, set[int]()
        # On rank 0. ``_ends``: both ends of connections, by rank. ``_unproven``: ranks without a
        # secret.
        self._ends: dict[int, tuple[Any, Any]] = {}
        self._unproven: set[int] = set()
        if self._is_root and point.size > 1:
            try:
                for listener in point.listen(self._backlog):
                    self._listen(listener)
            except OSError as error:
                raise point.error(str(error)) from error

    def exchange(self, payload: bytes) -> store.Roster:
        """Send ``payload``, and return the payloads of all ranks."""
        point = self._point
        self._deadline = system.monotonic() + point.timeout
        self._payload, self._roster, self._complete = payload, b"", set()
        self._sends_partial, self._is_late = self._round == 0, False
        self._pending = [(Kind.PART, self._entry())] if self._round else []
        self._record.begin(payload, self._round == 0)
        if self._is_root:
            self._become_speaker(point.job_secret)
        waiting = store.Waiting(f"rendezvous at {point.name}{point.note}")
        self._send_up()
        while not self._roster:
            is_over = system.monotonic() >= self._deadline
            due = min(waiting.due, point.next_poll) if self._is_root else math.inf
            self._serve(min(self._deadline, due))
            if not self._roster:  # the roster ends a round
                self._send_up()
            if not self._roster:
                if is_over and system.monotonic() >= self._deadline:  # the deadline may have moved
                    self._handle_deadline()
                if self._is_root:
                    self._poll(waiting)
        self._finish()
        return store.Roster(self._roster)

    def _entry(self) -> bytes:
        who = b"" if self._round else identity(self._process)
        return entry(self._position.rank, self._position.parent, who, self._payload)

    def _send_up(self) -> None:
        """Send pending messages to the parent. Rank 0 creates the roster if all payloads exist."""
        if self._is_root:
            if len(payloads := self._record.payloads) == self._size:
                self._roster = store.Roster.of([payloads[rank] for rank in range(self._size)]).body
                self._record.end()
            return
        if self._up is None:
            self._join()
            again = ((kind, body) for _, kind, body in self._log)
            self._pending = [(Kind.PART, self._entry()), *again]
        assert self._up is not None
        is_complete = self._round > 0 and self._complete >= self.members.keys()
        if is_complete or self._sends_partial:
            pending, self._pending = self._pending, []
            for kind, group in itertools.groupby(pending, itemgetter(0)):
                sent_kind = Kind.PAYLOAD if is_complete and kind is Kind.PART else kind
                self._up.send(sent_kind, b"".join(body for _, body in group), self._deadline)

    def _poll(self, waiting: store.Waiting) -> None:
        if system.monotonic() >= self._point.next_poll:
            try:
                listener = self._point.poll()
            except RendezvousError as error:
                self._failure(str(error))
                raise
            if listener is not None:
                self._listen(listener)
        if system.monotonic() >= waiting.due:
            waiting.log_missing(self._record.missing(self._size))

    def _finish(self) -> None:
        """Send the roster to all children. Slow children get the remaining bytes later."""
        self._round += 1
        if self._round == 1 and self._is_root:
            self._point.next_poll, self._point.ends = math.inf, self._ends
            if self._unproven:  # no secret protects the job
                _log.warning(
                    "%s joined from another host, and this job has no secret: any process that can "
                    "reach %s could have joined, and could run code in this program; %s",
                    store.name_ranks(self._unproven),
                    self._point.name,
                    REMEDY,
                )
        self._log.clear()
        children, roster = self.members.values(), self._roster
        waiting = [child for child in children if not child.send(Kind.ROSTER, roster)]
        with system.Selector() as selector:
            for member in waiting:
                selector.register(member.wire, EVENT_WRITE, member)
            while ready := selector.get_map() and selector.select(_STALL_SECONDS):
                for key, _ in ready:
                    if key.data.flush():
                        selector.unregister(key.data.wire)
            for key in selector.get_map().values():
                self.selector.modify(key.data.wire, EVENT_READ | EVENT_WRITE, key.data)

    # Messages of other ranks ----------------------------------------------------------------------

    def _handle_messages(self, connection: Connection) -> None:
        messages, is_up = connection.inbox, connection is self._up
        is_member = not is_up and self.members.get(connection.rank or 0) is connection
        while messages and not self._verdict:
            kind, body = messages.popleft()
            if kind is Kind.FAILURE:
                raise self._failure(body.decode(errors="replace"), joining=True)
            if kind is Kind.LATE:
                self._handle_late(is_up, body)
            elif kind is Kind.ROSTER and is_up:
                self._roster = body
            elif is_member:
                self._handle_child(connection.rank or 0, kind, body)
        messages.clear()
        if (is_up or is_member) and connection.is_unreachable and not self._verdict:
            seconds = self._point.host_timeout
            raise self._failure(
                store.unreachable_text(self._describe(connection), seconds), joining=True
            )
        if connection.has_ended:
            self._handle_end(connection, is_up, is_member)

    def _handle_child(self, rank: int, kind: Kind, body: bytes) -> None:
        if kind is Kind.GOODBYE:
            self._departed.add(rank)
            return
        if kind is Kind.PAYLOAD:
            self._complete.add(rank)
        if kind is Kind.LOST and self._round > 0 and self._up is not None:
            self._up.send(kind, body, self._deadline)
        elif self._is_root:
            if kind is Kind.LOST:
                self._handle_lost(body)
            elif claim := self._record.add_entries(body):
                advice = "give every process its own rank, and every run its own"
                raise self._failure(f"{claim}; {advice} {self._point.run_option}", joining=True)
        else:
            self._pending.append((Kind.LOST if kind is Kind.LOST else Kind.PART, body))
            if self._round == 0:
                self._log.append((rank, *self._pending[-1]))

    def _handle_lost(self, body: bytes) -> None:
        """On rank 0, handle a report of lost ranks. Ignore ranks that have a new parent."""
        for line in body.decode().splitlines():
            rank, parent, reason = line.split(" ", 2)
            if self._round == 0:
                self._record.remove(int(rank), int(parent))
            elif self._record.is_below(int(rank), int(parent)):
                raise self._failure(reason)

    def _handle_late(self, is_up: bool, body: bytes) -> None:
        """Handle a LATE message (see ``Kind``). Ignore it if it belongs to another round."""
        if body != str(self._round).encode():
            return
        if self._is_leaving:
            self._deadline = min(self._deadline, system.monotonic())
        elif is_up:
            self._sends_partial = True
            self._pending.append((Kind.PART, self._entry()))
            self._ask(self._complete)
        elif not self._is_late:
            self._handle_deadline()

    def _handle_end(self, connection: Connection, is_up: bool, is_member: bool) -> None:
        """Handle a closed connection. In the first round, its peer process may connect again."""
        rank = connection.rank or 0
        if self._verdict or (is_member and rank in self._departed) or (is_up and self._is_leaving):
            self.selector.unregister(connection.wire)
            return
        self._drop(connection)
        if not (is_up or is_member):
            return
        died = f"{self._describe(connection)} has died or exited: it closed the connection"
        lost = Kind.LOST, f"{rank} {self._position.rank} {died}\n".encode()
        if is_up:
            self._up, self._lost_parent = None, rank or store.ANY_RANK
            self._loss = died if rank else ""  # another process may replace a lost rank 0
        else:
            del self.members[rank]
        if is_member and self._round > 0 and self._up is not None:
            self._up.send(*lost, self._deadline)
        elif self._round > 0 or (is_up and rank == 0 and not self._point.can_move):
            raise self._failure(died)
        elif self._is_root:
            self._record.remove(rank, 0)
        elif is_member:
            self._pending.append(lost)
            self._log = [
                (store.ANY_RANK, *lost),
                *(entry for entry in self._log if entry[0] != rank),
            ]

    def _describe(self, connection: Connection) -> str:
        rank = connection.rank or 0
        peer = self._position.peer if connection is self._up else self._processes[rank]
        return f"rank {rank} of {self._size} ({peer})"

    # Deadlines -----------------------------------------------------------------------------------

    def _handle_deadline(self) -> None:
        """At the first deadline, notify the parent; rank 0 asks all ranks for their payloads.

        At the second deadline, raise RendezvousError. Rank 0 of a small job raises at the first.
        """
        point, now = self._point, system.monotonic()
        if not self._is_root:
            if self._is_late or self._up is None:
                parent = self._position.parent
                raise self._failure(store.missing_text([parent], self._size, point.timeout))
            self._up.send(Kind.LATE, str(self._round).encode(), now + _ANSWER_SECONDS)
            self._deadline = now + _ANSWER_SECONDS + _LEVEL_SECONDS * (self._position.depth - 1)
        elif self._is_late or not point.is_tree:
            raise self._failure(self._missing_error(self._record.missing(self._size) or [0]))
        else:
            self._record.ask()
            self._ask(self._complete)
            self._deadline = now + _QUERY_SECONDS
        self._is_late = True

    def _ask(self, done: set[int]) -> None:
        for rank in self.members.keys() - done:
            self.members[rank].send(Kind.LATE, str(self._round).encode())

    def _missing_error(self, missing: list[int]) -> str:
        pairs = [(rank, self._record.departed.get(rank)) for rank in missing]
        ended = [f"; rank {rank} ({who}) had joined and died or left" for rank, who in pairs if who]
        left = "".join(ended[:8])
        sentence = store.missing_text(missing, self._size, self._point.timeout)
        hosts = ", ".join(sorted(self._rejected_hosts))
        strangers = f"processes on {hosts} were rejected, as they have another secret: {REMEDY}"
        return f"{sentence}{left}; {self._point.remedy()}{f'; {strangers}' if hosts else ''}"

    # Admission -----------------------------------------------------------------------------------

    def _admit(self, candidate: Connection, greeting: Greeting) -> None:
        """Give a process its position in the tree, or reject it with a reason.

        In the first round, the run fails if two processes claim one rank or differ in a setting.
        """
        rank, size, peer, listens_at, _ = greeting
        if self._round == 0 and rank in self.members and self._processes[rank] == peer:
            self._handle_end(self.members[rank], False, True)  # the same process connects again
        reason, own_rank = "", self._point.rank
        own_text = f"rank {own_rank}: {self._processes[own_rank]}"
        if rank in self.members or rank == own_rank:
            reason = f"two processes claim rank {rank}: {self._processes[rank]} and {peer}; "
        elif self._record.is_claimed(rank, identity(peer)):
            reason = f"two processes claim rank {rank}: {self._record.process(rank)} and {peer}; "
        if self._verdict:
            self._reject(candidate, Kind.FAILURE, self._verdict)
            self._notified.add(rank)
        elif self._round > 0:
            reason += f"another run has started at this {self._point.kind} (its {own_text})"
            advice = f"wait for its end, or give every run its own {self._point.run_option}"
            self._reject(candidate, Kind.FAILURE, f"{reason}; {advice}")
        elif size != self._size:
            other = f"rank {own_rank} ({self._processes[own_rank]}) has {self._size}"
            reason = f"rank {rank} ({peer}) has world size {size}, but {other}"
            advice = "give every rank the same world size"
            raise self._disagreement(f"{reason}; {advice}", rank, candidate)
        elif reason:
            advice = f"its own rank, and every run its own {self._point.run_option}"
            raise self._disagreement(f"{reason}give every process {advice}", rank, candidate)
        elif bool(listens_at) != self._point.is_tree:
            reason = f"rank {rank} ({peer}) and rank {own_rank} have different FLASHLIGHT_TREE_FROM"
            raise self._disagreement(f"{reason}; set the same value on every rank", rank, candidate)
        else:
            self._assign_position(candidate, rank, greeting)

    def _assign_position(self, candidate: Connection, rank: int, greeting: Greeting) -> None:
        """Send a process its position. If its parent is this rank, the process becomes a child."""
        point, here, process = self._point, self._position, str(self._processes[self._point.rank])
        position = here._replace(rank=rank, parent=here.rank, depth=here.depth + 1, peer=process)
        if self._is_root and point.is_tree and greeting.listens_at != wire.LEAF:
            position = self._record.assign(rank, candidate, greeting)
        elif self._is_root:
            self._record.admit(rank, greeting.peer)
        candidate.rank, self._processes[rank] = rank, greeting.peer
        if self._is_root:
            self._ends[rank] = candidate.ends
            if candidate.handshake and not candidate.handshake.key:
                self._unproven.add(rank)
        candidate.trust(point.host_timeout)
        if not position.host:
            self._candidates.remove(candidate)
            self.members[rank] = candidate
        body, deadline = json.dumps(position).encode(), system.monotonic() + SHORT_SECONDS
        candidate.send(Kind.POSITION, body, deadline)

    def _handle_invalid(self, connection: Connection, error: wire.WireError) -> None:
        if connection.rank is not None and connection not in self._candidates:
            raise self._failure(f"{self._describe(connection)} sent an invalid message: {error}")
        super()._handle_invalid(connection, error)

    # Leaving -------------------------------------------------------------------------------------

    def leave(self) -> None:
        """Wait until all children have left, notify the parent, and close. Only rank 0 raises."""
        self._is_leaving, self._point.next_poll = True, math.inf
        self._deadline = system.monotonic() + self._point.timeout
        has_asked = not self._point.is_tree
        try:
            while self.members.keys() - self._departed:
                is_over = system.monotonic() >= self._deadline
                self._serve(self._deadline)
                absent = self.members.keys() - self._departed
                if not is_over or not absent:
                    continue
                if has_asked:
                    raise self._failure(f"{store.name_ranks(absent)} joined and did not leave")
                # A rank deeper in the tree waits for a shorter time, because its error must come
                # first: it names the absent ranks.
                settle = _QUERY_SECONDS / (self._position.depth or 0.5)
                has_asked, self._deadline = True, system.monotonic() + settle
                self._ask(self._departed)
        except RendezvousError:  # rank 0 raises it
            if self._is_root:
                raise
            return
        if self._up is not None:
            self._up.send(Kind.GOODBYE, b"", system.monotonic() + _ANSWER_SECONDS)
        self.close()

    def abort(self, reason: str) -> None:
        """Send the reason to all ranks that are connected or connecting, and stop listening."""
        until = system.monotonic() + SHORT_SECONDS
        with suppress(RendezvousError):  # this rank aborts in any case
            if not self._is_root and self._up is None and self._round == 0:
                self._deadline = until
                self._join()  # the other ranks wait for this rank
            # Accept ranks that connected during the join, or are connecting now.
            while system.monotonic() < until:
                is_joining = any(not candidate.is_rejected for candidate in self._candidates)
                if not self._serve(until if is_joining else 0.0):
                    break
        self._failure(reason, joining=True)

    def _failure(self, reason: str, joining: bool = False) -> RendezvousError:
        """Notify the parent and all children of ``reason``, and return the error to raise.

        With ``joining``, notify ranks that connect within the next two seconds as well.
        """
        error = self._point.error(reason)
        if self._verdict:
            return error
        self._verdict = reason
        deadline = system.monotonic() + SHORT_SECONDS
        for neighbour in self._neighbours():
            neighbour.send(Kind.FAILURE, reason.encode())
        self._notified |= self.members.keys()
        if joining and self._round == 0 and self._listeners:
            expected = set(range(self._size)) - {self._point.rank} - self._record.payloads.keys()
            while expected - self._notified and system.monotonic() < deadline:
                self._serve(deadline)
        refused = (candidate for candidate in self._candidates if candidate.is_rejected)
        for connection in (*self._neighbours(), *refused):
            connection.flush(deadline)
            connection.shut()
            with suppress(wire.WireError):
                while connection.take(deadline):
                    pass
        self.close()
        return error

    def _neighbours(self) -> Iterable[Connection]:
        return (*([self._up] if self._up else []), *self.members.values())

    def close(self) -> None:
        self.selector.close()
        wires = (connection.wire for connection in (*self._neighbours(), *self._candidates))
        for end in (*self._listeners, *wires):
            end.close()
        self._point.clear()


class TreeStore(MeetingPoint):
    """A store that connects the ranks in a tree."""

    def __init__(self, rank: int, size: int, timeout: float, loopback: Sequence[str] = ()) -> None:
        """Create the tree. Raise an error if this host reaches no address of ``loopback``."""
        self.rank, self.size, self.timeout = rank, size, timeout
        if size > 1 and loopback and not any(map(source_address, loopback)):
            raise self.error(
                f"this host cannot reach itself at {' or '.join(loopback)}: its loopback network "
                "is down. Start it as root of the container or sandbox (ip link set lo up)"
            )
        self.node = TreeNode(self)
        self._has_ended = False

    def exchange(self, payload: bytes) -> store.Roster:
        if self._has_ended:
            raise self.error("this store was closed or has failed. Create a new store")
        if self.size == 1:
            return store.Roster.of([payload])
        try:
            return self.node.exchange(bytes(payload))
        except RendezvousError:
            self._has_ended = True
            raise

    def close(self) -> None:
        """Leave; blocks until all children have left. Only rank 0 raises; see ``Store``."""
        if not self._has_ended:
            self._has_ended = True
            self.node.leave()

    def abort(self, reason: str) -> None:
        """Notify connected ranks that this rank aborts; waits at most 2 s."""
        if not self._has_ended:
            self._has_ended = True
            self.node.abort(f"rank {self.rank} aborted: {reason}")
