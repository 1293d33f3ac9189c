"""Ranks of a job: their slots on hosts, their environment variables, and their local processes."""

import signal
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from subprocess import DEVNULL, PIPE
from typing import NamedTuple

from flashlight_py import system
from flashlight_py.cores import thread_variables, usable_cores
from flashlight_py.launch.front import signal_if_parent_ends
from flashlight_py.launch.loop import SIGCONT, SIGKILL, Loop, Poll, await_end
from flashlight_py.launch.output import STREAMS, Source
from flashlight_py.processes import guard

_CHUNK = 1 << 16
_KILLED_SECONDS = 5.0  # seconds to wait for killed processes, which may hang in the kernel

# Environment variables of ranks.
RECORDS = "FLASHLIGHT_RECORDS"  # "descriptor:inode" of a list of flight records
LISTENER = "FLASHLIGHT_LISTENER"  # the descriptor of rank 0's listening socket
SECRET = "FLASHLIGHT_SECRET"  # secret of the job, which authenticates its ranks
ADDRESSES = "FLASHLIGHT_ADDRESSES"  # addresses of rank 0's host; MASTER_ADDR is the first
PORT = "FLASHLIGHT_PORT"  # "rank 0's port:MASTER_PORT"; ignored if MASTER_PORT has changed
# Rendezvous variables. A rank must not inherit the values of an outer launcher.
_RENDEZVOUS = (
    *("MASTER_ADDR", "MASTER_PORT", "FLASHLIGHT_FILE"),
    *(ADDRESSES, PORT, LISTENER, SECRET, RECORDS, "TORCHELASTIC_USE_AGENT_STORE"),
)


class Slot(NamedTuple):
    """A rank: number in the world, number on its host, number of ranks on the host, host index."""

    rank: int
    local_rank: int
    local_size: int
    host: int


def slots_of(counts: Sequence[int]) -> list[Slot]:
    """Return the slots of all ranks if host h has ``counts[h]`` ranks, which may be 0."""
    slots = [Slot(0, i, count, host) for host, count in enumerate(counts) for i in range(count)]
    return [slot._replace(rank=rank) for rank, slot in enumerate(slots)]


def remaining_counts(counts: Sequence[int], lost: Collection[int]) -> list[int]:
    """Return the number of ranks of each host, not counting the ranks ``lost``."""
    remaining = Counter(slot.host for slot in slots_of(counts) if slot.rank not in lost)
    return [remaining[host] for host in range(len(counts))]


def file_meeting(file: str, port: int) -> dict[str, str]:
    """Return the rendezvous variables of ranks on this host, which use ``file``."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "FLASHLIGHT_FILE": file}


def rank_environ(
    environ: Mapping[str, str], slot: Slot, size: int, restarts: int, meeting: Mapping[str, str]
) -> dict[str, str]:
    """Return ``environ`` with the rendezvous ``meeting`` and the rank numbers of ``slot``."""
    return {
        **{name: value for name, value in environ.items() if name not in _RENDEZVOUS},
        **thread_variables(environ, slot.local_size, usable_cores()),
        **rank_numbers(slot, size),
        "FLASHLIGHT_RESTART_COUNT": str(restarts),
        **meeting,
    }


def unranked(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` without the variables for rank numbers and rendezvous."""
    removed = (*rank_numbers(Slot(0, 0, 0, 0), 0), *_RENDEZVOUS)
    return {name: value for name, value in environ.items() if name not in removed}


