"""The agent runs the ranks of a host for the launcher: in its process, or over ssh.

The launcher starts ``python -m flashlight_py.launch.agent``; standard input and output are the
connection. ``channel`` describes the messages.
"""

from __future__ import annotations

import signal
import sys
import syslog
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from subprocess import DEVNULL
from typing import Any

from flashlight_py import system
from flashlight_py.cores import check_processes
from flashlight_py.interfaces import keep_port, listen_everywhere, own_addresses
from flashlight_py.launch.channel import Outgoing, Reader, message, parsed, write_whole
from flashlight_py.launch.front import die_with_parent, run_behind
from flashlight_py.launch.loop import HARMLESS, LOST_SECONDS, Loop, Pulse
from flashlight_py.launch.output import Source
from flashlight_py.launch.ranks import (
    LISTENER,
    RECORDS,
    RankProcesses,
    Slot,
    end_leftovers,
    environ_of,
)
from flashlight_py.launch.records import Notes, send_records

_IN, _OUT = 0, 1
_BACKLOG = 1024  # ranks that may wait to connect before rank 0 answers; others are let in later


class Agent:
    """Runs ranks in attempts, one after the other; ``report`` is called with what happens.

    Its public methods are the messages of the launcher. ``stdin`` is the input of rank 0, if any.
    """

    report: Callable[..., None]

    def __init__(self, loop: Loop, stdin: int | None = None) -> None:
        self._loop, self._stdin = loop, stdin
        self._task: Mapping[str, Any] = {"grace": 0.0}
        # Of an attempt; what of it is open is closed by ``_ends``.
        self._ranks: RankProcesses | None = None
        self._listener: system.Socket | None = None
        self._input: Outgoing | None = None
        self._notes: Notes | None = None
        self._waiting = deque[Slot]()  # ranks that are not started yet
        self._ends = ExitStack()

    def prepare(self, attempt: int, has_rank_0: bool, needs_port: bool) -> None:
        """Report the addresses of this host, the best first, and free ports for the ranks.

        The first port is MASTER_PORT, the second, if it ``needs_port``, for our own rank 0.
        """
        if not has_rank_0:
            self.report("ready", attempt, [], [])
            return
        sockets = [self._ends.enter_context(keep_port())]
        if needs_port:  # rank 0 inherits a listening socket, so that nobody can take the port
            self._listener = self._ends.enter_context(listen_everywhere(0, _BACKLOG))
            sockets.append(self._listener)
        # The first one is the address at which ssh came, as sshd says (ssh(1)).
        by_ssh = system.environ.get("SSH_CONNECTION", "").split()[2:3]
        addresses = sorted(own_addresses(), key=lambda each: each not in by_ssh)
        self.report("ready", attempt, addresses, [each.getsockname()[1] for each in sockets])

    def task(self, task: Mapping[str, Any]) -> None:
        """Keep what the ranks of all hosts are: ``size`` of ``program``; see ``Job``."""
        self._task = task

    def start(self, slots: Sequence[Sequence[int]]) -> None:
        """Start the ranks of this host, one in each round of the loop, which handles signals."""
        task = self._task
        self._ranks = RankProcesses(self._loop, self._on_output)
        self._ends.callback(self._ranks.close)
        if task["wants_records"]:
            self._notes = Notes(self._loop)
            self._ends.callback(self._notes.close)
        try:
            check_processes(f"ranks on {system.gethostname()}", len(slots), 2)
        except ValueError as error:
            self.report("cannot_run", str(error))
            return
        self._waiting.extend(map(Slot._make, slots))
        always, end = system.pipe()  # a pipe without a writer can always be read
        system.close(end)
        self._ends.callback(system.close, always)
        self._ends.callback(self._loop.forget, always)
        self._loop.watch(always, partial(self._start_next, always))

    def signal(self, number: int) -> None:
        """Send ``number`` to the ranks and to processes that they have started.

        A signal other than SIGUSR1, SIGUSR2 and SIGCONT also cancels the ranks that wait.
        """
        if self._ranks is not None:
            self._ranks.signal(number)
        while self._waiting and number not in (*HARMLESS, signal.SIGCONT):
            self.report("exited", self._waiting.popleft().rank, -number)

    def input(self, data: bytes) -> None:
        """Pass on the next input of rank 0; nothing: its end."""
        if self._input is not None and data:
            self._input.put(data)
        elif self._input is not None:
            self._input.close()

    def collect(self) -> None:
        if self._notes is not None:
            send_records(self._notes.paths(), self.report)

    def finish(self, grace: float) -> None:
        """End what the ranks have left, by SIGKILL after ``grace`` seconds; blocks until then."""
        self._waiting.clear()
        stuck = end_leftovers(self._loop, grace)
        self._ends.close()
        self._ranks = self._listener = self._input = self._notes = None
        self.report("finished", stuck)

    def leave(self) -> None:
        """End the ranks that are left; blocks like ``finish``."""
        self.finish(self._task["grace"])

    def _start_next(self, always: int) -> None:
        """Start the next rank that waits; if no rank waits, stop watching ``always``."""
        if self._waiting:
            try:
                self._start(self._waiting.popleft(), self._task)
            except OSError as error:
                self._waiting.clear()
                self.report("cannot_run", f"{self._task['program'][0]}: {error}")
            return
        self._loop.forget(always)
        if self._listener is not None:
            self._listener.close()  # it is rank 0's alone, and ends with it

    def _start(self, slot: Slot, task: Mapping[str, Any]) -> None:
        assert self._ranks is not None
        meeting, descriptors = task["meeting"], []
        if self._listener is not None and slot.rank == 0:
            descriptors = [self._listener.fileno()]
            meeting = {**meeting, LISTENER: str(descriptors[0])}
        if self._notes is not None:
            descriptors.append(self._notes.descriptor)
            meeting = {**meeting, RECORDS: self._notes.variable()}
        environ = {**system.environ, **task["environ"]}
        with self._input_of(slot, task["has_input"]) as stdin:
            process = self._ranks.start(
                slot.rank,
                task["program"],
                environ_of(environ, slot, task["size"], task["restarts"], meeting),
                stdin,
                descriptors,
                partial(die_with_parent, system.getpid()),
            )
        self._loop.child(process, partial(self._on_exit, self._ranks, slot.rank))

    @contextmanager
    def _input_of(self, slot: Slot, is_sent: bool) -> Iterator[int]:
        """Yield what a rank reads: our own input, what the launcher sends, or nothing."""
        if slot.rank != 0 or not (is_sent or self._stdin is not None):
            yield DEVNULL
        elif self._stdin is not None:
            yield self._stdin
        else:
            theirs, ours = system.pipe()
            self._input = Outgoing(self._loop, ours, partial(self.report, "more"))
            self._ends.callback(self._input.close)
            system.close(ours)
            yield theirs
            system.close(theirs)
            self.report("more")

    def _on_output(self, source: Source, data: bytes) -> None:
        self.report("output", *source, data)

    def _on_exit(self, ranks: RankProcesses, rank: int, code: int) -> None:
        if ranks is self._ranks:  # else it is a rank of an earlier attempt, reaped late
            ranks.drain(rank)
            self.report("exited", rank, code)


