"""Groups of connected ranks: the package's ``new_group`` on virtual connections.

The comparison of the parent's ranks, an all_gather, has a stand-in. As in csrc/gloo, each host
forwards its data to the
hosts at distance 1, 2, 4 and so on. Messages between two ranks are real, in virtual time.
"""

import json
import struct
from collections.abc import Sequence
from contextlib import ExitStack
from functools import lru_cache
from math import ceil, log2
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from greenlet import getcurrent

from flashlight_py import system
from flashlight_py.distributed.api import groups
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.groups.membership import Joiner, Membership
from flashlight_py.distributed.rendezvous.store import Store, Subgroup
from flashlight_py.distributed.start import initialize
from flashlight_py.distributed.start.settings import Settings
from flashlight_py.distributed.verbs import RECV, SEND
from flashlight_py.distributed.work import Done, Work
from tests.simulation import costs
from tests.simulation.network import ACROSS, BYTE
from tests.simulation.scenario import Joined, Start
from tests.simulation.world import me

_PORT = 40000
_PER_HOST = 8


class Made(NamedTuple):
    """Seconds until the last rank had its group, and the costs of the busiest rank."""

    seconds: float
    messages: int
    connections: int


class _World(Joined):
    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.network = self.memory = self
        self.network_ranks, self.memory_ranks = range(size), _LocalNumbers(rank // _PER_HOST)
        self._listener = system.create_server(("", _PORT + rank % _PER_HOST), backlog=4096)
        self._wires: dict[int, Any] = {}

    def subgroup(self, ranks: Sequence[int], count: int, *_: Any) -> Subgroup:
        """Return a group of ``ranks`` on these connections, or in this memory."""
        return Subgroup(self, ranks, count, False)

    def start(self, call: Call) -> Work:
        if call.verb is SEND:
            self._to(call.peer).sendall(call.array.tobytes())
        else:
            assert call.verb is RECV, f"a call of {call}"
            wire, data = self._from(call.peer), b""
            while len(data) < call.array.nbytes:
                data += wire.recv(call.array.nbytes - len(data))
            call.array.view("u1")[:] = memoryview(data)
        return Done(call.array)

    def _to(self, peer: int) -> Any:
        if peer not in self._wires:
            wire = self._wires[peer] = system.Socket()
            number = peer // _PER_HOST + 1
            address = f"10.{number >> 16 & 255}.{number >> 8 & 255}.{number & 255}"
            wire.connect_ex((address, _PORT + peer % _PER_HOST))
            while not wire.is_connected:
                wire.wait(None)
            wire.sendall(struct.pack("!I", self.rank))
        return self._wires[peer]

    def _from(self, peer: int) -> Any:
        while peer not in self._wires:
            while not self._listener.is_readable():
                self._listener.wait(None)
            wire, _ = self._listener.accept()
            (other,) = struct.unpack("!I", wire.recv(4))
            self._wires[other] = wire
        return self._wires[peer]


class _LocalNumbers:
    def __init__(self, host: int) -> None:
        self._host = host

    def __getitem__(self, rank: int) -> int:
        host, number = divmod(rank, _PER_HOST)
        return number if host == self._host else -1


class Grouping(Start):
    def __init__(self, ranks: int, seed: int, members: Sequence[int]) -> None:
        super().__init__(ranks, seed, _PER_HOST, begin=self._make)
        self.members_of = dict.fromkeys(range(ranks), members)  # by each rank
        self._cards: dict[int, bytes] = {}
        self._waiting: list[Any] = []  # fibers in the comparison
        self._cards_of_all: list[bytes] = []

    def _make(self, rank: int, size: int, timeout: float) -> None:
        settings = Settings(timeout=timeout)

        def join(store: Store) -> Backend:
            return initialize.connect(store, settings).backend

        joiner = Joiner(join, lambda cpu: cpu, lambda seconds: joiner)
        groups.new_group(self.members_of[rank], group=Membership(_World(rank, size), None, joiner))

    def _compare(self, backend: Any, card: bytes, _: str) -> list[bytes]:
        """Stand-in for an all_gather of all ranks, see the module docstring."""
        self._cards[backend.rank] = card
        size, hosts = self.ranks, len(self.hosts)
        if len(self._cards) == size:
            self._cards_of_all = [self._cards[rank] for rank in range(size)]
            rounds = ceil(log2(hosts)) if hosts > 1 else 0
            total = sum(map(len, self._cards_of_all))
            seconds = rounds * (ACROSS + costs.SEND + costs.RECEIVE) + total * BYTE
            self.world.messages += rounds * hosts
            for fiber in self._waiting:
                self.world.at(self.world.clock() + seconds, self.world.wake, fiber)
            me().world.sleep(seconds)
        else:
            self._waiting.append(getcurrent())
            self.world.park()
        self.world.spend(size * (costs.TAKE + costs.LOAD_BYTE * len(card)))
        return self._cards_of_all

    def run(self, until: float = 1e4) -> "Grouping":
        cached = SimpleNamespace(loads=lru_cache(None)(json.loads), dumps=json.dumps)
        with ExitStack() as ends:
            for name, value in (
                ("exchange_bytes", self._compare),
                ("json", cached),
                ("Roster", costs.Rosters(64)),
            ):
                ends.enter_context(mock.patch.object(groups, name, value))
            super().run(until)
        return self

    def made(self) -> Made:
        """Return the costs."""
        most = max(process.most_connections for process in self.processes)
        return Made(max(self.up.values()), self.world.messages, most)
