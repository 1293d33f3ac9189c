"""The tree of ranks as rank 0 knows it: what each has given, and who is below whom."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from flashlight_py import system
from flashlight_py.distributed.rendezvous.store import ANY_RANK, Peer
from flashlight_py.distributed.rendezvous.wire import Connection, Greeting, Seat
from flashlight_py.interfaces import family_of, is_loopback

FAN = 8  # hosts below one: with more, one card sends more; with fewer, the tree is deeper

# A rank that comes again within so many seconds has not found its parent. From the second time on
# its place is below rank 0, which has so many beyond ``FAN``; at the fourth time in any case.
_SOON, _SPARE, _ANY = 30.0, 16, 1 << 31

# A rank, its parent, the length of its identity and that of its payload.
_ENTRY = struct.Struct("!4I")


def entry(rank: int, above: int, who: bytes, payload: bytes) -> bytes:
    """Return what a rank sends up. Entries are joined, and not looked at, on their way."""
    return _ENTRY.pack(rank, above, len(who), len(payload)) + who + payload


def _entries(body: bytes) -> Iterator[tuple[int, int, bytes, bytes]]:
    at = 0
    while at < len(body):
        rank, above, *lengths = _ENTRY.unpack_from(body, at)
        middle = at + _ENTRY.size + lengths[0]
        end = middle + lengths[1]
        yield rank, above, body[at + _ENTRY.size : middle], body[middle:end]
        at = end


def identity(peer: Peer) -> bytes:
    """Return which process ``peer`` is, the first line for people."""
    return f"{peer}\n{peer.machine}\n{peer.started}".encode(errors="replace")


@dataclass
class _Opening:
    """Room below a rank that listens for others."""

    rank: int
    depth: int
    peer: str
    host: str
    port: int
    room: int

    def suits(self, address: str) -> bool:
        """Return whether who comes from ``address`` to rank 0 is likely to get here as well."""
        is_near = not is_loopback(self.host) or is_loopback(address)
        return self.room > 0 and is_near and family_of(self.host) == family_of(address)


class Places:
    """The ranks below rank 0, a process ``peer``, and the places of hosts in order of arrival."""

    def __init__(self, peer: Peer) -> None:
        self.given: dict[int, bytes] = {}  # in this round, by rank
        # Whether all were asked what they have, and who has shown something since.
        self.asked, self.shown = False, set[int]()
        self.left: dict[int, str] = {}  # those that were here and have gone, and which these were
        self._who: dict[int, bytes] = {}
        self._above: dict[int, int] = {}
        self._root = _Opening(0, 0, str(peer), "", 0, FAN)
        self._openings: dict[int, _Opening] = {}
        # When who has lost the one above it came again, and how often.
        self._returned: dict[int, tuple[float, int]] = {}

    def begin(self, payload: bytes, is_first: bool) -> None:
        """Begin a round, in which rank 0 gives ``payload``. After the first nobody joins."""
        if not is_first:
            self._who.clear()
            self._openings.clear()
        self.given, self.asked = {0: payload}, False

    def end(self) -> None:
        """End the round: who has given something is known, what it was is in the roster."""
        self.given = dict.fromkeys(self.given, b"")

    def ask(self) -> None:
        """Note that all are asked what they have."""
        self.asked, self.shown = True, set()

    def take(self, body: bytes) -> str:
        """Note what entries say; returns why two of them contradict each other, or ""."""
        for rank, above, who, payload in _entries(body):
            if who:
                if self.is_claimed(rank, who):
                    one, other = self.process(rank), who.decode().partition("\n")[0]
                    return f"two processes claim rank {rank}: {one} and {other}"
                self._who[rank], self._above[rank] = who, above
                self.left.pop(rank, None)
            self.given[rank] = payload
            self.shown.add(rank)
        return ""

    def is_claimed(self, rank: int, who: bytes) -> bool:
        """Return whether another process than ``who`` has given something as ``rank``."""
        return rank in self.given and self._who.get(rank, who) != who

    def process(self, rank: int) -> str:
        """Return which process a rank is, for people."""
        return self._who[rank].decode().partition("\n")[0] if rank in self._who else "unknown"

    def lose(self, rank: int, above: int) -> None:
        """Forget what ``rank``, last seen below ``above``, and the ranks below it have given.

        Ranks that live give it again, in another place.
        """
        if not self.is_below(rank, above):
            return  # it has another place already
        self.left[rank] = self.process(rank)
        self._openings.pop(rank, None)
        gone, more = set[int](), {rank}
        while more:
            gone |= more
            more = {each for each, parent in self._above.items() if parent in more} - gone
        for each in gone:
            self.given.pop(each, None)
        del self._above[rank]

    def is_below(self, rank: int, above: int) -> bool:
        """Return whether ``above`` is where ``rank`` was seen last."""
        return self._above.get(rank) == above

    def missing(self, size: int) -> list[int]:
        """Return the ranks that have given nothing, or the ancestor that holds a payload up.

        A rank that runs answers when asked: an ancestor that has not ``shown`` anything is named.
        """
        named, silent = set(), set(range(size)) - self.given.keys()
        held = set[int]()
        if self.asked and not silent <= self._above.keys():  # of some nobody has heard anything
            held = self._above.keys() - self.shown
        for rank in silent | held:
            each = rank
            while (above := self._above.get(each, 0)) and self.asked and above not in self.shown:
                each = above
            named.add(each)
        return sorted(named)

    def admit(self, rank: int, peer: Peer) -> None:
        """Note that ``rank``, a process ``peer``, is right below rank 0."""
        self._above[rank], self._who[rank] = 0, identity(peer)

    def place(self, rank: int, candidate: Connection, greeting: Greeting) -> Seat:
        """Return where ``candidate`` belongs, a rank that speaks for its host."""
        found, address = self._root, candidate.address[0]
        room = self._root.room
        if greeting.without != ANY_RANK:
            now = system.monotonic()
            before, times = self._returned.get(rank, (-math.inf, 0))
            times = times + 1 if now < before + _SOON else 1
            self._returned[rank] = now, times
            room += (0, _SPARE, _SPARE, _ANY)[min(times, 4) - 1]
            if silent := self._openings.pop(greeting.without, None):
                self._openings[silent.rank] = silent  # others are sent there last
        if room <= 0:
            for opening in self._openings.values():
                is_other = opening.rank != greeting.without and not self._holds(rank, opening.rank)
                if is_other and opening.suits(address):
                    found = opening
                    break
        found.room -= 1
        if found.room == 0 and found.rank:
            del self._openings[found.rank]
        self._above[rank] = found.rank
        self._who[rank] = identity(greeting.peer)
        # Behind a NAT it has another address than others know it by, and one of IPv6 may be valid
        # on one link alone.
        host, _, port = greeting.at.partition(" ")
        if host == address and port.isdecimal() and not any(candidate.address[3:]):
            room = self._openings[rank].room if rank in self._openings else FAN
            new = _Opening(rank, found.depth + 1, str(greeting.peer), host, int(port), room)
            self._openings[rank] = new
        return Seat(rank, found.rank, found.depth + 1, found.peer, found.host, found.port)

    def _holds(self, rank: int, each: int) -> bool:
        """Return whether ``each`` is ``rank``, or somewhere below it."""
        while each and each != rank:
            each = self._above.get(each, 0)
        return each != 0
