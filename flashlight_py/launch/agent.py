"""What runs the ranks of one host for a job's launcher: in it, at the end of a pipe or of a socket.

``python -m flashlight_py.launch.agent`` is the one that a launcher elsewhere starts over ssh; its
standard input and output are the connection. See ``channel`` for the messages.
"""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

from flashlight_py.interfaces import listen_everywhere, own_addresses
from flashlight_py.launch.channel import Outgoing, Reader, message, write_whole
from flashlight_py.launch.front import die_with_parent, run_behind
from flashlight_py.launch.loop import Loop
from flashlight_py.launch.output import Output, Source
from flashlight_py.launch.ranks import LISTENER, Place, Ranks, end_leftovers, environ_of

_IN, _OUT = 0, 1
# How many ranks may wait to connect before rank 0 answers; others are let in later.
_BACKLOG = 1024


class Agent:
    """Runs ranks in attempts, one after the other; ``report`` is called with what happens.

    Its public methods are the messages of the launcher. ``stdin`` is the input of rank 0, if any;
    ``output``, if any, shows what the ranks print, which is reported otherwise. ``reached`` are
    addresses at which other hosts of the job have reached this one.
    """

    output: Output | None = None
    reached: Sequence[str] = ()

    def __init__(self, loop: Loop, report: Callable[..., None], stdin: int | None = None) -> None:
        self._loop, self._report, self._stdin = loop, report, stdin
        self._ranks: Ranks | None = None
        self._listener: socket.socket | None = None
        self._input: Outgoing | None = None
        self.grace, self._has_lost_output = 0.0, False

    def prepare(self, needs_port: bool) -> None:
        """Report where ranks could meet on this host: its addresses, the best first, and a port."""
        addresses: list[str] = []
        port = 0
        if needs_port:
            addresses = addresses_of_host(self.reached)
            # Rank 0 inherits it: a port that is merely reserved could be taken by somebody else.
            self._listener = listen_everywhere(0, _BACKLOG)
            port = self._listener.getsockname()[1]
        self._report("ready", addresses, port)

    def start(self, task: Mapping[str, Any]) -> None:
        """Start ranks: ``places`` of ``size``, where ``meeting`` says; see ``Team``."""
        self._ranks, self.grace = Ranks(self._loop, self._on_output), task["grace"]
        try:
            for place in map(Place._make, task["places"]):
                self._start(place, task)
        except OSError as error:
            self._report("cannot_run", f"{task['program'][0]}: {error}")
        self._close_listener()  # it is rank 0's alone, and ends with it

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

    def finish(self, grace: float) -> None:
        """End what the ranks have left, by SIGKILL after ``grace`` seconds; blocks until then."""
        stuck = end_leftovers(self._loop, grace)
        self._close_listener()
        if self._input is not None:
            self._input.close()
        if self._ranks is not None:
            self._ranks.close()
        self._ranks = self._input = None
        if self.output is not None:
            self.output.end()
        self.flush()
        self._report("finished", stuck)

    def say(self, text: str) -> None:
        """Write a line of the launcher's."""
        assert self.output
        self.output.say(text)

    def flush(self) -> float:
        """Show lines without an end that are due; returns when the next ones are."""
        if self.output is None:
            return math.inf
        if time.monotonic() >= self.output.flush_at():
            self.output.flush(time.monotonic())
        if self.output.error and not self._has_lost_output:
            self._has_lost_output = True
            self._report("lost_output")
            self.output.say(self.output.error)
        return self.output.flush_at()

    def _start(self, place: Place, task: Mapping[str, Any]) -> None:
        assert self._ranks is not None
        meeting, listener = task["meeting"], []
        if self._listener is not None and place.rank == 0:
            listener = [self._listener.fileno()]
            meeting = {**meeting, LISTENER: str(listener[0])}
        environ = {**os.environ, **task["environ"]}
        with self._input_of(place, task["has_input"]) as stdin:
            process = self._ranks.start(
                place.rank,
                task["program"],
                environ_of(environ, place, task["size"], task["restarts"], meeting),
                stdin,
                listener,
                partial(die_with_parent, os.getpid()),
            )
        self._loop.child(process, partial(self._on_exit, self._ranks, place.rank))

    @contextmanager
    def _input_of(self, place: Place, is_sent: bool) -> Iterator[int]:
        """Yield what a rank reads: our own input, what the launcher sends, or nothing."""
        if place.rank != 0 or not (is_sent or self._stdin is not None):
            yield subprocess.DEVNULL
        elif self._stdin is not None:
            yield self._stdin
        else:
            theirs, ours = os.pipe()
            self._input = Outgoing(self._loop, ours, partial(self._report, "more"))
            os.close(ours)
            yield theirs
            os.close(theirs)
            self._report("more")

    def _on_output(self, source: Source, data: bytes) -> None:
        if self.output is None:
            self._report("output", *source, data)
        else:
            self.output.take(source, data)

    def _on_exit(self, ranks: Ranks, rank: int, code: int) -> None:
        if ranks is not self._ranks:
            return  # one of an earlier attempt, which the kernel has let go of at last
        ranks.drain(rank)
        errors = [] if self.output is None else self.output.last_errors(rank)
        self._report("exited", rank, code, errors)

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None


class Server:
    """Our end of the connection of an agent to its launcher, two descriptors."""

    def __init__(self, loop: Loop, reading: int, writing: int) -> None:
        self.has_ended = False
        self._loop, self._reading, self._writing = loop, reading, writing
        self._reader = Reader(reading)
        self._inbox: deque[tuple[str, list[Any]]] = deque()
        loop.watch(reading, self._read)

    def report(self, kind: str, *values: Any) -> None:
        """Send a message to the launcher; blocks until it is written."""
        try:
            write_whole(self._writing, message(kind, *values))
        except OSError:  # it is gone
            self.end()

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
        return code

    def _read(self) -> None:
        self._inbox.extend(self._reader.read())
        if self._reader.has_ended:
            self._loop.forget(self._reading)


def addresses_of_host(reached: Sequence[str]) -> list[str]:
    """Return the addresses that others may reach this host at, those first where they have.

    Beside those of ``reached``, that is the one at which ssh came, as sshd says (ssh(1)).
    """
    by_ssh = os.environ.get("SSH_CONNECTION", "").split()[2:3]
    own = own_addresses()
    return list(dict.fromkeys([*(each for each in (*reached, *by_ssh) if each in own), *own]))


def main() -> int:
    """Run the agent of a launcher at the other end of ssh; returns its exit code."""
    return run_behind(_work, lambda: None)


def _work() -> int:
    with closing(Loop()) as loop:
        server = Server(loop, _IN, _OUT)
        loop.on_signal = lambda number: server.end()
        server.run(Agent(loop, server.report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
