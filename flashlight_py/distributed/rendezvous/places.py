"""The tree of ranks as rank 0 records it: the payload and the parent of each rank."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from flashlight_py import system
from flashlight_py.distributed.rendezvous.store import ANY_RANK, Peer
from flashlight_py.distributed.rendezvous.wire import Connection, Greeting, Position
from flashlight_py.interfaces import family_of, is_loopback

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


def identity(peer: Peer) -> bytes:
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

    def __init__(self, peer: Peer) -> None:
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

    def admit(self, rank: int, peer: Peer) -> None:
        """Record that ``rank``, the process ``peer``, is a child of rank 0."""
        self._parents[rank], self._identities[rank] = 0, identity(peer)

    def assign(self, rank: int, candidate: Connection, greeting: Greeting) -> Position:
        """Return the position of ``candidate``, the speaker of its host."""
        opening, address = self._root, candidate.address[0]
        room = self._root.room
        if greeting.lost_parent != ANY_RANK:
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
        return Position(rank, opening.rank, opening.depth + 1, *endpoint)

    def _is_in_subtree(self, rank: int, other: int) -> bool:
        """Return whether ``other`` is ``rank`` or in the subtree of ``rank``."""
        while other and other != rank:
            other = self._parents.get(other, 0)
        return other != 0
