"""A job from start to end: attempts on its hosts, the first cause of a failure, and restarts.

The ranks of an attempt start when every host with ranks has reported that it is ready.
"""

import signal
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any

from flashlight_py import system
from flashlight_py.launch import ranks
from flashlight_py.launch.channel import Supply
from flashlight_py.launch.failures import Failure
from flashlight_py.launch.hosts import Hosts, StartError
from flashlight_py.launch.loop import SIGPIPE, Loop
from flashlight_py.launch.options import Options
from flashlight_py.launch.output import RankOutput, Source
from flashlight_py.launch.records import store_records
from flashlight_py.launch.supervisor import Supervisor

_CANNOT_RUN = 127  # exit code of shells if a command cannot run
_FINISHING_SECONDS = 10.0  # seconds for agents to end all processes, in addition to grace


class Job:
    """A job that runs the program of ``options`` as ranks on ``hosts``.

    The ranks rendezvous at files whose paths begin with ``file``. If ``file`` is empty, they
    connect to a port of the first host with a secret that the job creates for each attempt. If
    ``stdin`` is not None, the job reads this descriptor and sends the data to rank 0.
    """

    _attempt: Supervisor
    _output: RankOutput

    def __init__(
        self, loop: Loop, hosts: Hosts, options: Options, stdin: int | None, file: str
    ) -> None:
        self._hosts, self._loop, self._options = hosts, loop, options
        self._stdin, self._file = stdin, file
        self._unfinished: set[int] = set()  # hosts that have not finished
        hosts.on_message, hosts.on_lost = self._on_message, self._on_lost

    def run(self) -> int:
        """Run the job, end its agents, and return the exit code of the first failed rank, or 0."""
        try:
            return self._run()
        finally:
            self._hosts.leave()

    def _run(self) -> int:
        options = self._options
        counts, restarts = self._hosts.slots, 0
        while True:
            size = sum(counts)
            self._output = output = RankOutput(size, options.output_dir)
            say = output.say
            self._attempt = attempt = Supervisor(
                self._loop, self._signal, output, range(size), options.grace, say
            )
            self._loop.on_signal = attempt.on_signal
            try:
                self._start(counts, restarts)
                attempt.run()
            except StartError as error:
                attempt.end(signal.SIGTERM)
                say(f"cannot run {error}")
                return _CANNOT_RUN
            self._finish()
            output.end()
            if self._stuck:
                say(f"the kernel did not end these processes after SIGKILL: {self._stuck}")
            if output.error:
                say(output.error)
            if number := attempt.interrupted:
                lost = "the output of the ranks is lost"
                reason = f"interrupted by {signal.Signals(number).name}"
                say(f"{lost if number == SIGPIPE else reason}; all ranks were ended")
                return 128 + number
            if attempt.cause is None:
                return 0
            rank, failure = attempt.cause
            host = self._hosts.names[self._slots[rank].host]
            file = output.files_of(rank)
            location = f" (see {file})" if file else ""
            others = "; the other ranks were ended" if size > 1 else ""
            say(f"rank {rank} of {size} on {host} {failure.description}{location}{others}")
            for text in sorted(self._left_out):
                say(text)
            if message := store_records(self._records, size):
                say(message)
            if options.min_n:
                counts = ranks.remaining_counts(counts, attempt.lost)
            if not may_restart(restarts, options.max_restarts, sum(counts), options.min_n):
                code = failure.exit_code or 1
                return code if code > 0 else 128 - code
            restarts += 1
            say(f"starting again with {sum(counts)} rank(s): restart {restarts}")

    def _start(self, counts: Sequence[int], restarts: int) -> None:
        self._slots, self._restarts = ranks.slots_of(counts), restarts
        self._first = self._slots[0].host
        self._working = {slot.host for slot in self._slots}  # hosts with ranks
        self._unready = set(self._working)  # hosts that are not ready
        self._addresses, self._ports = list[str](), list[int]()  # reported by the first host
        self._is_started = False
        self._stuck: list[int] = []
        # Folder and content of each rank's flight record; reasons why records are missing.
        self._records: dict[int, tuple[str, bytes]] = {}
        self._left_out: list[str] = []
        self._supply: Supply | None = None
        if self._stdin is not None:
            deliver = partial(self._hosts.send, self._first, "input")
            self._supply = Supply(self._loop, self._stdin, deliver)
        for index in sorted(self._working & self._hosts.connected):
            self._on_here(index)
        if not self._attempt.is_ending:
            self._hosts.open(sorted(self._working - self._hosts.connected))

    def _signal(self, number: int) -> None:
        self._hosts.send_all("signal", number)
        if self._attempt.is_ending and not self._is_started:
            self._attempt.on_end(slot.rank for slot in self._slots)

    def _finish(self) -> None:
        """Let the agents end leftover processes of ended ranks, and wait for the agents.

        After a failure, the agents first send the flight records of the ranks.
        """
        grace = self._options.grace
        if self._supply is not None:
            self._supply.stop()
        self._unfinished = self._working & self._hosts.connected
        if self._attempt.cause:
            self._hosts.send_all("collect")
        self._hosts.send_all("finish", grace)
        ends = system.monotonic() + grace + _FINISHING_SECONDS
        while self._unfinished and system.monotonic() < ends:
            self._loop.once(ends)
        self._hosts.drop(sorted(self._unfinished), grace + _FINISHING_SECONDS)

    def _on_message(self, host: int, kind: str, values: list[Any]) -> None:
        getattr(self, f"_on_{kind}")(host, *values)  # see ``channel``

    def _on_here(self, host: int) -> None:
        if host in self._unready:
            self._hosts.send(host, "prepare", self._restarts, host == self._first, not self._file)

    def _on_ready(self, host: int, attempt: int, addresses: list[str], ports: list[int]) -> None:
        if attempt != self._restarts:
            return  # the agent connected while the previous attempt ended
        if host == self._first:
            self._addresses, self._ports = addresses or [self._hosts.names[host]], ports
        self._unready.discard(host)
        if not (self._unready or self._is_started or self._attempt.is_ending):
            self._is_started = True
            task = {
                "size": len(self._slots),
                "program": self._options.program,
                "environ": self._hosts.environ,
                "restarts": self._restarts,
                "meeting": self._meeting(),
                "grace": self._options.grace,
                "has_input": self._supply is not None,
                "wants_records": len(self._hosts.names) > 1,
            }
            self._hosts.send_all("task", task)
            for index, slots in groupby(self._slots, attrgetter("host")):
                self._hosts.send(index, "start", list(slots))

    def _meeting(self) -> dict[str, str]:
        port, *listener_ports = self._ports
        if self._file:
            return ranks.file_meeting(f"{self._file}-{self._restarts}", port)
        return {
            "MASTER_ADDR": self._addresses[0],
            "MASTER_PORT": str(port),
            # Ranks on other hosts try all addresses, because some may be unreachable from there.
            ranks.ADDRESSES: ",".join(self._addresses),
            ranks.PORT: f"{listener_ports[0]}:{port}",
            # Sent inside ssh and never in a command line, which every user can read.
            ranks.SECRET: system.random_bytes(32).hex(),
        }

    def _on_cannot_run(self, host: int, reason: str) -> None:
        if not self._attempt.is_ending:  # otherwise an earlier failure is the cause
            raise StartError(reason)

    def _on_output(self, host: int, rank: int, stream: str, data: bytes) -> None:
        self._output.take(Source(rank, stream), data)

    def _on_exited(self, host: int, rank: int, code: int) -> None:
        self._attempt.on_exit(rank, code)

    def _on_more(self, host: int) -> None:
        if self._supply is not None:
            self._supply.ask()

    def _on_record(self, host: int, rank: int, folder: str, data: bytes) -> None:
        self._records[rank] = folder, data

    def _on_left_out(self, host: int, rank: int, path: str, reason: str) -> None:
        location = f"on host {self._hosts.names[host]}, at {path}"
        self._left_out.append(f"the flight record of rank {rank} remains {location}: {reason}")

    def _on_finished(self, host: int, stuck: list[int]) -> None:
        self._unfinished.discard(host)
        self._stuck += stuck

    def _on_lost(self, host: int, reason: str) -> None:
        self._unfinished.discard(host)
        lost = [slot.rank for slot in self._slots if slot.host == host]
        self._attempt.on_lost(lost, Failure(reason, system.monotonic()))


def may_restart(restarts: int, limit: int | None, remaining: int, min_ranks: int | None) -> bool:
    """Return whether a job may restart after ``restarts`` restarts with ``remaining`` ranks.

    ``limit`` is the maximum number of restarts. If it is None, the job restarts only if
    ``min_ranks`` is set, and then as long as ``min_ranks`` ranks remain.
    """
    if min_ranks is not None and remaining < min_ranks:
        return False
    return restarts < (limit if limit is not None else 0 if min_ranks is None else restarts + 1)
