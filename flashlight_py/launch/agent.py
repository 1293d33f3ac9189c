"""The agent runs the ranks of one host for the launcher, in the launcher's process or over ssh.

Over ssh the launcher starts ``python -m flashlight_py.launch.agent``. Standard input and output are
the connection. ``channel`` describes the messages.
"""

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from subprocess import DEVNULL
from typing import Any

from flashlight_py import system
from flashlight_py.cores import check_processes
from flashlight_py.interfaces import keep_port, listen_everywhere, own_addresses
from flashlight_py.launch import ranks
from flashlight_py.launch.channel import Outgoing, Reader, message, parsed, write_whole
from flashlight_py.launch.front import run_in_copy
from flashlight_py.launch.loop import HARMLESS, LOST_SECONDS, SIGCONT, Loop, Pulse
from flashlight_py.launch.records import RecordPipe, send_records

_IN, _OUT = 0, 1
_BACKLOG = 1024  # connections that the kernel queues until rank 0 accepts them


class Agent:
    """The ranks of one host, during all attempts of a job.

    The public methods have the names of the launcher's messages and handle them. The agent sends
    its messages with ``report``. Rank 0 reads the descriptor ``stdin`` if it is not None.
    """

    report: Callable[..., None]

    def __init__(self, loop: Loop, stdin: int | None = None) -> None:
        self._loop, self._stdin = loop, stdin
        self._task: Mapping[str, Any] = {"grace": 0.0}
        # State of the current attempt. ``_cleanup`` closes all its descriptors.
        self._ranks: ranks.RankProcesses | None = None
        self._listener: system.Socket | None = None
        self._input: Outgoing | None = None
        self._record_pipe: RecordPipe | None = None
        self._waiting = deque[ranks.Slot]()  # ranks that have not been started
        self._cleanup = ExitStack()

    def prepare(self, attempt: int, has_rank_0: bool, needs_port: bool) -> None:
        """Report that this host is ready. If it has rank 0, report its addresses and free ports.

        The address to which ssh connected is the first one. The first port is for MASTER_PORT. If
        ``needs_port`` is True, there is a second port, on which rank 0 listens.
        """
        if not has_rank_0:
            self.report("ready", attempt, [], [])
            return
        sockets = [self._cleanup.enter_context(keep_port())]
        if needs_port:  # rank 0 inherits the socket, so no program can take the port
            self._listener = self._cleanup.enter_context(listen_everywhere(0, _BACKLOG))
            sockets.append(self._listener)
        # The address to which ssh connected, as reported by sshd (ssh(1)), comes first.
        by_ssh = system.environ.get("SSH_CONNECTION", "").split()[2:3]
        addresses = sorted(own_addresses(), key=lambda address: address not in by_ssh)
        self.report("ready", attempt, addresses, [address.getsockname()[1] for address in sockets])

    def task(self, task: Mapping[str, Any]) -> None:
        """Store the task that all ranks share: program, size and environment; see ``Job``."""
        self._task = task

    def start(self, slots: Sequence[Sequence[int]]) -> None:
        """Start the ranks ``slots``: one per round of the event loop, which handles signals too."""
        task = self._task
        self._ranks = ranks.RankProcesses(
            self._loop, lambda source, data: self.report("output", *source, data)
        )
        self._cleanup.callback(self._ranks.close)
        if task["wants_records"]:
            self._record_pipe = RecordPipe(self._loop)
            self._cleanup.callback(self._record_pipe.close)
        try:
            check_processes(f"ranks on {system.gethostname()}", len(slots), 2)
        except ValueError as error:
            self.report("cannot_run", str(error))
            return
        self._waiting.extend(map(ranks.Slot._make, slots))
        readable, write_end = system.pipe()  # without a writer the pipe is always readable
        system.close(write_end)
        self._cleanup.callback(system.close, readable)
        self._cleanup.callback(self._loop.unwatch, readable)
        self._loop.watch(readable, partial(self._start_next, readable))

    def signal(self, number: int) -> None:
        """Send the signal ``number`` to the ranks and to the processes that they started.

        A signal other than SIGUSR1, SIGUSR2 and SIGCONT also cancels ranks that have not started.
        """
        if self._ranks is not None:
            self._ranks.signal(number)
        while self._waiting and number not in (*HARMLESS, SIGCONT):
            self.report("exited", self._waiting.popleft().rank, -number)

    def input(self, data: bytes) -> None:
        """Forward input to rank 0; empty ``data`` is the end of the input."""
        if self._input is not None and data:
            self._input.put(data)
        elif self._input is not None:
            self._input.close()

    def collect(self) -> None:
        if self._record_pipe is not None:
            send_records(self._record_pipe.paths(), self.report)

    def finish(self, grace: float) -> None:
        """End leftover processes by SIGTERM, and by SIGKILL after ``grace`` seconds. Blocks."""
        self._waiting.clear()
        stuck = ranks.end_leftovers(self._loop, grace)
        self._cleanup.close()
        self._ranks = self._listener = self._input = self._record_pipe = None
        self.report("finished", stuck)

    def leave(self) -> None:
        """End the remaining ranks; blocks like ``finish``."""
        self.finish(self._task["grace"])

    def _start_next(self, readable: int) -> None:
        """Start the next waiting rank. If no rank is waiting, stop watching ``readable``."""
        if self._waiting:
            try:
                self._start(self._waiting.popleft(), self._task)
            except OSError as error:
                self._waiting.clear()
                self.report("cannot_run", f"{self._task['program'][0]}: {error}")
            return
        self._loop.unwatch(readable)
        if self._listener is not None:
            self._listener.close()  # rank 0 has inherited it, and the port must close with rank 0

    def _start(self, slot: ranks.Slot, task: Mapping[str, Any]) -> None:
        assert self._ranks is not None
        meeting, descriptors = task["meeting"], []
        if self._listener is not None and slot.rank == 0:
            descriptors = [self._listener.fileno()]
            meeting = {**meeting, ranks.LISTENER: str(descriptors[0])}
        if self._record_pipe is not None:
            descriptors.append(self._record_pipe.descriptor)
            meeting = {**meeting, ranks.RECORDS: self._record_pipe.variable()}
        # By default, Python does not buffer output, and prints a traceback after a native crash.
        defaults = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
        common = {**defaults, **system.environ, **task["environ"]}
        environ = ranks.rank_environ(common, slot, task["size"], task["restarts"], meeting)
        program = slot.rank, task["program"], environ
        with self._input_of(slot, task["has_input"]) as stdin:
            process = self._ranks.start(*program, stdin, descriptors, is_guarded=True)
        self._loop.watch_child(process, partial(self._on_exit, self._ranks, slot.rank))

    @contextmanager
    def _input_of(self, slot: ranks.Slot, is_sent: bool) -> Iterator[int]:
        """Yield the descriptor for standard input: DEVNULL, except for rank 0.

        Rank 0 reads ``stdin`` of the agent or, if ``is_sent``, the input that the launcher sends.
        """
        if slot.rank != 0 or not (is_sent or self._stdin is not None):
            yield DEVNULL
        elif self._stdin is not None:
            yield self._stdin
        else:
            read_end, write_end = system.pipe()
            self._input = Outgoing(self._loop, write_end, partial(self.report, "more"))
            self._cleanup.callback(self._input.close)
            system.close(write_end)
            yield read_end
            system.close(read_end)
            self.report("more")

    def _on_exit(self, processes: ranks.RankProcesses, rank: int, code: int) -> None:
        if processes is self._ranks:  # otherwise the rank of an earlier attempt was reaped late
            processes.drain(rank)
            self.report("exited", rank, code)


