"""The hosts of a job. Each has an agent, in this process or connected to it, that runs its ranks.

A team of them starts the ranks of an attempt, and passes on what the agents report.
"""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from flashlight_py.launch.agent import Agent
from flashlight_py.launch.attempt import Attempt
from flashlight_py.launch.channel import Outgoing, Reader, Supply, message
from flashlight_py.launch.failures import Failure, describe_exit
from flashlight_py.launch.loop import Loop
from flashlight_py.launch.options import Options
from flashlight_py.launch.output import Source
from flashlight_py.launch.pulse import Pulse
from flashlight_py.launch.ranks import ADDRESSES, SECRET, Place, places

# How much longer than the ranks' grace agents may take, in seconds, to end what is left there.
_FINISHING_SECONDS = 10.0


class StartError(Exception):
    """A command cannot be run; says which and why."""


class Host:
    """A host that takes ``slots`` ranks, and the way to its agent.

    ``on_message`` is called with what the agent reports, ``on_lost`` with what has become of it
    when it is gone. ``environ`` is added to what its ranks inherit there. ``is_launcher``: the
    agent has a user before it, to whom it shows what the ranks print, and who may send SIGUSR1; and
    it makes the ranks' secret itself, so that this need not be sent.
    """

    environ: Mapping[str, str] = {}
    is_launcher = False

    def __init__(self, loop: Loop, name: str, slots: int) -> None:
        self.name, self.slots, self.is_open = name, slots, False
        self.on_message: Callable[[str, list[Any]], None]
        self.on_lost: Callable[[str], None]
        self._loop = loop

    def open(self) -> None:
        """Connect to the agent, if that is not so already; may call ``on_lost``.

        Raises:
            StartError: the command that connects to it cannot be run.
        """

    def send(self, kind: str, *values: Any) -> None:
        """Send a message to the agent; does not block, nothing happens if it is gone."""

    def close(self) -> None:
        """Close the connection; whatever is still there ends by it."""


class LocalHost(Host):
    """This host: its agent is a part of this process. ``stdin`` is the input of rank 0, if any.

    ``reached`` are addresses at which the other hosts have reached this one.
    """

    def __init__(
        self, loop: Loop, slots: int, stdin: int | None, reached: Sequence[str] = ()
    ) -> None:
        super().__init__(loop, os.uname().nodename, slots)
        self._agent = Agent(loop, self._on_report, stdin)
        self._agent.reached = reached
        self.is_open = True

    def send(self, kind: str, *values: Any) -> None:
        """Have the agent do what the message says, at once; blocks until it is done."""
        if kind == "leave":
            self.close()
        else:
            getattr(self._agent, kind)(*values)

    def close(self) -> None:
        """End what is left of the ranks."""
        if self.is_open:
            self._agent.finish(self._agent.grace)
            self.is_open = False

    def _on_report(self, kind: str, *values: Any) -> None:
        self.on_message(kind, list(values))


class ConnectedHost(Host):
    """A host whose agent is at the other end of two descriptors.

    It is lost once nothing has come from there for ``lost_after`` seconds.
    """

    def __init__(self, loop: Loop, name: str, slots: int, lost_after: float) -> None:
        super().__init__(loop, name, slots)
        self._lost_after = lost_after

    def send(self, kind: str, *values: Any) -> None:
        """Send a message to the agent; does not block, nothing happens if it is gone."""
        if self.is_open:
            self._outgoing.put(message(kind, *values))

    def close(self) -> None:
        """Close the connection; whatever is still there ends by it."""
        if self.is_open:
            self.is_open = False
            self._pulse.stop()
            self._outgoing.close()
            self._loop.forget(self._reading)

    def _connect(self, reading: int, writing: int, is_there: bool) -> None:
        self.is_open = True
        self._reading, self._reader = reading, Reader(reading)
        self._outgoing = Outgoing(self._loop, writing)
        self._loop.watch(reading, self._read)
        send = partial(self._outgoing.put_if_idle, message("pulse"))
        self._pulse = Pulse(self._loop, self._lost_after, send, self._on_silence, is_there)

    def _read(self) -> None:
        self._pulse.heard()
        for kind, values in self._reader.read():
            self.on_message(kind, values)
        if self._reader.has_ended:
            self._loop.forget(self._reading)
            self._on_end()

    def _on_end(self) -> None:
        """Nothing more arrives from the agent."""

    def _on_silence(self, since: str) -> None:
        """Nothing has arrived for too long; give the host up."""
        raise NotImplementedError


