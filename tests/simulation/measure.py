"""Measurement of the constants of ``costs``, and of a real start next to a simulated start.

python -m tests.simulation.measure [RANKS]
"""

from __future__ import annotations

import json
import multiprocessing
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from flashlight_py.distributed.backends.gloo import GlooBackend
from flashlight_py.distributed.backends.shm import ShmBackend
from flashlight_py.distributed.memory import memory_file, topology
from flashlight_py.distributed.rendezvous import wire
from flashlight_py.distributed.rendezvous.places import FAN, TreeRecord, entry, identity
from flashlight_py.distributed.rendezvous.secret import nonce, proof
from flashlight_py.distributed.rendezvous.store import Peer, Roster, Store, this_process
from flashlight_py.distributed.rendezvous.tcp_store import TcpStore
from flashlight_py.distributed.rendezvous.wire import Kind
from flashlight_py.distributed.start import initialize
from flashlight_py.distributed.start.settings import Settings
from tests.distributed.jobs import free_port
from tests.simulation.scenario import Start, native_stood_in_for
from tests.simulation.world import Host, Process, World, installed

CARD = bytes(200)
_PIECE = 1 << 20  # bytes that one read of a socket returns
_MANY = 8  # ranks of a host


def seconds_of(call: Callable[[], Any], times: int = 300) -> float:
    """Return the processor time of ``call`` in seconds: the fastest of five rounds."""
    rounds = []
    for _ in range(5):
        begun = time.process_time()
        for _ in range(times):
            call()
        rounds.append((time.process_time() - begun) / times)
    return min(rounds)


def of_calls() -> dict[str, float]:
    """Return the constants per call and per byte."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    address, until = listener.getsockname(), time.monotonic() + 1e6
    clients: list[socket.socket] = []
    accepted: list[wire.Connection] = []

    def connect() -> None:
        attempts = wire.Attempts([address])
        clients.append(next(attempts.connected(until)))

    connecting = seconds_of(connect, 100)
    accepting = seconds_of(lambda: accepted.append(wire.Connection(listener.accept()[0])), 100)
    one, other = wire.Connection(clients[0]), accepted[0]
    other.trust(0.0)
    one.trust(0.0)
    selector = selectors.EpollSelector()
    selector.register(other.wire, selectors.EVENT_READ, other)
    results = {"CONNECT": connecting, "ACCEPT": accepting}
    body = bytes(400)

    def exchange() -> None:
        one.send(Kind.PAYLOAD, body, until)
        while not other.inbox:
            other.receive(0.0)
        other.inbox.clear()

    both = seconds_of(exchange)
    sending = seconds_of(lambda: one.send(Kind.PAYLOAD, body, until))
    results["SEND"], results["RECEIVE"] = sending, (both - sending) / 2  # a header, and its data
    results["SELECT"] = seconds_of(lambda: selector.select(0.0))
    while selector.select(0.0):
        other.wire.recv(1 << 20)
    size = 1 << 20
    body = bytes(size)
    begun = time.process_time()
    for _ in range(50):
        sender = threading.Thread(target=one.send, args=(Kind.PAYLOAD, body, until))
        sender.start()
        while not other.inbox:
            other.receive(1.0)
        other.inbox.clear()
        sender.join()
    results["BYTE"] = (time.process_time() - begun) / 50 / size / 2
    return results


def of_heartbeats(rounds: int = 2000) -> dict[str, float]:
    """Return kWake and kSend of heartbeats.cc: seconds from a message until another process has
    it."""
    ours, peer = socket.socketpair()

    def talk(rank: int) -> dict[str, float]:
        took = []
        for _ in range(rounds):
            begun = time.perf_counter()
            if rank == 1:
                peer.send(peer.recv(64))
                continue
            ours.send(bytes(48))
            sent = time.perf_counter()
            ours.recv(64)
            took.append((time.perf_counter() - begun, sent - begun))
        if rank == 1:
            return {}
        both, sending = (sorted(seconds)[rounds // 2] for seconds in zip(*took, strict=True))
        return {"kWake": both / 2 - sending, "kSend": sending}

    result: dict[str, float] = in_processes(2, talk)[0]
    return result


def of_ranks(n: int = 512) -> dict[str, float]:
    """Return the constants per rank in seconds."""
    peers = [Peer(f"host{rank}", rank, f"host{rank} boot", "1") for rank in range(n)]
    cards = [
        ["host" * 10, "", "ff", "0" * 64, peer, [f"10.0.0.{peer.pid % 250}"]] for peer in peers
    ]
    texts = [json.dumps(card).encode() for card in cards]
    body = Roster.of(texts).body
    ends = {"0": [["10.0.0.1", 29500], ["10.0.0.2", 40000]]}
    host = topology.Card("h0", "h", "eth0", ["10.0.0.1"], sources=["10.0.0.1"], ends=ends)
    places = [host._replace(host=f"h{rank // 8}", own=[f"10.0.0.{rank // 8}"]) for rank in range(n)]
    choices = [json.dumps(choice).encode() for choice in places]
    entries = b"".join(entry(rank, 0, identity(peers[rank]), texts[rank]) for rank in range(n))
    reading = seconds_of(lambda: initialize.Facts.read(Roster(body)), 5) / n
    short, loads = json.dumps(cards[0][:1]).encode(), json.loads
    byte = seconds_of(lambda: loads(texts[0])) - seconds_of(lambda: loads(short))
    byte = max(byte, 0.0) / (len(texts[0]) - len(short))
    return {
        "TAKE": seconds_of(lambda: TreeRecord(peers[0]).add_entries(entries), 5) / n,
        "PACK": seconds_of(lambda: Roster.of(texts), 20) / n,
        "DERIVE": reading - byte * len(texts[0]),
        "CHOOSE": seconds_of(lambda: topology._addresses_of_ranks(choices), 5) / n,
        "LOAD_BYTE": byte,
        "PROVE_BYTE": seconds_of(lambda: proof(b"key", body), 20) / len(body),
        "PROVEN": seconds_of(lambda: proof(b"key", b"12345", b"54321")),
    }


def of_beginnings() -> dict[str, float]:
    """Return the constants of the start of processes and of backends."""
    first, second = of_first_and_second()  # before this process has loaded any module
    program = "import flashlight_py.launch.rank_main, flashlight_py.distributed.start.initialize"
    took = []
    for _ in range(5):
        begun = time.perf_counter()
        child = subprocess.Popen([sys.executable, "-c", program])
        forked = time.perf_counter()
        _, _, used = os.wait4(child.pid, 0)
        child.returncode = 0
        took.append((forked - begun, used.ru_utime + used.ru_stime))
    file = memory_file.MemoryFile(False)
    os.pwrite(file.fd, b"x" * 32, 0)
    alone, many = (
        of_joining(size, lambda store: GlooBackend(store, "127.0.0.1", 9.0, 9.0, b""))
        for size in (1, _MANY)
    )
    return {
        "FORK": min(seconds for seconds, _ in took),
        "IMPORT": min(seconds for _, seconds in took),
        "FIRST": first - second,
        "ADMITTED": of_admitting(),
        "MAP": of_joining(_MANY, lambda store: ShmBackend(store, 9.0)),
        "JOINED": alone,
        "NATIVE_CONNECT": (many - alone) / (_MANY - 1),
        "OPEN": seconds_of(lambda: topology._read_problem(("", file.path, "x" * 32, ""), "")),
    }


class _Threads(Store):
    def __init__(self, rank: int, cards: list[bytes], barrier: threading.Barrier) -> None:
        self.rank, self.size, self.hosts = rank, len(cards), ["h"] * len(cards)
        self._cards, self.barrier = cards, barrier

    def exchange(self, payload: bytes) -> Roster:
        self._cards[self.rank] = payload
        self.barrier.wait()
        roster = Roster.of(list(self._cards))
        self.barrier.wait()
        return roster


def of_joining(size: int, join: Callable[[Store], Any], rounds: int = 20) -> float:
    """Return the median processor time of ``join`` on one of ``size`` ranks."""
    barrier, cards, took = threading.Barrier(size), [b""] * size, list[float]()

    def work(rank: int) -> None:
        for _ in range(rounds):
            barrier.wait()
            begun = time.process_time()
            barrier.wait()
            joined = join(_Threads(rank, cards, barrier))
            barrier.wait()
            if rank == 0:
                took.append((time.process_time() - begun) / size)
            barrier.wait()
            joined.close()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sorted(took)[rounds // 2]


def of_admitting(ranks: int = 1000) -> float:
    """Return rank 0's processor time to admit a rank, without system calls."""
    node = TcpStore("127.0.0.1", free_port(), 0, ranks, 9.0).node
    candidates = [_Candidate(rank, ranks) for rank in range(1, ranks)]
    node._candidates += candidates
    begun = time.process_time()
    for candidate in candidates:
        node._greet(candidate)
        started = time.process_time()
        candidate.answer()
        begun += time.process_time() - started  # time of the client
        node._greet(candidate)
    seconds = time.process_time() - begun
    node.members.clear()
    node._candidates.clear()
    node.close()
    return seconds / len(candidates)


