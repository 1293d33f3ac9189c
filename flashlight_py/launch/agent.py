"""The agent runs a host's ranks for the launcher: in it, or at the end of a pipe or a socket.

``python -m flashlight_py.launch.agent`` is the one that a launcher elsewhere starts over ssh, or
another agent; its standard input and output are the connection. See ``channel`` for the messages,
and ``branches`` for those of other agents, which an agent passes on.
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
from flashlight_py.interfaces import keep_port, listen_everywhere, own_addresses
from flashlight_py.launch.branches import Branches
from flashlight_py.launch.channel import Outgoing, Reader, addressed, message, parsed, write_whole
from flashlight_py.launch.front import die_with_parent, run_behind
from flashlight_py.launch.loop import LOST_SECONDS, Loop, Pulse
from flashlight_py.launch.output import RankOutput, Source
from flashlight_py.launch.ranks import (
    LISTENER,
    PORT,
    RECORDS,
    SECRET,
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
    addresses at which other hosts of the job have reached this one. ``secret_of``, if any, makes
    the ranks' secret for an attempt, which is sent otherwise.
    """

    report: Callable[..., None]
    output: RankOutput | None = None
    reached: Sequence[str] = ()
    secret_of: Callable[[int], str] | None = None

    def __init__(self, loop: Loop, stdin: int | None = None) -> None:
        self._loop, self._stdin = loop, stdin
        self.grace, self._has_lost_output = 0.0, False
        self._task: Mapping[str, Any] = {}
        # Of an attempt; what of it is open is closed by ``_ends``.
        self._ranks: RankProcesses | None = None
        self._listener: system.Socket | None = None
        self._input: Outgoing | None = None
        self._notes: Notes | None = None
        self._ends = ExitStack()

    def prepare(self, attempt: int, has_rank_0: bool, needs_port: bool) -> None:
        """Report where ranks could meet on this host: its addresses, the best first, and ports.

        That of MASTER_PORT, and one for ours, if it ``needs_port``.
        """
        if not has_rank_0:
            self.report("ready", attempt, [], [])
            return
        sockets = [self._ends.enter_context(keep_port())]
        if needs_port:
            # Rank 0 inherits it: a port that is merely reserved could be taken by somebody else.
            self._listener = self._ends.enter_context(listen_everywhere(0, _BACKLOG))
            sockets.append(self._listener)
        # Those first at which others have reached this host; one of them is that at which ssh came,
        # as sshd says (ssh(1)).
        by_ssh, own = system.environ.get("SSH_CONNECTION", "").split()[2:3], own_addresses()
        reached = [each for each in (*self.reached, *by_ssh) if each in own]
        ports = [each.getsockname()[1] for each in sockets]
        self.report("ready", attempt, list(dict.fromkeys([*reached, *own])), ports)

    def task(self, task: Mapping[str, Any]) -> None:
        """Keep what the ranks of all hosts are: ``size`` of ``program``; see ``Job``."""
        meeting = task["meeting"]
        if self.secret_of and PORT in meeting:
            meeting = {**meeting, SECRET: self.secret_of(task["restarts"])}
        self._task, self.grace = {**task, "meeting": meeting}, task["grace"]

    def start(self, slots: Sequence[Sequence[int]]) -> None:
        """Start the ranks of this host."""
        task = self._task
        self._ranks = RankProcesses(self._loop, self._on_output)
        self._ends.callback(self._ranks.close)
        if task["wants_records"]:
            self._notes = Notes(self._loop)
            self._ends.callback(self._notes.close)
        try:
            for slot in map(Slot._make, slots):
                self._start(slot, task)
        except OSError as error:
            self.report("cannot_run", f"{task['program'][0]}: {error}")
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
            send_records(self._notes.paths(), self.report)

    def finish(self, grace: float) -> None:
        """End what the ranks have left, by SIGKILL after ``grace`` seconds; blocks until then."""
        stuck = end_leftovers(self._loop, grace)
        self._ends.close()
        self._ranks = self._listener = self._input = self._notes = None
        if self.output is not None:
            self.output.end()
        self.flush()
        self.report("finished", stuck)

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
            self.report("lost_output")
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
            self._input = Outgoing(self._loop, ours, partial(self.report, "more"))
            self._ends.callback(self._input.close)
            system.close(ours)
            yield theirs
            system.close(theirs)
            self.report("more")

    def _on_output(self, source: Source, data: bytes) -> None:
        if self.output is None:
            self.report("output", *source, data)
        else:
            self.output.take(source, data)

    def _on_exit(self, ranks: RankProcesses, rank: int, code: int) -> None:
        if ranks is not self._ranks:
            return  # one of an earlier attempt, which the kernel has let go of at last
        ranks.drain(rank)
        errors = [] if self.output is None else self.output.last_errors(rank)
        self.report("exited", rank, code, errors)