class LauncherConnection:
    """The connection of an agent to its launcher, by the descriptors ``reading`` and ``writing``.

    ``silence`` is "", or says since when the launcher has sent nothing, for ``lost_after`` seconds.
    """

    def __init__(self, loop: Loop, reading: int, writing: int, lost_after: float) -> None:
        self.has_ended, self.silence = False, ""
        self._loop, self._reading, self._writing = loop, reading, writing
        self._inbox: deque[tuple[str, list[Any]]] = deque()
        self._is_writing = False
        system.set_blocking(writing, False)
        loop.watch(reading, self._read)
        self._pulse = Pulse(loop, lost_after, self._beat, self._on_silence)
        self._reader = Reader(reading, self._pulse.heard)
        self.report("here")

    def report(self, kind: str, *values: Any) -> None:
        """Send a message to the launcher; blocks until it is written, or the launcher is lost."""
        if not (self.has_ended or self.silence):
            self._write(message(kind, *values))

    def end(self) -> None:
        """Let ``run`` return."""
        self.has_ended = True

    def run(self, agent: Agent) -> None:
        """Pass messages of the launcher to ``agent`` until the end; then end the ranks here."""
        while not self.has_ended:
            self._loop.once()
            # Not in the callback: to finish an attempt waits for further ones.
            while self._inbox and not self.has_ended:
                kind, values = self._inbox.popleft()
                if kind == "leave":
                    self.end()
                else:
                    getattr(agent, kind)(*values)
            if self._reader.has_ended:
                self.end()
        self._pulse.stop()
        self._loop.forget(self._reading)
        agent.leave()

    def _read(self) -> None:
        self._inbox += map(parsed, self._reader.lines())
        if self._reader.has_ended:
            self._loop.forget(self._reading)

    def _write(self, data: bytes) -> None:
        self._is_writing = True
        try:
            write_whole(self._writing, data, self._wait)
        except OSError:  # it is gone
            self.end()
        self._is_writing = False

    def _wait(self) -> None:
        """While the launcher takes no messages: see whether it is there at all."""
        self._inbox += map(parsed, self._reader.lines())
        self._pulse.look()
        if self.silence:
            raise BrokenPipeError(self.silence)

    def _beat(self) -> None:
        if not self._is_writing and system.can_write(self._writing):
            self._write(message("pulse"))

    def _on_silence(self, since: str) -> None:
        self.silence = since
        self.end()


def main() -> int:
    """Run the agent of a launcher at the other end of ssh; returns its exit code."""
    return run_behind(_work, lambda: None)


def _work() -> int:
    lost_after = float(sys.argv[1]) if len(sys.argv) > 1 else LOST_SECONDS
    with closing(Loop()) as loop:
        agent, launcher = Agent(loop), LauncherConnection(loop, _IN, _OUT, lost_after)
        agent.report = launcher.report
        loop.on_signal = lambda number: launcher.end()
        launcher.run(agent)
    if not launcher.silence:
        return 0
    line = (
        f"flrun: agent on {system.gethostname()}: nothing has come from the launcher "
        f"{launcher.silence}; its ranks here were ended"
    )
    print(line, file=sys.stderr)
    # Where somebody may find it on a host that is cut off: in the system's log.
    syslog.syslog(syslog.LOG_ERR, line)
    return 1


if __name__ == "__main__":
    sys.exit(main())
