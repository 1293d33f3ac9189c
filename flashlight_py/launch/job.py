"""A job from its start to its end: attempts on its hosts, the first cause, and another start.

The ranks of an attempt start when every host that takes some has reported to be ready.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any

from flashlight_py import system
from flashlight_py.launch.channel import Supply
from flashlight_py.launch.failures import Failure
from flashlight_py.launch.hosts import Hosts, StartError
from flashlight_py.launch.loop import Loop
from flashlight_py.launch.options import Options
from flashlight_py.launch.output import RankOutput, Source
from flashlight_py.launch.ranks import (
    ADDRESSES,
    PORT,
    SECRET,
    counts_of_remaining,
    for_others,
    slots_of,
)
from flashlight_py.launch.records import store_records
from flashlight_py.launch.supervisor import Supervisor

_CANNOT_RUN = 127  # as shells say
_FINISHING_SECONDS = 10.0  # that agents may take, besides the ranks' grace, to end all processes


class Job:
    """Runs the program of ``options`` as ranks on ``hosts``.

    They meet at paths that begin with ``file``, or, if it is empty, at a port of the first host,
    which its agent opens, with a secret of that start. ``stdin`` is sent to rank 0 on its host.
    """

    _attempt: Supervisor
    _output: RankOutput

    def __init__(
        self, loop: Loop, hosts: Hosts, options: Options, stdin: int | None, file: str
    ) -> None:
        self._hosts, self._loop, self._options = hosts, loop, options
        self._stdin, self._file = stdin, file
        self._awaited: set[int] = set()  # hosts that have not finished
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
                say(f"processes that the kernel does not let go of are left: {self._stuck}")
            if output.error:
                say(output.error)
            if number := attempt.interrupted:
                lost = "the output of the ranks is lost"
                how = f"interrupted by {signal.Signals(number).name}"
                say(f"{lost if number == signal.SIGPIPE else how}; all ranks were ended")
                return 128 + number
            if attempt.cause is None:
                return 0
            rank, failure = attempt.cause
            host = self._hosts.names[self._slots[rank].host]
            file = output.files_of(rank)
            where = f" (see {file})" if file else ""
            others = "; the other ranks were ended" if size > 1 else ""
            say(f"rank {rank} of {size} on {host} {failure.what}{where}{others}")
            for text in sorted(self._left_out):
                say(text)
            if where := store_records(self._records, size):
                say(where)
            if options.min_n:
                counts = counts_of_remaining(counts, attempt.lost)
            if not may_restart(restarts, options.max_restarts, sum(counts), options.min_n):
                code = failure.exit_code or 1
                return code if code > 0 else 128 - code
            restarts += 1
            say(f"starting again with {sum(counts)} rank(s), for the {_ordinal(restarts)} time")

    def _start(self, counts: Sequence[int], restarts: int) -> None:
        self._slots, self._restarts = slots_of(counts), restarts
        self._first = self._slots[0].host
        self._working = {slot.host for slot in self._slots}  # hosts that take ranks
        self._unready = set(self._working)  # those that are not ready
        self._addresses, self._ports = list[str](), list[int]()  # of the first host
        self._is_started = False
        self._stuck: list[int] = []
        # By rank, a flight record with the folder it comes from; and which ones stay there, why.
        self._records: dict[int, tuple[str, bytes]] = {}
        self._left_out: list[str] = []
        self._supply: Supply | None = None
        if self._stdin is not None:
            deliver = partial(self._hosts.send, self._first, "input")
            self._supply = Supply(self._loop, self._stdin, deliver)
        for index in sorted(self._working & self._hosts.here):
            self._on_here(index)
        if not self._attempt.is_ending:
            self._hosts.open(sorted(self._working - self._hosts.here))

    def _signal(self, number: int) -> None:
        """Send ``number`` to every rank, and to what it has started."""
        self._hosts.send_all("signal", number)
        if self._attempt.is_ending and not self._is_started:
            self._attempt.on_end(slot.rank for slot in self._slots)

    def _finish(self) -> None:
        """Once all ranks have ended, have the agents end what they have left, and wait for that.

        After a failure, they report flight records of ranks before.
        """
        grace = self._options.grace
        if self._supply is not None:
            self._supply.stop()
        self._awaited = self._working & self._hosts.here
        if self._attempt.cause:
            self._hosts.send_all("collect")
        self._hosts.send_all("finish", grace)
        ends = system.monotonic() + grace + _FINISHING_SECONDS
        while self._awaited and system.monotonic() < ends:
            self._loop.once(ends)
        self._hosts.drop(sorted(self._awaited), grace + _FINISHING_SECONDS)

    def _on_message(self, host: int, kind: str, values: list[Any]) -> None:
        self.HANDLERS[kind](self, host, *values)

    def _on_here(self, host: int) -> None:
        if host in self._unready:
            has_rank_0 = host == self._first
            self._hosts.send(host, "prepare", self._restarts, has_rank_0, not self._file)

    def _on_ready(self, host: int, attempt: int, addresses: list[str], ports: list[int]) -> None:
        if attempt != self._restarts:
            return  # the agent started while the last attempt ended
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
        """Return the variables that say where the ranks meet."""
        port, *ours = self._ports
        if self._file:
            file = f"{self._file}-{self._restarts}"
            return {**for_others("127.0.0.1", port), "FLASHLIGHT_FILE": file}
        return {
            **for_others(self._addresses[0], port),
            # Ranks try them all: which of them a host can reach, only that host knows.
            ADDRESSES: ",".join(self._addresses),
            PORT: f"{ours[0]}:{port}",
            # It travels inside ssh, and never in a command line, which every user can read.
            SECRET: system.random_bytes(32).hex(),
        }

    def _on_cannot_run(self, host: int, reason: str) -> None:
        if not self._attempt.is_ending:  # else this host is not the first cause
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

    def _on_left_out(self, host: int, rank: int, path: str, why: str) -> None:
        where = f"on host {self._hosts.names[host]}, at {path}"
        self._left_out.append(f"the flight record of rank {rank} stays {where}: {why}")

    def _on_finished(self, host: int, stuck: list[int]) -> None:
        self._awaited.discard(host)
        self._stuck += stuck

    # The agents' messages, see ``channel``.
    HANDLERS: Mapping[str, Callable[..., None]] = {
        "here": _on_here,
        "ready": _on_ready,
        "cannot_run": _on_cannot_run,
        "output": _on_output,
        "exited": _on_exited,
        "more": _on_more,
        "record": _on_record,
        "left_out": _on_left_out,
        "finished": _on_finished,
    }

    def _on_lost(self, host: int, how: str) -> None:
        """Nothing will be reported of the ranks of ``host`` any more."""
        self._awaited.discard(host)
        ranks = [slot.rank for slot in self._slots if slot.host == host]
        self._attempt.on_lost(ranks, Failure(how, system.monotonic()))


def may_restart(restarts: int, most: int | None, remaining: int, least: int | None) -> bool:
    """Return whether a job that was started again ``restarts`` times may be so once more.

    At most ``most`` times; None: never, but as often as ranks can be lost where ``least`` says
    how many are enough. ``remaining`` is how many it would have.
    """
    if least is not None and remaining < least:
        return False
    return restarts < (most if most is not None else 0 if least is None else restarts + 1)


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10)
    return f"{number}{ending or 'th'}"