class LauncherConnection:
    """The connection of an agent to its launcher, or to the agent that is its way there.

    Messages to the agents of ``branches`` are passed on, and their reports. Once nothing has come
    from above for a while, ``silence`` says since when. With the connection ends what is below;
    where it ``keeps`` that, only the ranks there.
    """

    def __init__(self, loop: Loop, branches: Branches, keeps: bool = False) -> None:
        self.has_ended, self.silence = True, ""
        self._loop, self._branches, self._keeps = loop, branches, keeps
        self._lines: deque[bytes] = deque()
        self._inbox: deque[tuple[str, list[Any]]] = deque()
        self._is_writing = False
        branches.on_lines, branches.on_lost = self._on_lines, self._on_lost

    def connect(self, reading: int, writing: int) -> None:
        """Use two descriptors from now on."""
        system.set_blocking(writing, False)
        self.has_ended, self.silence = False, ""
        self._reading, self._writing = reading, writing
        self._lines, self._inbox = deque(), deque()
        self._loop.watch(reading, self._read)
        self._pulse = Pulse(self._loop, self._branches.lost_after, self._beat, self._on_silence)
        self._reader = Reader(reading, self._pulse.heard)
        self._branches.places += 1
        self.report("here", self._branches.places)
        self._on_lines(self._branches.here())

    def report(self, kind: str, *values: Any) -> None:
        """Send a message to the launcher; blocks until it is written, or the launcher is lost."""
        self._send_up(message(kind, *values))

    def end(self) -> None:
        """Let ``run`` return."""
        self.has_ended = True

    def leave_for_another(self) -> None:
        """Say that this agent is not lost, to who is above and may merely have been stopped."""
        if system.can_write(self._writing):
            self._write(message("moves"))

    def run(self, agent: Agent) -> int | None:
        """Have ``agent`` do what the launcher says, then end all ranks that are left.

        Returns the exit code with which to leave, after all below have left; None if the connection
        has ended before.
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
        self._pulse.stop()
        self._loop.forget(self._reading)
        if code is None and self._keeps:
            self._branches.broadcast(message("finish", agent.grace))
        elif code is None:
            self._branches.close()
        agent.finish(agent.grace)
        if code is not None:
            self._branches.wait_and_close()
        return code

    def _read(self) -> None:
        self._lines += self._reader.lines()
        if self._reader.has_ended:
            self._loop.forget(self._reading)
        self._pass_on()

    def _pass_on(self) -> None:
        """Pass on what is for others; does not block unless there are hosts to be reached."""
        while self._lines:  # others may come meanwhile
            line = self._lines.popleft()
            number, rest = addressed(line)
            if number not in (b"", b"*"):
                self._branches.put(int(number), rest)
                continue
            kind, values = parsed(rest)
            self._branches.is_leaving |= kind == "leave"
            if number or kind == "leave":
                self._branches.broadcast(rest)
            if kind == "reach":
                self._branches.reach(*values)
            else:
                self._inbox.append((kind, values))

    def _on_lines(self, lines: list[tuple[int, bytes]]) -> None:
        self._send_up(b"".join(b"%d %s" % each for each in lines))

    def _on_lost(self, node: int, how: str, gone: list[int], has_been_there: bool) -> None:
        self.report(*(("lost", node, how, gone) if has_been_there else ("unreached", node, how)))

    def _send_up(self, data: bytes) -> None:
        if self.has_ended or self.silence:
            return
        self._write(data)
        if self._lines:  # what has come meanwhile
            self._pass_on()

    def _write(self, data: bytes) -> None:
        self._is_writing = True
        try:
            write_whole(self._writing, data, self._wait)
        except OSError:  # it is gone
            self.end()
        self._is_writing = False

    def _wait(self) -> None:
        """While the launcher takes no messages: see whether it is there at all."""
        self._lines += self._reader.lines()
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
        agent, launcher = Agent(loop), LauncherConnection(loop, Branches(loop, lost_after))
        agent.report = launcher.report
        loop.on_signal = lambda number: launcher.end()
        launcher.connect(_IN, _OUT)
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
