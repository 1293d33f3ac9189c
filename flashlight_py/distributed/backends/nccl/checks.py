"""Whether the ranks of NCCL call the same, and live: posted by each, looked at by watchdogs."""

from __future__ import annotations

import logging
import mmap
import os
import select
from collections.abc import Callable, Sequence

from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.backends.nccl.hosts import HostsLink
from flashlight_py.distributed.backends.nccl.ring import (
    Posted,
    Ring,
    Word,
    first_difference,
    map_rings,
)
from flashlight_py.distributed.backends.shm import map_together
from flashlight_py.distributed.call import Call
from flashlight_py.distributed.control.wording import (
    called,
    indented_traceback,
    names,
    raised,
    who_that_was,
)
from flashlight_py.distributed.exchange import BackendStore
from flashlight_py.distributed.memory_file import needs_names
from flashlight_py.distributed.rendezvous.store import Store, SubStore
from flashlight_py.distributed.topology import exchange_process_info, ranks_by_memory
from flashlight_py.errors import (
    BackendUnavailableError,
    DistributedError,
    MismatchError,
    PeerLostError,
)

__all__ = ["Checks", "asks", "begin_checks"]

_log = logging.getLogger("flashlight_py")

_MISMATCH, _RAISED = 1, 2


class Checks:
    """The rings of the ranks ``mates`` of this host, as the one of number ``mine`` sees them.

    ``processes`` are their process numbers, 0 where they cannot be looked at; ``cpu`` is the group.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        mates: Sequence[int],
        mine: int,
        processes: Sequence[int],
        cpu: Backend,
        link: HostsLink | None = None,
    ) -> None:
        self._memory, self._mates, self._cpu = memory, list(mates), cpu
        self._rings = [Ring(memory, place) for place in range(len(mates))]
        self._mine, self._agreed, self._link = self._rings[mine], 0, link
        ends = {
            rank: _end_of(process)
            for rank, process in zip(mates, processes, strict=True)
            if process and rank != cpu.rank
        }
        self._ends = {rank: end for rank, end in ends.items() if end is not None}
        if link is not None:
            link.start(self._rings, self._mine)

    def post(self, call: Call) -> None:
        """Show what this rank calls; does not wait.

        Verbs that ask the others over the CPU, and compare there, must not differ from others.
        """
        words = str(call)
        self._mine.post(words, "" if asks(call) else words)

    def give_up(self, traceback: str) -> None:
        """Tell that this rank's program has raised."""
        self._mine.say(_RAISED, f"{self._cpu.rank}\n{traceback}")

    def find_trouble(self) -> DistributedError | None:
        """Return what a rank of this host has found, or this one finds: calls that differ."""
        for ring in self._rings:
            word = ring.word()
            if word is not None:
                self._mine.say(*word)
                return self._as_error(word)
        self._agreed, calls = first_difference(self._rings, self._agreed)
        if not calls:
            return None
        self._mine.say(_MISMATCH, in_words(self._agreed + 1, zip_known(self._mates, calls)))
        word = self._mine.word()
        assert word is not None  # it was said just now, or before
        return self._as_error(word)

    def find_dead(self) -> DistributedError | None:
        """Return who of this host has ended; matters only to who still needs the others."""
        poll = select.poll()
        for end in self._ends.values():
            poll.register(end, select.POLLIN)
        ended = {end for end, _ in poll.poll(0)}
        gone = [rank for rank, end in self._ends.items() if end in ended]
        if not gone:
            return None
        processes = who_that_was(gone, self._cpu.processes)
        return PeerLostError(
            f"{self._where()}: lost {names(gone)} (its process has ended){processes}. Look at its "
            "own output. This group cannot be used again"
        )

    def _as_error(self, word: Word) -> DistributedError:
        if word.kind == _MISMATCH:
            return MismatchError(
                f"{self._where()}: the ranks called different things in {word.text}. NCCL had "
                "begun them, so what the arrays hold is undefined, and this group cannot be used "
                "again; make every rank call the same",
                group_lives=False,
            )
        number, _, traceback = word.text.partition("\n")
        process = who_that_was([int(number)], self._cpu.processes)
        words = indented_traceback(raised(f"rank {number}", process, traceback))
        return PeerLostError(f"{self._where()}: {words}")

    def _where(self) -> str:
        return f"[NCCL] rank {self._cpu.rank} of {self._cpu.size}"

    def close(self) -> None:
        """Free everything; may be repeated."""
        if self._link is not None:
            self._link.close()
        while self._ends:
            os.close(self._ends.popitem()[1])


def asks(call: Call) -> bool:
    """Return whether the ranks ask each other over the CPU before NCCL is given ``call``."""
    return not (call.verb.reduces or call.verb.in_place)


def _end_of(process: int) -> int | None:
    """Return a descriptor that tells the end of ``process``; None where the system has none."""
    try:
        return os.pidfd_open(process)
    except ProcessLookupError:  # it has ended: that is a lost rank, and nothing to go without
        raise
    except (AttributeError, OSError):  # Python or the kernel is too old, or a sandbox forbids it
        return None


def zip_known(ranks: Sequence[int], calls: Sequence[Posted | None]) -> list[tuple[int, str]]:
    """Return what each rank has called, of those that are known."""
    pairs = zip(ranks, calls, strict=True)
    return [(rank, f"{call.call} at {call.site}") for rank, call in pairs if call is not None]


def in_words(number: int, calls: Sequence[tuple[int, str]]) -> str:
    """Complete a sentence about ranks that called different things as ``number``."""
    return f"call {number} of this group: {called(calls)}"


def begin_checks(cpu: Backend, connect: Callable[[Store], Backend]) -> Checks | None:
    """Share rings with the ranks of this host. Collective, blocking.

    ``connect`` joins one rank of each host, where there are several. Where a host has no memory to
    share, nobody checks: the result is None on all ranks, with a warning on rank 0.
    """
    store = BackendStore(cpu)
    exchange_process_info(store, checks=True)
    hosts, _ = ranks_by_memory(store)
    mates = next(host for host in hosts if cpu.rank in host)
    near = SubStore(store, mates)
    memory, problem = _map(near)
    problems = [text.decode() for text in store.exchange(problem.encode())]
    failed = next((text for text in problems if text), "")
    if failed or memory is None:
        if cpu.rank == 0:
            _log.warning("NCCL's calls are not compared between ranks: %s", failed)
        return None
    processes = [int(text) for text in store.exchange(str(os.getpid()).encode())]
    seen = [] if needs_names(near.spaces) else [processes[rank] for rank in mates]
    link = _join_hosts(store, hosts, connect)
    mine = mates.index(cpu.rank)
    return Checks(memory, mates, mine, seen or [0] * len(mates), cpu, link)


def _map(near: Store) -> tuple[mmap.mmap | None, str]:
    def map_path(path: str, create: bool) -> mmap.mmap:
        return map_rings(path, create, near.size)

    try:
        memory: mmap.mmap = map_together(near, map_path, needs_names(near.spaces))
    except BackendUnavailableError as error:
        return None, str(error)
    return memory, ""


def _join_hosts(
    store: Store, hosts: Sequence[Sequence[int]], connect: Callable[[Store], Backend]
) -> HostsLink | None:
    """Join the first rank of each host; two exchanges in any case but that of one host."""
    if len(hosts) == 1:
        return None
    leaders = [host[0] for host in hosts]
    if store.rank not in leaders:
        store.exchange(b"")
        store.exchange(b"")
        return None
    place = leaders.index(store.rank)
    return HostsLink(connect(SubStore(store, leaders)), [list(host) for host in hosts], place)