class LauncherConnection:
    """The connection of an agent to its launcher over the descriptors ``reading`` and ``writing``.

    ``silence`` is "". If no message has arrived for ``lost_after`` seconds, it becomes a text with
    the duration.
    """

    def __init__(self, loop: Loop, reading: int, writing: int, lost_after: float) -> None:
        self.has_ended, self.silence = False, ""
        self._loop, self._reading, self._writing = loop, reading, writing
        self._inbox: deque[tuple[str, list[Any]]] = deque()
        self._is_writing = False
        system.set_blocking(writing, False)
        loop.watch(reading, self._read)
        self._pulse = Pulse(loop, lost_after, self._beat, self._on_silence)
        self._reader = Reader(reading, self._pulse.on_data)
        self.report("here")

    def report(self, kind: str, *values: Any) -> None:
        """Send a message to the launcher; block until it is written or the launcher is lost."""
        if not (self.has_ended or self.silence):
            self._write(message(kind, *values))

    def end(self) -> None:
        """Make ``run`` return."""
        self.has_ended = True

    def run(self, agent: Agent) -> None:
        """Pass messages to ``agent`` until "leave" or the launcher's loss. Then end the ranks."""
        while not self.has_ended:
            self._loop.once()
            # Messages are not handled in the callback, because ``finish`` itself waits for events.
            while self._inbox and not self.has_ended:
                kind, values = self._inbox.popleft()
                if kind == "leave":
                    self.end()
                else:
                    getattr(agent, kind)(*values)
            if self._reader.has_ended:
                self.end()
        self._pulse.stop()
        self._loop.unwatch(self._reading)
        agent.leave()

    def _read(self) -> None:
        self._inbox += map(parsed, self._reader.lines())
        if self._reader.has_ended:
            self._loop.unwatch(self._reading)

    def _write(self, data: bytes) -> None:
        self._is_writing = True
        try:
            write_whole(self._writing, data, self._check_launcher)
        except OSError:  # the launcher has closed the connection
            self.end()
        self._is_writing = False

    def _check_launcher(self) -> None:
        """Raise BrokenPipeError if the launcher is silent while ``_write`` blocks."""
        self._inbox += map(parsed, self._reader.lines())
        self._pulse.count_silence()
        if self.silence:
            raise BrokenPipeError(self.silence)

    def _beat(self) -> None:
        if not self._is_writing and system.can_write(self._writing):
            self._write(message("pulse"))

    def _on_silence(self, since: str) -> None:
        self.silence = since
        self.end()


def main() -> int:
    return run_in_copy(_work, lambda: None)


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
        f"flrun: agent on {system.gethostname()}: received nothing from the launcher "
        f"{launcher.silence}; the agent ended its ranks"
    )
    print(line, file=sys.stderr)
    import syslog  # Windows lacks it

    # The connection may be cut, so the message also goes to the log of the system.
    syslog.syslog(syslog.LOG_ERR, line)
    return 1


if __name__ == "__main__":
    sys.exit(main())
