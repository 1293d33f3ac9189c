"""The agent runs a host's ranks for the launcher: in it, or at the end of a pipe or a socket.

``python -m flashlight_py.launch.agent`` is the one that a launcher elsewhere starts over ssh; its
standard input and output are the connection. See ``channel`` for the messages.
"""

from __future__ import annotations

import math
import sys
import syslog
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from subprocess import DEVNULL
from typing import Any

from flashlight_py import system
from flashlight_py.interfaces import listen_everywhere, own_addresses
from flashlight_py.launch.channel import Outgoing, Reader, message, write_whole
from flashlight_py.launch.front import die_with_parent, run_behind
from flashlight_py.launch.loop import LOST_SECONDS, Loop, Pulse
from flashlight_py.launch.output import RankOutput, Source
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
# How many ranks may wait to connect before rank 0 answers; others are let in later.
_BACKLOG = 1024


class Agent:
    """Runs ranks in attempts, one after the other; ``report`` is called with what happens.

    Its public methods are the messages of the launcher. ``stdin`` is the input of rank 0, if any;
    ``output``, if any, shows what the ranks print, which is reported otherwise. ``reached`` are
    addresses at which other hosts of the job have reached this one.
    """

    output: RankOutput | None = None
    reached: Sequence[str] = ()

    def __init__(self, loop: Loop, report: Callable[..., None], stdin: int | None = None) -> None:
        self._loop, self._report, self._stdin = loop, report, stdin
        self.grace, self._has_lost_output = 0.0, False
        # Of an attempt; what of it is open is closed by ``_ends``.
        self._ranks: RankProcesses | None = None
        self._listener: system.Socket | None = None
        self._input: Outgoing | None = None
        self._notes: Notes | None = None
        self._ends = ExitStack()

    def prepare(self, needs_port: bool) -> None:
        """Report where ranks could meet on this host: its addresses, the best first, and a port."""
        if not needs_port:
            self._report("ready", [], 0)
            return
        # Rank 0 inherits it: a port that is merely reserved could be taken by somebody else.
        self._listener = self._ends.enter_context(listen_everywhere(0, _BACKLOG))
        # Those first at which others have reached this host; one of them is that at which ssh came,
        # as sshd says (ssh(1)).
        by_ssh, own = system.environ.get("SSH_CONNECTION", "").split()[2:3], own_addresses()
        reached = [each for each in (*self.reached, *by_ssh) if each in own]
        port = self._listener.getsockname()[1]
        self._report("ready", list(dict.fromkeys([*reached, *own])), port)

    def start(self, task: Mapping[str, Any]) -> None:
        """Start ranks: ``slots`` of ``size``, where ``meeting`` says; see ``Job``."""
        self._ranks, self.grace = RankProcesses(self._loop, self._on_output), task["grace"]
        self._ends.callback(self._ranks.close)
        if task["wants_records"]:
            self._notes = Notes(self._loop)
            self._ends.callback(self._notes.close)
        try:
            for slot in map(Slot._make, task["slots"]):
                self._start(slot, task)
        except OSError as error:
            self._report("cannot_run", f"{task['program'][0]}: {error}")
        if self._listener is not None:
            self._listener.close()  # it is rank 0's alone, and ends with it

    def signal(self, number: int) -> None:
        """Send ``number`` to the ranks and what they have started."""
        if self._ranks is not None:
            self._ranks.signal(number)

    def input(self, data: bytes) -> None:
        """Pass on the next input of rank 0; nothing: its end."""
        if self._input is not None and data:
            self._input.put(data)
        elif self._input is not None:
            self._input.close()

    def collect(self) -> None:
        if self._notes is not None:
            send_records(self._notes.paths(), self._report)

    def finish(self, grace: float) -> None:
        """End what the ranks have left, by SIGKILL after ``grace`` seconds; blocks until then."""
        stuck = end_leftovers(self._loop, grace)
        self._ends.close()
        self._ranks = self._listener = self._input = self._notes = None
        if self.output is not None:
            self.output.end()
        self.flush()
        self._report("finished", stuck)

    def say(self, text: str) -> None:
        assert self.output
        self.output.say(text)

    def flush(self) -> float:
        """Show lines without an end that are due; returns when the next ones are."""
        if self.output is None:
            return math.inf
        if system.monotonic() >= self.output.flush_at():
            self.output.flush(system.monotonic())
        if self.output.error and not self._has_lost_output:
            self._has_lost_output = True
            self._report("lost_output")
            self.output.say(self.output.error)
        return self.output.flush_at()

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
            self._input = Outgoing(self._loop, ours, partial(self._report, "more"))
            self._ends.callback(self._input.close)
            system.close(ours)
            yield theirs
            system.close(theirs)
            self._report("more")

    def _on_output(self, source: Source, data: bytes) -> None:
        if self.output is None:
            self._report("output", *source, data)
        else:
            self.output.take(source, data)

    def _on_exit(self, ranks: RankProcesses, rank: int, code: int) -> None:
        if ranks is not self._ranks:
            return  # one of an earlier attempt, which the kernel has let go of at last
        ranks.drain(rank)
        errors = [] if self.output is None else self.output.last_errors(rank)
        self._report("exited", rank, code, errors)


