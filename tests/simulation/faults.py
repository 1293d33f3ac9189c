"""Faults of a start, which a seed determines, and the conditions that must hold after any fault."""

import signal
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from flashlight_py.distributed.rendezvous import wire
from flashlight_py.distributed.rendezvous.secret import nonce
from flashlight_py.errors import RendezvousError
from tests.simulation.network import divide
from tests.simulation.scenario import PORT, Start, gather, meet, named_in
from tests.simulation.world import Process, me

TIMEOUT = 30.0  # seconds, of the ranks
# Seconds that hosts may be unreachable without harm. They are lost after 5 s, and data arrives
# shortly after their return. A stopped process counts as slow, so the timeout applies.
APART, RESTING = 2.0, TIMEOUT / 2
# Each rank must end within its timeout, and the time to report it, after the last fault or the
# start of the last exchange.
BOUND = TIMEOUT + 10.0


class Fault(NamedTuple):
    """An event at a time as text, and the ranks that an error must name; none: no error.

    Ranks that are cut off continue and name other ranks. A rank that ``rests`` until a time may
    find that the job has ended and rank 0 is gone.
    """

    at: float
    description: str
    happen: Callable[[], object]
    culprits: Sequence[int] = ()
    are_cut_off: bool = False
    rests: tuple[int, float] = (-1, 0.0)


def schedule(start: Start, most: int = 3) -> list[Fault]:
    """Return the faults of ``start``: some harmless ones, and often one or two others."""
    random, world = start.world.random, start.world
    length = 1e-3 * start.ranks + 0.05  # about the duration of the start
    world.loss = random.choice((0.0, 0.0, 0.01, 0.05))
    faults = [
        random.choice(_HARMLESS)(start, random.uniform(0, length))
        for _ in range(random.randint(0, most))
    ]
    if random.random() < 0.8:
        at = random.uniform(0, length)
        faults.append(random.choice(_HARMFUL)(start, at))
        if random.random() < 0.3:  # a second fault at the same time, or soon
            at += random.choice((0.0, random.uniform(0, 1e-3), random.uniform(0, length)))
            faults.append(random.choice(_HARMFUL)(start, at))
    for fault in faults:
        world.at(fault.at, fault.happen)
    return faults


def _rank_dies(start: Start, at: float) -> Fault:
    rank = start.world.random.randrange(start.ranks)
    end = partial(start.processes[rank].end, -signal.SIGKILL)
    return Fault(at, f"rank {rank} is killed", end, [rank])


def _rank_stops(start: Start, at: float) -> Fault:
    rank = start.world.random.randrange(start.ranks)
    stop = partial(start.processes[rank].receive, signal.SIGSTOP)
    return Fault(at, f"rank {rank} is stopped for good", stop, [rank])


def _host_is_cut_off(start: Start, at: float) -> Fault:
    host = start.world.random.choice(start.hosts)
    ranks = [rank for rank in range(start.ranks) if start.host_of(rank) is host]
    cut = partial(divide, start.world, [host], 2 << next(start.partings))
    return Fault(at, f"{host.name} is cut off", cut, ranks, are_cut_off=True)


def _rank_rests(start: Start, at: float) -> Fault:
    rank, world = start.world.random.randrange(start.ranks), start.world
    process, most = start.processes[rank], world.random.choice((APART, APART, RESTING))
    seconds = world.random.uniform(0, most)
    world.at(at + seconds, process.receive, signal.SIGCONT)
    stop = partial(process.receive, signal.SIGSTOP)
    description = f"rank {rank} is stopped for {seconds:.2f} s"
    return Fault(at, description, stop, rests=(rank, at + seconds))


