"""Ranks: where each is, the environment it learns that from, and the processes on this host."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from subprocess import DEVNULL
from typing import NamedTuple

from flashlight_py import system
from flashlight_py.cores import thread_variables, usable_cores
from flashlight_py.launch.loop import Loop, Poll, await_end
from flashlight_py.launch.output import STREAMS, Source

_CHUNK = 1 << 16
_KILLED_SECONDS = 5.0  # to wait for killed processes: one may hang in the kernel

# Environment variables of ranks.
RECORDS = "FLASHLIGHT_RECORDS"  # where they say that they have written a flight record
LISTENER = "FLASHLIGHT_LISTENER"  # the descriptor at which rank 0 listens
SECRET = "FLASHLIGHT_SECRET"  # what they prove to know
ADDRESSES = "FLASHLIGHT_ADDRESSES"  # all of rank 0's host, MASTER_ADDR the first
PORT = "FLASHLIGHT_PORT"  # of rank 0, there, and the MASTER_PORT with which alone it is meant
# Where ranks meet; what an outer launch says of it must not reach a rank.
_MEETINGS = (
    *("MASTER_ADDR", "MASTER_PORT", "FLASHLIGHT_FILE"),
    *(ADDRESSES, PORT, LISTENER, SECRET, RECORDS, "TORCHELASTIC_USE_AGENT_STORE"),
)


class Slot(NamedTuple):
    """A rank, its number on its host, how many are there, and which host it is."""

    rank: int
    local_rank: int
    local_size: int
    host: int


def slots_of(counts: Sequence[int]) -> list[Slot]:
    """Return the slots of all ranks, where host h has ``counts[h]`` of them; maybe none."""
    found = [Slot(0, i, count, host) for host, count in enumerate(counts) for i in range(count)]
    return [each._replace(rank=rank) for rank, each in enumerate(found)]


def counts_of_remaining(counts: Sequence[int], lost: Collection[int]) -> list[int]:
    """Return how many ranks each host has without those that are ``lost``."""
    remaining = Counter(slot.host for slot in slots_of(counts) if slot.rank not in lost)
    return [remaining[host] for host in range(len(counts))]


def rank_variables(rank: int, size: int, file: str) -> dict[str, str]:
    """Return the variables of ``rank`` of ``size`` on one host, which meet at the path ``file``."""
    return {**_numbers(Slot(rank, rank, size, 0), size), "FLASHLIGHT_FILE": file}


def for_others(address: str, port: int) -> dict[str, str]:
    """Return the variables by which ranks of other libraries meet, at a port of their own."""
    return {"MASTER_ADDR": address, "MASTER_PORT": str(port)}


def environ_of(
    environ: Mapping[str, str], slot: Slot, size: int, restarts: int, meeting: Mapping[str, str]
) -> dict[str, str]:
    """Return the environment of a rank, made from ``environ`` of the launcher on its host.

    ``meeting`` says where the ranks meet. Unless ``environ`` says otherwise, output is unbuffered,
    and a crash in native code prints a traceback.
    """
    inherited = {name: value for name, value in environ.items() if name not in _MEETINGS}
    return {
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        **inherited,
        **thread_variables(environ, slot.local_size, usable_cores()),
        **_numbers(slot, size),
        "FLASHLIGHT_RESTART_COUNT": str(restarts),
        **meeting,
    }


def without_place(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` without what says which rank a process is, and where the ranks meet."""
    of_ranks = (*_numbers(Slot(0, 0, 0, 0), 0), *_MEETINGS)
    return {name: value for name, value in environ.items() if name not in of_ranks}


