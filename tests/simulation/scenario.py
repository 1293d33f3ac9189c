"""Ranks that start on virtual hosts with the package's own code, from the search for rank 0 on.

Native code has stand-ins. They exchange the same number of messages as the real backends, take the
measured time, and move no data.
"""

import json
import math
import os
import re
import signal
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache, partial
from itertools import count
from math import ceil, log2
from types import SimpleNamespace
from typing import Any
from unittest import mock

from flashlight_py import system
from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.backends import gloo
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.constants import DistributedBackend
from flashlight_py.distributed.memory import memory_file, topology
from flashlight_py.distributed.rendezvous.secret import derived_key, nonce
from flashlight_py.distributed.rendezvous.store import Roster, Store, this_process
from flashlight_py.distributed.rendezvous.stores import TcpStore
from flashlight_py.distributed.start import initialize
from flashlight_py.distributed.start.settings import Settings
from flashlight_py.distributed.work import Work
from flashlight_py.errors import RendezvousError
from tests.simulation import costs
from tests.simulation.world import Host, Process, World, installed, me

PORT = 29500


class _Memory:
    """A memory file that no process maps; all processes share one descriptor."""

    fd = os.memfd_create("simulated")

    def __init__(self, named: bool) -> None:
        self.path = f"/{me().host.name}"

    def close(self) -> None:
        """Keep the descriptor."""


class Joined(Backend):
    """Stand-in for a backend that has connected ``rank`` with all of ``size`` ranks."""

    kind, path = DistributedBackend.GLOO, "stands in"

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def start(self, call: Call) -> Work:
        raise NotImplementedError

    def synchronize(self) -> None:
        """Wait for nothing."""

    def close(self) -> None:
        """Hold nothing."""


class _JoinedByMemory(Joined):
    """Stand-in for ``ShmBackend``."""

    def __init__(self, store: Store, timeout: float, at_once: bool = False) -> None:
        super().__init__(store.rank, store.size)
        memory_file.map_together(store, lambda path, create: me().world.spend(costs.MAP), False)


class _JoinedByNetwork(Joined):
    """Stand-in for ``GlooBackend``: its exchange of addresses, and connections to its
    neighbours."""

    def __init__(self, store: Store, *args: Any) -> None:
        super().__init__(store.rank, store.size)
        _, _, _, key, host_timeout, lazily, _, _ = args
        process, address = me(), b64encode(zlib.compress(bytes(128) + b"10.1")).decode()
        card = [this_process(), address, nonce().hex(), 40000, host_timeout]
        texts = store.exchange(json.dumps(card).encode())
        texts.derived(gloo._GlooCards.read)
        texts.derived(derived_key, key)
        direct = self.size if self.size <= costs.DIRECT else 2 * ceil(log2(self.size))
        connected = 0 if lazily else direct
        proven, made = costs.PROVEN * 2 * self.size, costs.NATIVE_CONNECT * connected
        process.world.spend(costs.JOINED + proven + made)
        process.connections += connected
        process.most_connections = max(process.most_connections, process.connections)


def _unreadable(offer: Sequence[Any], own_domain: str) -> str:
    """Stand in for the attempt to open another rank's file."""
    me().world.spend(costs.OPEN)
    of_host = offer[1] == f"/{me().host.name}"
    return "" if of_host else "[Errno 2] No such file or directory: '/proc/123456/fd/9'"


@contextmanager
def native_stood_in_for() -> Iterator[None]:
    group = SimpleNamespace(size=0, close=lambda: None)
    joined = lambda *_, **__: group  # noqa: E731
    stand_ins: dict[tuple[Any, str], Any] = {
        (initialize, "ShmBackend"): _JoinedByMemory,
        (initialize, "GlooBackend"): _JoinedByNetwork,
        (initialize, "GlooPart"): lambda _, store, __: Joined(store.rank, store.size),
        (initialize, "HierarchicalBackend"): lambda rank, hosts, inside, between, flat, *_: Joined(
            rank, flat.size
        ),
        (initialize, "ProcessGroup"): joined,
        (initialize, "World"): lambda *_, **__: SimpleNamespace(group=group),
        (initialize, "fair_share"): lambda *_: 1,
        (initialize, "abort"): SimpleNamespace(
            install_hooks=lambda: None, uninstall_hooks=lambda: None
        ),
        (memory_file, "MemoryFile"): _Memory,
        (topology, "_read_problem"): _unreadable,
        (memory_file, "process_space"): lambda: f"{system.gethostname()} pid",
    }
    with ExitStack() as ends:
        for (module, name), value in stand_ins.items():
            ends.enter_context(mock.patch.object(module, name, value))
        yield