def _hosts_part(start: Start, at: float) -> Fault:
    world, seconds = start.world, start.world.random.uniform(0, APART)
    some = world.random.sample(start.hosts, world.random.randint(1, max(1, len(start.hosts) // 2)))
    parting = partial(divide, world, some, 2 << next(start.partings))
    world.at(at + seconds, parting)
    return Fault(at, f"{len(some)} hosts are out of reach for {seconds:.2f} s", parting)


def _host_is_slow(start: Start, at: float) -> Fault:
    host, times = start.world.random.choice(start.hosts), start.world.random.uniform(2, 50)
    return Fault(at, f"{host.name} is slow", partial(setattr, host, "slowness", times))


def _stranger_comes(start: Start, at: float) -> Fault:
    world = start.world
    host, manner = world.random.choice(start.hosts), world.random.randrange(4)
    garbage = world.random.randbytes(world.random.randint(1, 10_000))
    inner = world.random.random() < 0.6  # to a process that listens then, also on the same host

    def come() -> None:
        doors = [(other.name, name) for other in start.hosts for name in other.listeners]
        doors = [door for door in doors if isinstance(door[1], int) or door[0] == host.name]
        door = world.random.choice(doors) if inner and doors else ("host1", PORT)
        Process(host, partial(_bother, door, manner, garbage), {})

    return Fault(at, f"a stranger comes from {host.name} (manner {manner}, inner {inner})", come)


def _bother(door: tuple[str, Any], manner: int, garbage: bytes) -> int:
    """Connect to a rank and send garbage, half a message, no proof of the secret, or nothing."""
    host, name = door
    attempts = wire.Attempts([(host, name) if isinstance(name, int) else (name, 0)])
    for wire_ in attempts.connected(me().world.clock() + 20.0):
        wire_.settimeout(20.0)
        hello = b"FLrv" + garbage[:40]
        frame = wire._HEADER.pack(b"FLrv", wire._VERSION, wire.Kind.HELLO, 32) + nonce()
        proof = wire._HEADER.pack(b"FLrv", wire._VERSION, wire.Kind.PROOF, len(garbage) % 4096)
        messages = ([garbage], [hello], [frame, proof + garbage[: len(garbage) % 4096]], [])[manner]
        try:
            for message in messages:
                wire_.sendall(message)
            while wire_.recv(1000):
                pass
        except OSError:
            pass
        wire_.close()
        break
    return 0


_HARMLESS = (_rank_rests, _hosts_part, _host_is_slow, _stranger_comes)
_HARMFUL = (_rank_dies, _rank_dies, _rank_stops, _host_is_cut_off)


def objections(start: Start, faults: Sequence[Fault]) -> list[str]:
    """Return the conditions that do not hold."""
    culprits = {rank for fault in faults for rank in fault.culprits}
    results = []
    if not culprits and start.errors:
        rank, error = next(iter(start.errors.items()))
        results.append(f"nothing harmful has happened, and rank {rank} raises {error}")
    ended, last = start.up.keys() | start.errors.keys(), max([start.begun, *(f.at for f in faults)])
    hanging = [rank for rank in range(start.ranks) if rank not in ended | culprits]
    if hanging:
        results.append(f"ranks {hanging} have not ended at {start.world.now:.1f} s")
    late = [rank for rank, when in (start.up | start.ended).items() if when > last + BOUND]
    if late:
        results.append(f"ranks {late} have ended later than {last + BOUND:.1f} s")
    missing = [rank for rank in range(start.ranks) if start.progress[rank] < max(start.progress)]
    if start.up and missing:
        results.append(
            f"ranks {list(start.up)[:5]} are up, and {missing} have not made all exchanges"
        )
    held_up, knows_none = _held_up(start, faults), "the run has failed, and other ranks report why"
    errors_with_names = {
        rank: error for rank, error in start.errors.items() if knows_none not in str(error)
    }
    if start.errors and not errors_with_names:
        results.append(f"all ranks say that {knows_none}")
    for rank, error in errors_with_names.items():
        if not isinstance(error, RendezvousError):
            results.append(f"rank {rank} raises {error!r}")
            break
        named, to_name = named_in(error), _to_name(start, faults, rank)
        if to_name and not (named & to_name and named <= to_name | held_up):
            results.append(f"rank {rank} is to name some of {sorted(to_name)[:9]} alone: {error}")
            break
    return results


def _to_name(start: Start, faults: Sequence[Fault], rank: int) -> set[int]:
    """Return the ranks that ``rank`` may name: faulty ranks, and the other side if it is cut off.

    A rank cannot determine which side is cut off. A rank that rests may find that other ranks have
    ended.
    """
    hit = {item for fault in faults for item in fault.culprits}
    for fault in faults:
        if fault.are_cut_off and rank in fault.culprits:
            dead = {value for other in faults if not other.are_cut_off for value in other.culprits}
            hit = (hit | {*range(start.ranks)}) - ({*fault.culprits} - dead)
        rests, until = fault.rests
        if hit and rests == rank and until > min(start.ended.values()):
            hit |= {element for element, when in start.ended.items() if when < start.ended[rank]}
    return hit


def _held_up(start: Start, faults: Sequence[Fault]) -> set[int]:
    """Return the ranks which report that a stopped rank has not forwarded their payload.

    If it was their first payload, rank 0 does not know these ranks.
    """
    hit = {item for fault in faults for item in fault.culprits}
    stopped = {value for value in hit if start.processes[value].is_stopped}
    if max(start.progress) > 1 or not stopped:
        return set()
    named_by = ((rank, named_in(error)) for rank, error in start.errors.items())
    return {rank for rank, named in named_by if named <= hit and named & stopped}


def trial(seed: int, ranks: int = 64) -> tuple[Start, list[Fault], list[str]]:
    """Run a schedule, and return it with its failed conditions.

    One eighth of the schedules are whole starts. One eighth exchanges more data than kernels buffer
    inside a host. In every second schedule the ranks are a tree of hosts.
    """
    begin, tree = gather if seed % 16 > 1 else meet, "2" if seed % 2 else "512"
    if seed % 16 in (2, 3):
        begin = partial(gather, most=8000)
    options = {"timeout": TIMEOUT, "spread": 0.05, "begin": begin, "FLASHLIGHT_TREE_FROM": tree}
    start = Start(ranks, seed, **options)
    faults = schedule(start)
    start.run(until=4 * BOUND)
    return start, faults, objections(start, faults)
