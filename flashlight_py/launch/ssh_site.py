"""Ranks on several hosts, which one launcher starts over ssh."""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from flashlight_py.launch.attempt import Attempt
from flashlight_py.launch.environs import SECRET
from flashlight_py.launch.failures import Failure
from flashlight_py.launch.feeds import Supply
from flashlight_py.launch.loop import Loop
from flashlight_py.launch.options import Options
from flashlight_py.launch.output import Source
from flashlight_py.launch.plan import Place, places
from flashlight_py.launch.processes import describe_exit
from flashlight_py.launch.wire import Reader, message
from flashlight_py.launch.writing import Outgoing

__all__ = ["SshSite"]

# What ranks elsewhere inherit from here; ssh itself hands on nothing.
_INHERITED = ("FLASHLIGHT_", "PYTHON", "OMP_", "OPENBLAS_", "MKL_", "NCCL_", "GLOO_", "CUDA_")


class SshSite:
    """The ranks of ``options.hosts``. They meet at a port of the first host, or at ``rdzv``.

    On each host the same folder and the same Python are used as here.
    """

    def __init__(self, options: Options, stdin: int | None) -> None:
        self.hosts = [host.name for host in options.hosts]
        self.counts = [host.slots for host in options.hosts]
        self._options, self._stdin = options, stdin

    def heard(self, counts: Sequence[int]) -> range:
        """Return the ranks whose ends are heard here: all."""
        return range(sum(counts))

    def start(self, loop: Loop, attempt: Attempt, counts: Sequence[int], restarts: int) -> SshTeam:
        """Start an agent on every host that has ranks; they start the ranks."""
        return SshTeam(loop, attempt, self._options, counts, restarts, self._stdin)

    def conclude(self, loop: Loop, attempt: Attempt) -> None:
        """The agents have told all."""

    def close(self) -> None:
        """There is nothing to let go of."""


class SshTeam:
    """The agents of one attempt. The ranks start when all agents have said hello."""

    def __init__(
        self,
        loop: Loop,
        attempt: Attempt,
        options: Options,
        counts: Sequence[int],
        restarts: int,
        stdin: int | None,
    ) -> None:
        self._loop, self._attempt, self._options = loop, attempt, options
        self._places, self._restarts = places(counts), restarts
        self._is_ending = False
        self._stuck: list[int] = []
        first = self._places[0].host
        self._supply = None if stdin is None else Supply(loop, stdin, self._send_input)
        self._agents = {
            host: _Agent(self, loop, options, host)
            for host in sorted({place.host for place in self._places})
        }
        self._first = self._agents[first]

    def signal(self, number: int) -> None:
        """Send ``number`` to every rank."""
        if number not in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT):
            self._is_ending = True
        for host, agent in self._agents.items():
            agent.send("signal", number)
            if self._is_ending and not agent.is_started:
                self.hear_lost(host, "was not started")

    def finish(self, grace: float) -> list[int]:
        """Let the agents end what the ranks have left, and wait for them."""
        if self._supply is not None:
            self._supply.stop()
        for agent in self._agents.values():
            agent.send("leave")
        ends = time.monotonic() + grace + 10
        while any(not agent.has_ended for agent in self._agents.values()):
            if time.monotonic() >= ends:
                break
            self._loop.once(ends)
        for agent in self._agents.values():
            agent.close()
        return self._stuck

    def hear(self, host: int, kind: str, values: list[Any]) -> None:
        """Do what a message of the agent on ``host`` says."""
        if kind == "hello":
            self._start_if_complete()
        elif kind == "output":
            self._attempt.hear_output(Source(values[0], values[1]), values[2].encode("latin-1"))
        elif kind == "end":
            self._attempt.hear_end(values[0], values[1])
        elif kind == "more" and self._supply is not None:
            self._supply.ask()
        elif kind == "stuck":
            self._stuck += values[0]

    def hear_lost(self, host: int, how: str) -> None:
        """Hear that nothing will be heard from the ranks of ``host`` any more."""
        for place in self._places:
            if place.host == host:
                self._attempt.hear_failure(place.rank, Failure(how, time.time()))

    def _start_if_complete(self) -> None:
        if self._is_ending or any(agent.hello is None for agent in self._agents.values()):
            return
        meeting = self._meeting()
        for host, agent in self._agents.items():
            here = [place for place in self._places if place.host == host]
            agent.start(self._task(here, meeting))

    def _meeting(self) -> dict[str, str]:
        if self._options.rdzv:
            return {"FLASHLIGHT_FILE": f"{self._options.rdzv}.{secrets.token_hex(8)}"}
        assert self._first.hello is not None
        _, address, port = self._first.hello
        return {
            "MASTER_ADDR": address or self._first.name,
            "MASTER_PORT": str(port),
            # It travels inside ssh, and never in a command line, which every user can read.
            SECRET: secrets.token_hex(32),
        }

    def _task(self, here: Sequence[Place], meeting: Mapping[str, str]) -> dict[str, Any]:
        chosen = {
            name: value
            for name, value in os.environ.items()
            if name.startswith(_INHERITED) or name in self._options.env
        }
        return {
            "places": here,
            "size": len(self._places),
            "program": self._options.program,
            "environ": chosen,
            "restarts": self._restarts,
            "meeting": meeting,
            "grace": self._options.grace,
            "has_input": self._supply is not None,
        }

    def _send_input(self, data: bytes) -> None:
        self._first.send("input", data.decode("latin-1"))


class _Agent:
    """Our end of the connection to the agent on one host."""

    def __init__(self, team: SshTeam, loop: Loop, options: Options, host: int) -> None:
        self.name = options.hosts[host].name
        self.hello: list[Any] | None = None
        self.is_started = self.has_ended = False
        self._team, self._loop, self._host = team, loop, host
        place = shlex.quote(os.getcwd())
        agent = f"exec {shlex.quote(sys.executable)} -m flashlight_py.launch.agent"
        self._process = subprocess.Popen(
            [*options.ssh, self.name, f"cd {place} && {agent}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdin
        assert self._process.stdout
        self._to = Outgoing(loop, self._process.stdin.fileno())
        self._out = self._process.stdout.fileno()
        self._reader = Reader(self._out)
        loop.watch(self._out, self._read)
        loop.child(self._process.pid, self._on_end)

    def start(self, task: dict[str, Any]) -> None:
        self.is_started = True
        self.send("start", task)

    def send(self, kind: str, *values: Any) -> None:
        """Send a message as the agent reads; does not block, nothing happens if it is gone."""
        self._to.put(message(kind, *values))

    def close(self) -> None:
        """Close the connection; whatever is still there ends by it."""
        self._to.close()
        self._loop.forget(self._out)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe
            pipe.close()
        if not self.has_ended:
            self._process.kill()
            self._process.wait()

    def _read(self) -> None:
        self._hear(self._reader.read())
        if self._reader.has_ended:
            self._loop.forget(self._out)

    def _hear(self, messages: list[tuple[str, list[Any]]]) -> None:
        for kind, values in messages:
            if kind == "hello":
                self.hello = values
            self._team.hear(self._host, kind, values)

    def _on_end(self, code: int) -> None:
        self._process.returncode = code
        self.has_ended = True
        self._loop.forget(self._out)
        while messages := self._reader.read():  # it may have said more than one reading holds
            self._hear(messages)
        self._team.hear_lost(self._host, f"is lost: ssh to {self.name} {describe_exit(code)}")
