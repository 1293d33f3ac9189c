"""The hosts of a job. One agent per host, local or started over ssh, runs the ranks."""

import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from subprocess import PIPE
from typing import Any

from flashlight_py import system
from flashlight_py.launch.agent import Agent
from flashlight_py.launch.channel import Outgoing, Reader, message, parsed
from flashlight_py.launch.failures import describe_exit
from flashlight_py.launch.loop import LOST_SECONDS, Loop, Pulse

LEAVING_SECONDS = 10.0  # seconds for agents to end their ranks and exit


class StartError(Exception):
    """A command cannot be run. The message names the command and the reason."""


class SshAgent:
    """The connection to an agent that ``ssh`` starts with this Python, in this working folder.

    ``on_message`` is called with each message. ``on_lost`` is called with the reason when ssh has
    ended. ssh is killed if the agent, after its first message, is silent for ``lost_after``
    seconds.

    Raises:
        StartError: If the ``ssh`` command cannot be run.
    """

    def __init__(
        self, loop: Loop, name: str, ssh: Sequence[str], lost_after: float,
        on_message: Callable[[str, list[Any]], None], on_lost: Callable[[str], None],
    ) -> None:  # fmt: skip
        self._loop, self._name, self._silence, self._is_open = loop, name, "", True
        self._on_message, self._on_lost = on_message, on_lost
        folder, python = shlex.quote(os.getcwd()), shlex.quote(sys.executable)
        agent = f"exec {python} -m flashlight_py.launch.agent {lost_after:g}"
        command = [*ssh, name, f"cd {folder} && {agent}"]
        try:
            self._process = system.Popen(command, stdin=PIPE, stdout=PIPE, start_new_session=True)
        except OSError as error:
            raise StartError(f"{ssh[0]}: {error}") from error
        assert self._process.stdin
        assert self._process.stdout
        with self._process.stdin as stdin:
            self._outgoing = Outgoing(loop, stdin.fileno())
        self.put = self._outgoing.put
        self._output = self._process.stdout
        beat = partial(self._outgoing.put_if_idle, message("pulse"))
        self._pulse = Pulse(loop, lost_after, beat, self._on_silence, is_connected=False)
        self._reader = Reader(self._output.fileno(), self._pulse.on_data)
        loop.watch(self._output.fileno(), self._read)
        loop.watch_child(self._process, self._on_exit)

    def close(self) -> None:
        """Kill ssh and close the connection, which ends the agent. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._pulse.stop()
            self._outgoing.close()
            self._loop.unwatch(self._output.fileno())
            self._output.close()
            if self._process.returncode is None:
                self._process.kill()
                self._process.wait()

    def _read(self) -> None:
        for line in self._reader.lines():
            self._on_message(*parsed(line))
        if self._reader.has_ended:
            self._loop.unwatch(self._output.fileno())

    def _on_exit(self, code: int) -> None:
        if not self._is_open:
            return
        previous = -1
        while self._reader.received > previous:  # one read may not read all messages
            previous = self._reader.received
            self._read()
        self.close()
        self._on_lost(self._silence or f"ssh to {self._name} {describe_exit(code)}")

    def _on_silence(self, since: str) -> None:
        self._silence = f"received nothing from host {self._name} {since}"
        self._process.kill()


class Hosts:
    """The hosts of a job. ``names`` and ``slots`` (numbers of ranks) have one entry per host.

    If the job runs only on this host, ``local`` is its agent. Otherwise the command ``ssh`` starts
    an agent on each host. ``connected`` has the indices of hosts whose agents have reported.
    ``on_message(index, kind, values)`` is called for each message, and ``on_lost(index, reason)``
    for each lost host. ``environ`` is added to the environment of the ranks.
    """

    on_message: Callable[[int, str, list[Any]], None]
    on_lost: Callable[[int, str], None]

    def __init__(
        self, loop: Loop, hosts: Sequence[tuple[str, int]], local: Agent | None = None,
        ssh: Sequence[str] = (), lost_after: float = LOST_SECONDS,
        environ: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.names, self.slots = [name for name, _ in hosts], [slots for _, slots in hosts]
        self.connected, self.environ = {0} if local else set[int](), dict(environ or {})
        self._loop, self._local, self._ssh, self._lost_after = loop, local, ssh, lost_after
        self._agents: dict[int, SshAgent] = {}
        if local:
            local.report = lambda kind, *values: self.on_message(0, kind, list(values))

    def open(self, numbers: Iterable[int]) -> None:
        """Start an agent on each host in ``numbers`` that has no agent."""
        for number in numbers:
            if number not in self._agents:
                host = self._loop, self.names[number], self._ssh, self._lost_after
                calls = partial(self._on_report, number), partial(self._lose, number)
                self._agents[number] = SshAgent(*host, *calls)

    def send(self, number: int, kind: str, *values: Any) -> None:
        """Send a message to an agent. A local agent handles it before the call returns."""
        if number in self._agents:
            self._agents[number].put(message(kind, *values))
        elif self._local:
            getattr(self._local, kind)(*values)

    def send_all(self, kind: str, *values: Any) -> None:
        for number in [*self._agents] or [0]:
            self.send(number, kind, *values)

    def drop(self, numbers: Sequence[int], seconds: float) -> None:
        """Declare the hosts ``numbers`` lost, because they have not answered for ``seconds``."""
        for number in numbers:
            self._agents[number].close()
            self._lose(number, f"its agent has not answered for {seconds:.3g} s")

    def leave(self) -> None:
        """End all agents and their ranks; blocks for at most 10 s."""
        self.send_all("leave")
        ends = system.monotonic() + LEAVING_SECONDS
        while self._agents and system.monotonic() < ends:
            self._loop.once(ends)
        for agent in self._agents.values():
            agent.close()
        self._agents.clear()

    def _on_report(self, number: int, kind: str, values: list[Any]) -> None:
        if kind == "here":
            self.connected.add(number)
        self.on_message(number, kind, values)

    def _lose(self, number: int, reason: str) -> None:
        self.connected.discard(number)
        del self._agents[number]
        self.on_lost(number, f"is lost: {reason}")