class _Candidate:
    """Stand-in for the connection of a rank that asks for admission; it sends nothing."""

    address = local_address = "127.0.0.1", 1
    ends = local_address, address
    handshake: wire.Handshake | None = None
    rank: int | None = None
    is_rejected = False

    def __init__(self, rank: int, size: int) -> None:
        peer = this_process()._replace(pid=rank)
        self._greeting = wire.Greeting(rank, size, peer, "127.0.0.1 999").pack()
        self.inbox = deque([wire.Packet(Kind.HELLO, nonce())])

    def answer(self) -> None:
        assert self.handshake
        self.inbox.append(wire.Packet(Kind.PROOF, self.handshake.client_proof(self._greeting)))

    def send(self, *_: Any) -> None:
        """Send nothing."""

    def trust(self, _: float) -> None:
        """Trust nothing."""


def of_first_and_second() -> tuple[float, float]:
    """Return the processor time of a forked process for its first start and for the next start."""
    ports = free_port(), free_port()

    def start_twice(rank: int) -> list[float]:
        took = []
        for port in ports:
            begun = time.process_time()
            meet(rank, 2, port)
            took.append(time.process_time() - begun)
        return took

    one, other = in_processes(2, start_twice)
    return (one[0] + other[0]) / 2, (one[1] + other[1]) / 2


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


def main() -> None:
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    os.environ["FLASHLIGHT_SECRET"] = "s"
    begins = of_beginnings()  # before this process has joined a world
    for name, value in {**begins, **of_calls(), **of_heartbeats(), **of_ranks()}.items():
        print(f"{name} = {value:.3g}")
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


if __name__ == "__main__":
    main()
