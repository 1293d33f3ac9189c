"""The start of a job in virtual time, and next to it a real start of this machine.

    python benchmarks/simulated_start.py --ranks 1000 --seed 7  a start, and a death in another one
    python benchmarks/simulated_start.py --ranks 1000 --groups  ranks that are joined make groups
    python benchmarks/simulated_start.py --ranks 64 --real      a real and a simulated start

The last comparison shows whether the constants of ``tests/simulation/costs.py`` fit this machine.
"""

from __future__ import annotations

import argparse
import gc
import logging
import multiprocessing
import os
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from flashlight_py.distributed.rendezvous.store import Roster, Store, this_process
from flashlight_py.distributed.rendezvous.stores import TcpStore
from flashlight_py.distributed.rendezvous.tree import FAN, TreeRecord, entry, identity
from flashlight_py.distributed.start import initialize
from flashlight_py.distributed.start.settings import Settings

sys.path.append(str(Path(__file__).parent.parent))

from tests.distributed.processes import free_port
from tests.simulation.grouping import Grouping
from tests.simulation.scenario import Start, native_stood_in_for
from tests.simulation.world import Host, Process, World, installed

CARD = bytes(200)
_PIECE = 1 << 20  # bytes that one read of a socket returns


def in_processes(count: int, work: Callable[[int], Any]) -> list[Any]:
    fork = multiprocessing.get_context("fork")
    results = fork.SimpleQueue()
    started = [
        fork.Process(target=lambda rank=rank: results.put((rank, work(rank))))
        for rank in range(count)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join()
        assert process.exitcode == 0
    result = dict(results.get() for _ in started)
    return [result[rank] for rank in range(count)]


class Kept(NamedTuple):
    """Costs of one rank in a start: peak bytes, remaining bytes, seconds."""

    most: int
    stays: int
    computes: float


def of_one_rank(bodies: Sequence[bytes], rank: int, per_host: int = 8) -> Kept:
    """Run the package's processing of rosters for ``rank``, and return its costs without
    connections."""
    world, result = World(), list[int | float]()
    host = Host(world, rank // per_host + 1)

    def begin() -> None:
        begun = time.process_time()
        _connected(_Replayed(bodies, rank))
        result.append(time.process_time() - begun)
        tracemalloc.start()
        kept = _connected(_Replayed(bodies, rank))
        result.extend(tracemalloc.get_traced_memory())
        tracemalloc.stop()
        del kept

    with installed(world), native_stood_in_for():
        Process(host, begin, {"FLASHLIGHT_SECRET": "s"})
        world.run()
    computes, stays, most = result
    return Kept(int(most), int(stays), computes)


def _connected(store: Store) -> Any:
    new = initialize.NewWorld(store, Settings())
    for step in initialize.STEPS[:-1]:
        step(new)
    return new.world, store


class _Replayed(Store):
    """Socket that yields ``bodies`` one after the other."""

    def __init__(self, bodies: Sequence[bytes], rank: int) -> None:
        self.rank, self.size = rank, len(Roster(bodies[0]))
        self.host_timeout = Settings.host_timeout
        self._bodies, self._round = bodies, 0
        self._record = TreeRecord(this_process())

    def exchange(self, payload: bytes) -> Roster:
        body, is_first = self._bodies[self._round], self._round == 0
        self._round += 1
        if self.rank:
            # The data arrives in chunks, which are joined.
            pieces = [body[at : at + _PIECE] for at in range(0, len(body), _PIECE)]
            return Roster(b"".join(pieces))
        who = identity(this_process()) if is_first else b""
        self._record.begin(payload, is_first)
        texts = Roster(body)
        for first in range(1, self.size, self.size // FAN + 1):
            part = range(first, min(self.size, first + self.size // FAN + 1))
            self._record.add_entries(b"".join([entry(rank, 0, who, texts[rank]) for rank in part]))
        del texts
        payloads = self._record.payloads
        roster = Roster(Roster.of([payloads[rank] for rank in range(self.size)]).body)
        self._record.end()
        return roster


class Seen(NamedTuple):
    """Results of a start: seconds until all ranks are ready, processor time of rank 0 and of
    another rank."""

    up: float
    first: float
    other: float


def real(ranks: int, begin: Callable[[int, int, int], Any], rounds: int = 5) -> Seen:
    """Start ``ranks`` processes of this machine together at a port; return the fastest of several
    starts."""
    results = [_real(ranks, begin, free_port()) for _ in range(rounds)]
    return Seen(*map(min, zip(*results, strict=True)))


def _real(ranks: int, begin: Callable[[int, int, int], Any], port: int) -> Seen:
    all_wait = multiprocessing.get_context("fork").Barrier(ranks)

    def work(rank: int) -> tuple[float, float, float]:
        all_wait.wait()
        begun, cpu = time.monotonic(), time.process_time()
        begin(rank, ranks, port)
        return begun, time.monotonic(), time.process_time() - cpu

    begun, up, computed = zip(*in_processes(ranks, work), strict=True)
    return Seen(max(up) - min(begun), computed[0], sum(computed[1:]) / (ranks - 1))


def meet(rank: int, size: int, port: int) -> None:
    """Run ``scenario.meet`` with native code."""
    initialize.create_world(lambda: TcpStore("127.0.0.1", port, rank, size, 300.0), Settings())


def exchanges(times: int) -> Callable[[int, int, int], None]:
    def begin(rank: int, size: int, port: int) -> None:
        store = TcpStore("127.0.0.1", port, rank, size, 300.0)
        for _ in range(times):
            store.exchange(CARD)
        store.close()

    return begin


def simulated(ranks: int, begin: Callable[[int, int, int], Any] | None = None) -> Seen:
    """Return the same results from the simulation of one host with this machine's cores."""
    begin_on = None if begin is None else lambda rank, size, _: begin(rank, size, 29500)
    start = Start(ranks, 0, per_host=ranks, cores=os.cpu_count(), begin=begin_on).run()
    computed = [process.computed for process in start.processes]
    return Seen(max(start.up.values()), computed[0], sum(computed[1:]) / (ranks - 1))


def report(ranks: int, seed: int) -> None:
    """Print a start of ``ranks``, and the time until a death in another start is detected."""
    start = Start(ranks, seed).run()
    if start.errors:
        raise next(iter(start.errors.values()))
    first, *others = start.processes
    busiest = max(others, key=lambda process: process.bytes_sent + process.bytes_received)
    for name, process in (("rank 0", first), ("the busiest other rank", busiest)):
        print(
            f"{name}: {process.messages} messages, {process.most_connections} connections, "
            f"{process.bytes_sent / 1e6:.3g} MB sent, "
            f"{process.bytes_received / 1e6:.3g} MB received"
        )
    up, messages = max(start.up.values()), start.world.messages
    connections = max(process.most_connections for process in start.processes)
    bodies, memory = start.bodies, first.most_memory
    del start, first, others, busiest, process  # two objects of 100,000 ranks need too much memory
    gc.collect()
    for name, rank in (("rank 0", 0), ("another one", ranks - 1)):
        takes = of_one_rank(bodies, rank)
        memory += takes.most if rank == 0 else 0
        print(
            f"of all cards {name} computes {takes.computes:.3g} s, has at most "
            f"{takes.most / 1e6:.3g} MB, and keeps {takes.stays / 1e6:.3g} MB"
        )
    other = Start(ranks, seed)
    other.dies = other.world.random.randrange(1, ranks), other.world.random.randint(2, 6)
    other.run()
    delay = max(other.ended.values()) - other.died
    print(
        f"ranks {ranks} up {up:.3g} s, death known {delay:.3g} s, connections {connections}, "
        f"rank 0 {memory / 1e6:.3g} MB, {messages:.2g} messages"
    )


def make_groups(ranks: int, seed: int) -> None:
    """Print the time in which ``ranks`` ranks create a group of all, of one per host, and of 8."""
    for members in (range(ranks), range(0, ranks, 8), range(min(8, ranks))):
        made = Grouping(ranks, seed, list(members)).run().made()
        print(
            f"{ranks} ranks make a group of {len(members)} in {made.seconds:.3g} s, with "
            f"{made.messages:.2g} messages, at most {made.connections} connections"
        )


def compare(ranks: int) -> None:
    """Print the times of real and of simulated starts of ``ranks`` ranks on this machine."""
    os.environ["FLASHLIGHT_SECRET"] = "s"
    begins_of = {"1 exchange": exchanges(1), "9 exchanges": exchanges(9), "start": None}
    for name, begin in begins_of.items():
        for where, seen in (
            ("real", real(ranks, begin or meet)),
            ("simulated", simulated(ranks, begin)),
        ):
            print(
                f"{name} of {ranks} ranks, {where}: {seen.up:.4f} s; "
                f"rank 0 computes {seen.first:.5f} s, the others {seen.other:.5f} s"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--groups", action="store_true", help="make groups, instead of a start")
    parser.add_argument("--real", action="store_true", help="compare with real starts")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    if options.real:
        compare(options.ranks)
    elif options.groups:
        make_groups(options.ranks, options.seed)
    else:
        report(options.ranks, options.seed)


if __name__ == "__main__":
    main()