class LauncherConnection:
    """Our end of the connection of an agent to its launcher, two descriptors.

    Once nothing has come from there for ``lost_after`` seconds, ``silence`` says since when.
    """

    def __init__(self, loop: Loop, reading: int, writing: int, lost_after: float) -> None:
        self.has_ended, self.silence = False, ""
        system.set_blocking(writing, False)
        self._loop, self._reading, self._writing = loop, reading, writing
        self._reader = Reader(reading)
        self._inbox: deque[tuple[str, list[Any]]] = deque()
        self._is_writing = False
        loop.watch(reading, self._read)
        self._pulse = Pulse(loop, lost_after, self._beat, self._on_silence)

    def report(self, kind: str, *values: Any) -> None:
        """Send a message to the launcher; blocks until it is written, or the launcher is lost."""
        if self.silence:
            return
        self._is_writing = True
        try:
            write_whole(self._writing, message(kind, *values), self._wait)
        except OSError:  # it is gone
            self.end()
        self._is_writing = False

    def end(self) -> None:
        """Let ``run`` return."""
        self.has_ended = True

    def run(self, agent: Agent) -> int | None:
        """Have ``agent`` do what the launcher says, then end all ranks that are left.

        Returns the exit code with which to leave; None if the connection has ended before.
        """
        code: int | None = None
        while not self.has_ended:
            self._loop.once(agent.flush())
            # Not in the callback: to finish an attempt waits for further ones.
            while self._inbox and code is None:
                kind, values = self._inbox.popleft()
                if kind == "leave":
                    (code,) = values
                else:
                    getattr(agent, kind)(*values)
            if code is not None or self._reader.has_ended:
                self.end()
        agent.finish(agent.grace)
        self._pulse.stop()
        return code

    def _read(self) -> None:
        before = self._reader.received
        self._inbox.extend(self._reader.read())
        if self._reader.received > before:
            self._pulse.heard()
        if self._reader.has_ended:
            self._loop.forget(self._reading)

    def _wait(self) -> None:
        """While the launcher takes no messages: see whether it is there at all."""
        self._read()
        self._pulse.look()
        if self.silence:
            raise BrokenPipeError(self.silence)

    def _beat(self) -> None:
        if not self._is_writing and system.can_write(self._writing):
            self.report("pulse")

    def _on_silence(self, since: str) -> None:
        self.silence = since
        self.end()


def main() -> int:
    """Run the agent of a launcher at the other end of ssh; returns its exit code."""
    return run_behind(_work, lambda: None)


def _work() -> int:
    lost_after = float(sys.argv[1]) if len(sys.argv) > 1 else LOST_SECONDS
    with closing(Loop()) as loop:
        launcher = LauncherConnection(loop, _IN, _OUT, lost_after)
        loop.on_signal = lambda number: launcher.end()
        launcher.run(Agent(loop, launcher.report))
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