def rank_numbers(slot: Slot, size: int) -> dict[str, str]:
    """Return the environment variables for the numbers of a rank in a world of ``size`` ranks."""
    return {
        "RANK": str(slot.rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(slot.local_rank),
        "LOCAL_WORLD_SIZE": str(slot.local_size),
    }


class RankProcesses:
    """Processes of ranks. Their output on ``streams`` is passed to ``on_output(source, data)``.

    ``streams`` has "out", "err" or both. The ranks inherit other streams from this process. Each
    process leads a session, so a signal reaches its children as well, and Ctrl-C reaches only the
    launcher. On Windows, only the process itself receives signals, and every signal kills it.
    """

    _guard: system.Popen[bytes] | None = None

    def __init__(
        self, loop: Poll, on_output: Callable[[Source, bytes], None],
        streams: Collection[str] = STREAMS,
    ) -> None:  # fmt: skip
        self._loop, self._on_output, self._streams = loop, on_output, streams
        self._processes: dict[int, system.Popen[bytes]] = {}
        self._pipes: dict[Source, int] = {}

    def start(
        self, rank: int, command: Sequence[str], environ: Mapping[str, str], stdin: int = DEVNULL,
        descriptors: Sequence[int] = (), is_guarded: bool = False,
    ) -> system.Popen[bytes]:  # fmt: skip
        """Start ``rank``. The process reads ``stdin`` (a descriptor) and inherits ``descriptors``.

        If ``is_guarded``, it is killed when this process ends, which must have a single thread.
        """
        by_kernel = partial(signal_if_parent_ends, system.getpid())
        write_ends: dict[str, int] = {}
        try:
            for stream in self._streams:
                source = Source(rank, stream)
                self._pipes[source], write_ends[stream] = system.pipe()
                system.set_blocking(self._pipes[source], False)
                self._loop.watch(self._pipes[source], partial(self._read, source))
            process = system.Popen(
                command,
                env=environ,
                stdin=stdin,
                stdout=write_ends.get("out"),
                stderr=write_ends.get("err"),
                start_new_session=True,
                pass_fds=descriptors,
                bufsize=0,
                preexec_fn=by_kernel if is_guarded and not system.IS_PORTABLE else None,
            )
        finally:
            for end in write_ends.values():
                system.close(end)
        self._processes[rank] = process
        if is_guarded and system.IS_PORTABLE:
            self._tell_guard(process.pid)
        return process

    def signal(self, number: int) -> None:
        """Send ``number`` to every rank that is not reaped, and to its process group."""
        for process in self._processes.values():
            if process.returncode is None:  # its pid cannot be reused before it is reaped
                signal_group(process.pid, number)

    def drain(self, rank: int) -> None:
        """Read the output that ``rank`` has written so far. Call it after the rank has ended."""
        for stream in self._streams:
            self._drain(Source(rank, stream))

    def exit_code(self, rank: int) -> int | None:
        return await_end(self._processes[rank])

    def wait(self) -> list[int]:
        """Wait for all ranks; return each exit code, or minus the signal that killed the rank."""
        return [process.wait() for process in self._processes.values()]

    def close(self) -> None:
        """Read the available output and close the pipes. Children of ranks may still run."""
        for process in self._processes.values():
            if process.stdin:
                process.stdin.close()
            if self._guard:
                if system.killpg:  # its children, which nothing else finds
                    signal_group(process.pid, SIGKILL)
                self._tell_guard(process.pid)
        if self._guard:
            self._guard.communicate()
        for source in list(self._pipes):
            self._drain(source)
            self._close(source)

    def _tell_guard(self, pid: int) -> None:
        """Tell the guard that process ``pid`` has started, or that it has ended."""
        if self._guard is None:
            command = [sys.executable, guard.__file__]
            self._guard = system.Popen(command, stdin=PIPE, bufsize=0, start_new_session=True)
        assert self._guard.stdin
        with suppress(BrokenPipeError):  # the user has killed the guard
            self._guard.stdin.write(b"%d\n" % pid)

    def _read(self, source: Source) -> bool:
        """Pass available output to ``on_output``. Return False if there is no output."""
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
        """Read the available output, at most 16 chunks, because children may continue to write."""
        for _ in range(16):
            if source not in self._pipes or not self._read(source):
                return

    def _close(self, source: Source) -> None:
        descriptor = self._pipes.pop(source, None)
        if descriptor is not None:
            self._loop.unwatch(descriptor)
            system.close(descriptor)


def signal_group(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # macOS permits no signal to a zombie
        (system.killpg or system.kill)(pid, number)


def end_leftovers(loop: Loop, grace: float) -> list[int]:
    """End processes that ranks left behind: SIGTERM, and SIGKILL after ``grace`` seconds.

    Returns the pids of processes that still exist because the kernel does not end them.
    """

    def remaining_processes() -> set[int]:
        return set(system.children()) if loop.reap() else set()

    for number, seconds in ((signal.SIGTERM, grace), (SIGKILL, _KILLED_SECONDS)):
        signalled, ends = set[int](), system.monotonic() + seconds
        while (remaining := remaining_processes()) and system.monotonic() < ends:
            for pid in remaining - signalled:  # later also the orphans of ended processes
                system.kill(pid, number)
                system.kill(pid, SIGCONT)  # a stopped process would not handle SIGTERM
            signalled = remaining
            loop.once(ends)
    return sorted(remaining_processes())