class SshHost(ConnectedHost):
    """A host on which an agent is started by ``ssh``, a command that takes a host and a line.

    On each host the same folder and the same Python are used as here.
    """

    def __init__(
        self,
        loop: Loop,
        name: str,
        slots: int,
        options: Options,
        environ: Mapping[str, str],
    ) -> None:
        super().__init__(loop, name, slots, options.lost_after)
        self._ssh, self.environ = options.ssh, environ
        self._silence = ""
        self._process: subprocess.Popen[bytes] | None = None

    def open(self) -> None:
        """Start an agent, if none is there."""
        if self.is_open:
            return
        module = f"flashlight_py.launch.agent {self._lost_after:g}"
        agent = f"exec {shlex.quote(sys.executable)} -m {module}"
        command = [*self._ssh, self.name, f"cd {shlex.quote(os.getcwd())} && {agent}"]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
        except OSError as error:
            raise StartError(f"{command[0]}: {error}") from error
        assert self._process.stdin
        assert self._process.stdout
        with self._process.stdin as stdin:
            self._connect(self._process.stdout.fileno(), stdin.fileno(), is_there=False)
        self._loop.child(self._process, self._on_exit)

    def close(self) -> None:
        """Close the connection and end ssh."""
        super().close()
        if self._process is not None:
            assert self._process.stdout
            self._process.stdout.close()
            if self._process.returncode is None:
                self._process.kill()
                self._process.wait()
            self._process = None

    def _on_exit(self, code: int) -> None:
        while messages := self._reader.read():  # there may be more than one reading holds
            for kind, values in messages:
                self.on_message(kind, values)
        self.close()
        how, self._silence = self._silence or f"ssh to {self.name} {describe_exit(code)}", ""
        self.on_lost(f"is lost: {how}")

    def _on_silence(self, since: str) -> None:
        assert self._process
        self._silence = f"nothing has come from host {self.name} {since}"
        self._process.kill()


