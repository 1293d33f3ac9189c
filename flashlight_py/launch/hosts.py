"""The hosts of a job. Each has an agent, here or connected to us, that runs its ranks."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from subprocess import PIPE
from typing import Any

from flashlight_py import system
from flashlight_py.launch.agent import Agent
from flashlight_py.launch.channel import Outgoing, Reader, message
from flashlight_py.launch.failures import describe_exit
from flashlight_py.launch.loop import Loop, Pulse
from flashlight_py.launch.options import Options


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
        super().__init__(loop, system.gethostname(), slots)
        self._agent = Agent(loop, lambda kind, *values: self.on_message(kind, list(values)), stdin)
        self._agent.reached = reached
        self.is_open = True

    def send(self, kind: str, *values: Any) -> None:
        # At once; blocks until it is done.
        if kind == "leave":
            self.close()
        else:
            getattr(self._agent, kind)(*values)

    def close(self) -> None:
        if self.is_open:
            self._agent.finish(self._agent.grace)
            self.is_open = False


class ConnectedHost(Host):
    """A host whose agent is at the other end of two descriptors.

    It is lost once nothing has come from there for ``lost_after`` seconds.
    """

    def __init__(self, loop: Loop, name: str, slots: int, lost_after: float) -> None:
        super().__init__(loop, name, slots)
        self._lost_after = lost_after

    def send(self, kind: str, *values: Any) -> None:
        if self.is_open:
            self._outgoing.put(message(kind, *values))

    def close(self) -> None:
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
        self._process: system.Popen[bytes] | None = None

    def open(self) -> None:
        if self.is_open:
            return
        folder, python = shlex.quote(os.getcwd()), shlex.quote(sys.executable)
        agent = f"exec {python} -m flashlight_py.launch.agent {self._lost_after:g}"
        command = [*self._ssh, self.name, f"cd {folder} && {agent}"]
        try:
            self._process = system.Popen(command, stdin=PIPE, stdout=PIPE, start_new_session=True)
        except OSError as error:
            raise StartError(f"{command[0]}: {error}") from error
        assert self._process.stdin
        assert self._process.stdout
        with self._process.stdin as stdin:
            self._connect(self._process.stdout.fileno(), stdin.fileno(), is_there=False)
        self._loop.child(self._process, self._on_exit)

    def close(self) -> None:
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