def _numbers(slot: Slot, size: int) -> dict[str, str]:
    return {
        "RANK": str(slot.rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(slot.local_rank),
        "LOCAL_WORLD_SIZE": str(slot.local_size),
    }


class RankProcesses:
    """Processes by rank; ``on_output`` is called with what they write to ``streams``.

    They inherit other streams. Each leads a session: signals reach its children as well, and Ctrl-C
    on a terminal reaches this process alone.
    """

    def __init__(
        self,
        loop: Poll,
        on_output: Callable[[Source, bytes], None],
        streams: Collection[str] = STREAMS,
    ) -> None:
        self._loop, self._on_output, self._streams = loop, on_output, streams
        self._processes: dict[int, system.Popen[bytes]] = {}
        self._pipes: dict[Source, int] = {}

    def start(
        self,
        rank: int,
        command: Sequence[str],
        environ: Mapping[str, str],
        stdin: int = DEVNULL,
        descriptors: Sequence[int] = (),
        before: Callable[[], None] | None = None,
    ) -> system.Popen[bytes]:
        """Start ``rank`` with the input ``stdin``; it inherits ``descriptors``.

        ``before`` runs in the new process, which is safe where this one has a single thread.
        """
        theirs: dict[str, int] = {}
        try:
            for stream in self._streams:
                source = Source(rank, stream)
                self._pipes[source], theirs[stream] = system.pipe()
                system.set_blocking(self._pipes[source], False)
                self._loop.watch(self._pipes[source], partial(self._read, source))
            process = system.Popen(
                command,
                env=environ,
                stdin=stdin,
                stdout=theirs.get("out"),
                stderr=theirs.get("err"),
                start_new_session=True,
                pass_fds=descriptors,
                preexec_fn=before,
            )
        finally:
            for end in theirs.values():
                system.close(end)
        self._processes[rank] = process
        return process

    def signal(self, number: int) -> None:
        """Send ``number`` to every rank that is not reaped yet, and to what is in its group."""
        for process in self._processes.values():
            if process.returncode is None:  # its number cannot be another's before it is reaped
                with suppress(ProcessLookupError):
                    system.killpg(process.pid, number)

    def drain(self, rank: int) -> None:
        """Read what ``rank`` has written before now: call it when the rank has ended."""
        for stream in self._streams:
            self._drain(Source(rank, stream))

    def exit_code(self, rank: int) -> int | None:
        """Wait for the end of ``rank``, which is not reaped; return its code; see ``await_end``."""
        return await_end(self._processes[rank])

    def wait(self) -> list[int]:
        """Wait for the end of each rank and return their exit codes, or minus the signals."""
        return [process.wait() for process in self._processes.values()]

    def close(self) -> None:
        """Read what can be read now, and close the pipes, also where others hold their ends."""
        for source in list(self._pipes):
            self._drain(source)
            self._close(source)

    def _read(self, source: Source) -> bool:
        """Pass on what can be read at once; False if nothing can."""
        try:
            data = system.read(self._pipes[source], _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self._close(source)
            return False
        self._on_output(source, data)
        return True

    def _drain(self, source: Source) -> None:
        """Read what was written before now: at most what a pipe holds, others may write on."""
        for _ in range(16):
            if source not in self._pipes or not self._read(source):
                return

    def _close(self, source: Source) -> None:
        descriptor = self._pipes.pop(source, None)
        if descriptor is not None:
            self._loop.forget(descriptor)
            system.close(descriptor)


def end_leftovers(loop: Loop, grace: float) -> list[int]:
    """End what ranks have started and left behind: SIGTERM, and SIGKILL after ``grace`` seconds.

    Returns the processes that still exist, because the kernel does not end them.
    """

    def left() -> set[int]:
        return set(system.children()) - loop.ours() if loop.reap() else set()

    asked: set[int] = set()
    ends = system.monotonic() + grace
    while (found := left()) and system.monotonic() < ends:
        for pid in found - asked:
            asked.add(pid)
            system.kill(pid, signal.SIGTERM)
            system.kill(pid, signal.SIGCONT)  # one that is stopped would not notice it
        loop.once(ends)
    ends = system.monotonic() + _KILLED_SECONDS
    while (found := left()) and system.monotonic() < ends:
        for pid in found:  # again and again: killed ones leave theirs to us
            system.kill(pid, signal.SIGKILL)
        loop.once(ends)
    return sorted(left())