class Start:
    """``ranks`` ranks of a job, ``per_host`` on each host, which start within ``spread`` seconds.

    ``begin`` is the program of a rank; by default it is the start of a world. ``environ`` is added
    to its environment.
    """

    def __init__(
        self,
        ranks: int,
        seed: int,
        per_host: int = 8,
        cores: int | None = None,
        timeout: float = 300.0,
        spread: float = 0.0,
        begin: Callable[[int, int, float], Any] | None = None,
        **environ: str,
    ) -> None:
        self.world, self.ranks, self.timeout = World(seed, cores=cores), ranks, timeout
        self.up: dict[int, float] = {}  # time at which each rank was ready
        self.errors: dict[int, BaseException] = {}
        self.ended: dict[int, float] = {}
        self.bodies: list[bytes] = []  # roster of each exchange
        self.partings = count()  # temporary divisions of the network
        self.progress = [0] * ranks  # exchanges that each rank has started
        self.begun = 0.0  # time at which the first rank started the last exchange
        self.dies, self.died = (-1, 0), math.nan  # rank that is killed, its exchange, and the time
        self._begin, self._per_host = begin or meet, per_host
        self.hosts = [self.world.add_host() for _ in range(-(-ranks // per_host))]
        self.processes = [
            Process(
                *(self.hosts[rank // per_host], self._program(rank)),
                {"FLASHLIGHT_SECRET": "s", **environ},
                self.world.random.uniform(0, spread),
            )
            for rank in range(ranks)
        ]

    def host_of(self, rank: int) -> Host:
        return self.processes[rank].host

    def _program(self, rank: int) -> Callable[[], int]:
        def main() -> int:
            me().on_exchange, me().local_rank = partial(self._count, rank), rank % self._per_host
            me().on_roster = partial(self._check, rank)
            try:
                self._begin(rank, self.ranks, self.timeout)
            except Exception as error:  # noqa: BLE001 - judged at the end
                self.errors[rank], self.ended[rank] = error, self.world.clock()
                return 1
            self.up[rank] = self.world.clock()
            return 0

        return main

    def _count(self, rank: int) -> None:
        self.progress[rank] += 1
        self.begun = max(self.begun, self.world.clock())
        if (rank, self.progress[rank]) == self.dies:
            self.died = self.world.clock()
            self.world.at(self.died, self.processes[rank].end, -signal.SIGKILL)

    def _check(self, rank: int, body: bytes) -> None:
        """Check that all ranks get the same roster in an exchange."""
        number = self.progress[rank] - 1
        if number == len(self.bodies):
            self.bodies.append(body)
        expected = self.bodies[number]
        assert body is expected or body == expected, f"exchange {number}: not what others have"

    def run(self, until: float = 1e4) -> "Start":
        with installed(self.world), native_stood_in_for(), costs.charged(self.world.spend):
            done = lambda: len(self.up) + len(self.errors) == self.ranks  # noqa: E731
            self.world.run(until, done)
        return self


def meet(rank: int, size: int, timeout: float) -> Any:
    """Run the steps of ``distributed_init`` between the choice of a store and the world."""
    me().world.spend(costs.FIRST)
    settings = Settings(timeout=timeout)
    return initialize.create_world(lambda: _Counted("host1", PORT, rank, size, timeout), settings)


def gather(rank: int, size: int, timeout: float, most: int = 200) -> None:
    """Join, exchange three times and leave: the messages of ``create_world`` only.

    Payloads have about ``most`` bytes.
    """
    store = _Counted("host1", PORT, rank, size, timeout)
    store.host_timeout = Settings.host_timeout
    try:
        for number in range(3):
            roster = store.exchange(_payload(number, rank, most))
            is_right = roster.body == _payloads(number, size, most)
            assert is_right, f"exchange {number}: not what was given"
        store.close()
    except RendezvousError as error:
        store.abort(str(error))
        raise


def _payload(number: int, rank: int, most: int) -> bytes:
    return b"exchange %d, rank %d; " % (number, rank) * (most // 20)


@lru_cache
def _payloads(number: int, size: int, most: int) -> bytes:
    """Return the roster of an exchange of ``gather``."""
    return Roster.of([_payload(number, rank, most) for rank in range(size)]).body


def named_in(error: BaseException) -> set[int]:
    """Return the ranks that an error of a rendezvous names, without its own rank."""
    text = str(error).partition(": ")[2].replace("where rank 0 sees it", "")
    numbers = re.findall(r"\branks? (\d+(?:, \d+)*)", text)
    return {int(number) for list_ in numbers for number in list_.split(", ")}


class _Counted(TcpStore):
    """Store that reports the start of each exchange, and has the local number of its rank."""

    def __init__(self, *values: Any) -> None:
        self.local_rank = me().local_rank
        super().__init__(*values)

    def exchange(self, payload: bytes) -> Roster:
        me().on_exchange()
        roster = super().exchange(payload)
        assert roster[self.rank] == payload, "not what was given"
        me().on_roster(roster.body)
        return roster