class Team:
    """All hosts of a job. Ranks start when every host that takes some has reported to be ready.

    They meet at paths that begin with ``file``; or, where that is empty, at a free port of the
    first host, which its agent opens, with the ``secret`` of that start. ``stdin`` is the input for
    rank 0 where its host is another one.
    """

    def __init__(
        self,
        loop: Loop,
        hosts: Sequence[Host],
        options: Options,
        stdin: int | None,
        file: str,
        secret: Callable[[int], str] = lambda restarts: secrets.token_hex(32),
    ) -> None:
        self.hosts = hosts
        self._loop, self._options, self._stdin, self._file = loop, options, stdin, file
        self._secret_of = secret
        self._attempt: Attempt | None = None
        self._places: list[Place] = []
        self._working: set[int] = set()  # hosts that take ranks of this attempt
        self._awaited: set[int] = set()  # those that have not finished
        self._supply: Supply | None = None
        self.records: dict[int, tuple[str, bytes]] = {}
        self.left_out: list[str] = []
        self._is_started = False
        for index, host in enumerate(hosts):
            host.on_message = partial(self._on_message, index)
            host.on_lost = partial(self._on_lost, index)

    def start(self, attempt: Attempt, counts: Sequence[int], restarts: int) -> None:
        """Start the ranks of an attempt; ``attempt`` is called with their output and ends.

        Raises:
            StartError: a program cannot be run.
        """
        self._attempt, self._places, self._restarts = attempt, places(counts), restarts
        self._first = self._places[0].host
        self._working = {place.host for place in self._places}
        self._addresses: dict[int, tuple[list[str], int]] = {}  # of the hosts that are ready
        self._secret = self._secret_of(restarts)
        self._is_started = False
        self._stuck: list[int] = []
        self.records, self.left_out = {}, []
        self._supply = None
        if self._stdin is not None:
            self._supply = Supply(self._loop, self._stdin, self._send_input)
        for index in sorted(self._working):
            if not attempt.is_ending:
                self.hosts[index].open()
                self.hosts[index].send("prepare", index == self._first and not self._file)

    def signal(self, number: int) -> None:
        """Send ``number`` to every rank, and to what it has started; SIGUSR1 where it was sent."""
        assert self._attempt
        for host in self.hosts:
            if not (host.is_launcher and number in (signal.SIGUSR1, signal.SIGUSR2)):
                host.send("signal", number)
        if self._attempt.is_ending and not self._is_started:
            self._attempt.on_end(place.rank for place in self._places)

    def finish(self) -> list[int]:
        """Once all ranks have ended, have the agents end what they have left, and wait for that.

        Returns the processes that a kernel does not let go of. After a failure, ``records`` are the
        flight records of ranks, with the folders they come from, ``left_out`` says which are not.
        """
        grace = self._options.grace
        if self._supply is not None:
            self._supply.stop()
        self._awaited = {index for index in self._working if self.hosts[index].is_open}
        for index in sorted(self._awaited, reverse=True):  # one in this process blocks: the last
            if self._attempt is not None and self._attempt.cause:
                self.hosts[index].send("collect")
            self.hosts[index].send("finish", grace)
        self._wait(lambda: bool(self._awaited), grace + _FINISHING_SECONDS)
        for index in self._awaited:
            self.hosts[index].close()
        return self._stuck

    def say(self, text: str) -> None:
        """Have a line of the launcher's own written where ranks' output is shown elsewhere."""
        for host in self.hosts:
            if host.is_launcher:
                host.send("say", text)

    def close(self, code: int) -> None:
        """Let the agents go; those that are launchers exit with ``code``."""
        for host in self.hosts:
            host.send("leave", code)
        self._wait(lambda: any(host.is_open for host in self.hosts), _FINISHING_SECONDS)
        for host in self.hosts:
            host.close()

    def _wait(self, is_needed: Callable[[], bool], seconds: float) -> None:
        ends = time.monotonic() + seconds
        while is_needed() and time.monotonic() < ends:
            self._loop.once(ends)

    def _on_message(self, host: int, kind: str, values: list[Any]) -> None:
        getattr(self, f"_on_{kind}")(host, *values)

    def _on_ready(self, host: int, addresses: list[str], port: int) -> None:
        assert self._attempt
        self._addresses[host] = addresses or [self.hosts[host].name], port
        if self._working <= self._addresses.keys() and not self._attempt.is_ending:
            self._is_started = True
            for index in sorted(self._working):
                self.hosts[index].send("start", self._task(index))

    def _task(self, index: int) -> dict[str, Any]:
        host = self.hosts[index]
        return {
            "places": [place for place in self._places if place.host == index],
            "size": len(self._places),
            "program": self._options.program,
            "environ": host.environ,
            "restarts": self._restarts,
            "meeting": self._meeting(host.is_launcher),
            "grace": self._options.grace,
            "has_input": self._supply is not None,
            "wants_records": len(self.hosts) > 1,
        }

    def _meeting(self, is_launcher: bool) -> dict[str, str]:
        """Return the variables that say where the ranks meet, less a secret that is known there."""
        if self._file:
            return {"FLASHLIGHT_FILE": f"{self._file}-{self._restarts}"}
        addresses, port = self._addresses[self._first]
        # It travels inside ssh, and never in a command line, which every user can read.
        secret = {} if is_launcher else {SECRET: self._secret}
        # Ranks try them all: which of them a host can reach, only that host knows.
        where = {"MASTER_ADDR": addresses[0], ADDRESSES: ",".join(addresses)}
        return {**where, "MASTER_PORT": str(port), **secret}

    def _on_cannot_run(self, host: int, reason: str) -> None:
        raise StartError(reason)

    def _on_output(self, host: int, rank: int, stream: str, data: bytes) -> None:
        assert self._attempt
        self._attempt.on_output(Source(rank, stream), data)

    def _on_exited(self, host: int, rank: int, code: int, errors: list[str]) -> None:
        assert self._attempt
        self._attempt.on_exit(rank, code, errors)

    def _on_more(self, host: int) -> None:
        if self._supply is not None:
            self._supply.ask()

    def _on_lost_output(self, host: int) -> None:
        assert self._attempt
        self._attempt.on_lost_output()

    def _on_interrupt(self, host: int, number: int) -> None:
        self._loop.on_signal(signal.Signals(number))

    def _on_pulse(self, host: int) -> None:
        """Do nothing: that something has come from the host is noted already."""

    def _on_record(self, host: int, rank: int, folder: str, data: bytes) -> None:
        self.records[rank] = folder, data

    def _on_left_out(self, host: int, rank: int, path: str, why: str) -> None:
        where = f"on host {self.hosts[host].name}, at {path}"
        self.left_out.append(f"the flight record of rank {rank} stays {where}: {why}")

    def _on_finished(self, host: int, stuck: list[int]) -> None:
        self._awaited.discard(host)
        self._stuck += stuck

    def _on_lost(self, host: int, how: str) -> None:
        """Nothing will be reported of the ranks of ``host`` any more."""
        self._awaited.discard(host)
        if self._attempt is not None:
            ranks = [place.rank for place in self._places if place.host == host]
            self._attempt.on_lost(ranks, Failure(how, time.monotonic()))

    def _send_input(self, data: bytes) -> None:
        self.hosts[self._first].send("input", data)
