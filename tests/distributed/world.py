"""The processes of the harness: start them, receive their answers, end them."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.distributed import fork_server, processes

if TYPE_CHECKING:
    from tests.cluster.hosts import Host

RANK_MAIN = Path(__file__).with_name("rank_main.py")
STDERR_LINES = 60
# Seconds from the end of a rank's socket, or from SIGABRT, to the end of its process.
DYING_SECONDS = 5.0

# A rank, or the mpirun of all ranks.
Starter = subprocess.Popen[bytes] | fork_server.Forked
Environment = Mapping[str, str] | Callable[[int], Mapping[str, str]]


@dataclass(frozen=True)
class Outcome:
    """The outcome of one rank: ``kind`` is returned, raised, exited or stuck."""

    rank: int
    kind: str
    value: Any = None
    error_classes: tuple[str, ...] = ()
    message: str = ""
    traceback: str = ""
    exit_code: int | None = None
    stderr: str = ""

    @property
    def ok(self) -> bool:
        return self.kind == "returned"

    @property
    def error_type(self) -> str:
        """The class of the exception; ``error_classes`` includes its bases."""
        return self.error_classes[0] if self.error_classes else ""

    @property
    def signal(self) -> signal.Signals | None:
        died_by_signal = self.exit_code is not None and self.exit_code < 0
        return signal.Signals(-self.exit_code) if died_by_signal else None  # type: ignore[operator]

    def describe(self) -> str:
        if self.kind == "raised":
            return f"raised {self.error_type}: {self.message}"
        if self.kind == "exited":
            manner = self.signal.name if self.signal else f"exit code {self.exit_code}"
            return f"its process ended ({manner})"
        if self.ok:
            return "returned"
        return " ".join(["did not answer before the deadline and was killed", self.message])

    def report(self) -> str:
        parts = [f"--- rank {self.rank}: {self.describe()}", self.traceback.rstrip()]
        if self.stderr.strip():
            parts.append(f"[rank {self.rank}, end of its output]\n{self.stderr.rstrip()}")
        return "\n".join(part for part in parts if part)


def mpirun_command(size: int) -> list[str]:
    """Return the command that starts ``size`` ranks, for the installed MPI."""
    beside = Path(sys.executable).with_name("mpirun")
    program = str(beside) if beside.exists() else shutil.which("mpirun")
    if program is None:
        raise FileNotFoundError("mpirun is not installed; pip install 'flashlight-py[mpi]'")
    version_output = subprocess.run(
        [program, "--version"], capture_output=True, text=True, check=True
    )
    if "Open MPI" in version_output.stdout:
        return [program, "--allow-run-as-root", "--oversubscribe", "-n", str(size)]
    return [program, "-n", str(size)]


class World:
    """The processes of one start, their sockets and their output."""

    def __init__(
        self,
        size: int,
        init: str | None,
        params: dict[str, Any],
        env: Environment | None,
        hosts: Sequence[Host] | None,
    ) -> None:
        self._size, self._init, self._params = size, init, params
        self._env, self._hosts = env, hosts
        seen_by_all = hosts[0].shared if hosts else None
        self._folder = Path(tempfile.mkdtemp(prefix="ranks-", dir=seen_by_all))
        self._starters: list[Starter] = []
        self._links: dict[int, Connection] = {}
        self._rank_pids: dict[int, int] = {}
        self._groups: set[int] = set()
        self._seen = [0] * size

    def started(self) -> set[int]:
        """The processes of this world that have not ended."""
        return {starter.pid for starter in self._starters if starter.poll() is None}

    def groups(self) -> set[int]:
        """The process groups of this world."""
        return self._groups | {starter.pid for starter in self._starters}

    def pids(self) -> set[int]:
        return self.started() | processes.members(self.groups())

    def start(self, deadline: float) -> list[Outcome]:
        ends = time.monotonic() + deadline
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
            door.bind(str(self._folder / "door"))
            door.listen(self._size)
            self._launch()
            while len(self._links) < self._size:
                if not self._admit(door, ends):
                    return self._give_up(set(range(self._size)), {})
        for rank, link in self._links.items():
            link.send(self._setup(rank))
        return self._collect(deadline, deadline)

    def execute(self, task: bytes, deadline: float, grace: float) -> list[Outcome]:
        self._seen = [self._log(rank).stat().st_size for rank in range(self._size)]
        for link in self._links.values():
            with contextlib.suppress(BrokenPipeError):  # collecting answers detects dead ranks
                link.send_bytes(task)
        outcomes = self._collect(deadline, grace)
        return [
            Outcome(o.rank, o.kind, pickle.loads(o.value), stderr=o.stderr) if o.ok else o
            for o in outcomes
        ]

    def end(self, deadline: float) -> list[Outcome]:
        """Ask every rank to shut down; return the exit status of each."""
        ends = time.monotonic() + deadline
        for link in self._links.values():
            with contextlib.suppress(BrokenPipeError):
                link.send_bytes(b"")
        for starter in self._starters:
            _wait_for_end(starter, ends - time.monotonic())
        outcomes = [
            self._exited(rank) if self._starter(rank).poll() is not None else self._stuck(rank)
            for rank in range(self._size)
        ]
        self.destroy()
        return outcomes

    def destroy(self) -> None:
        """Kill the process groups of all ranks and remove their files."""
        processes.kill(self.pids(), DYING_SECONDS)
        for starter in self._starters:
            starter.wait()
        for link in self._links.values():
            link.close()
        shutil.rmtree(self._folder)

    def _launch(self) -> None:
        door = str(self._folder / "door")
        warnings = os.environ.get("FLASHLIGHT_TEST_WARNINGS", "error")
        program = [sys.executable, "-W", warnings, str(RANK_MAIN), door]
        for rank in range(1 if self._init == "mpi" else self._size):
            env = self._environment(rank)
            with self._log(rank).open("wb") as log:
                options: dict[str, Any] = {
                    "stdin": subprocess.DEVNULL,
                    "stdout": log,
                    "stderr": subprocess.STDOUT,
                    "env": env,
                    "start_new_session": True,
                }
                if self._init == "mpi":
                    command = [*mpirun_command(self._size), *program, "-1"]
                    starter: Starter = subprocess.Popen(command, **options)
                elif self._hosts:
                    starter = self._hosts[rank].popen([*program, rank], **options)
                else:
                    starter = fork_server.start(door, rank, env, log)
            self._starters.append(starter)

    def _environment(self, rank: int) -> dict[str, str]:
        return {**os.environ, **fork_server.ONE_THREAD, **self._own_environment(rank)}

    def _own_environment(self, rank: int) -> dict[str, str]:
        variables = (self._env(rank) if callable(self._env) else self._env) or {}
        if self._init != "env":
            return dict(variables)
        assert self._hosts
        beside = [other for other, host in enumerate(self._hosts) if host is self._hosts[rank]]
        started = {
            "RANK": rank,
            "WORLD_SIZE": self._size,
            "LOCAL_RANK": beside.index(rank),
            "LOCAL_WORLD_SIZE": len(beside),
            "MASTER_ADDR": self._hosts[0].name,
            "MASTER_PORT": 29500,  # each host has all ports
            "MASTER_SECRET": self._folder.name,
        }
        return {**{name: str(value) for name, value in started.items()}, **variables}

    def _admit(self, door: socket.socket, ends: float) -> bool:
        """Accept one rank; return False if a process ended first, or at the deadline."""
        with contextlib.ExitStack() as stack:
            ready = wait(
                [door, *(_end_of(starter, stack) for starter in self._starters)],
                max(0.0, ends - time.monotonic()),
            )
        if door not in ready:
            return False
        channel, _ = door.accept()
        # The pid outside the namespace: the process sees another pid.
        pid, _, _ = struct.unpack(
            "3i", channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        )
        link = Connection(channel.detach())
        rank, launchers = link.recv()
        if rank in self._links:
            reference = self._rank_pids[rank]
            raise RuntimeError(
                f"processes {reference} and {pid} both say that they are rank {rank}"
            )
        self._links[rank], self._rank_pids[rank] = link, pid
        self._groups |= launchers
        with contextlib.suppress(ProcessLookupError):  # the rank has ended since
            self._groups.add(os.getpgid(pid))
        return True

    def _setup(self, rank: int) -> dict[str, Any]:
        params = dict(self._params)
        if self._init == "file":
            params.setdefault("FILE_PATH", str(self._folder / "rendezvous"))
        return {
            "rank": rank,
            "size": self._size,
            "init": self._init,
            "environ": self._own_environment(rank),  # one mpirun: equal on all ranks
            "params": params,
            "path": list(sys.path),
        }

    def _collect(self, deadline: float, grace: float) -> list[Outcome]:
        ends = time.monotonic() + deadline
        pending, result = set(range(self._size)), dict[int, Outcome]()
        while pending:
            answered = self._answers(pending, ends)
            if not answered:
                return self._give_up(pending, result)
            result |= answered
            pending -= set(answered)
            if not all(outcome.ok for outcome in answered.values()):
                ends = min(ends, time.monotonic() + grace)
        return [result[rank] for rank in range(self._size)]

    def _answers(self, pending: set[int], ends: float) -> dict[int, Outcome]:
        by_link = {self._links[rank]: rank for rank in pending}
        ready = wait(list(by_link), max(0.0, ends - time.monotonic()))
        return {by_link[link]: self._answer(by_link[link]) for link in ready}  # type: ignore[index]

    def _answer(self, rank: int) -> Outcome:
        try:
            kind, *content = self._links[rank].recv()
        except (EOFError, ConnectionResetError):
            _wait_for_end(self._starter(rank), DYING_SECONDS)
            return self._exited(rank)
        if kind == "returned":
            return Outcome(rank, kind, content[0], stderr=self._tail(rank))
        names, message, trace = content
        return Outcome(rank, kind, None, tuple(names), message, trace, stderr=self._tail(rank))

    def _give_up(self, pending: set[int], result: dict[int, Outcome]) -> list[Outcome]:
        """Make the ranks that did not answer print their stacks, then end them."""
        alive = {rank for rank in pending if self._starter(rank).poll() is None}
        for rank in alive & set(self._rank_pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._rank_pids[rank], signal.SIGABRT)
        for rank in alive & set(self._rank_pids):
            _wait_for_end(self._starter(rank), DYING_SECONDS)
        for rank in pending:
            result[rank] = self._stuck(rank) if rank in alive else self._exited(rank)
        return [result[rank] for rank in range(self._size)]

    def _exited(self, rank: int) -> Outcome:
        code = self._starter(rank).poll()
        return Outcome(rank, "exited", exit_code=code, stderr=self._tail(rank))

    def _stuck(self, rank: int) -> Outcome:
        connected = "" if rank in self._links else "it never connected to the harness"
        return Outcome(rank, "stuck", message=connected, stderr=self._tail(rank))

    def _starter(self, rank: int) -> Starter:
        return self._starters[0 if self._init == "mpi" else rank]

    def _log(self, rank: int) -> Path:
        return self._folder / f"output-{0 if self._init == 'mpi' else rank}"

    def _tail(self, rank: int) -> str:
        output = self._log(rank).read_bytes()[self._seen[rank] :]
        return "\n".join(output.decode(errors="replace").splitlines()[-STDERR_LINES:])


def _end_of(starter: Starter, stack: contextlib.ExitStack) -> Any:
    """Return the result of ``wait`` once ``starter`` has ended."""
    if isinstance(starter, fork_server.Forked):
        return starter
    descriptor = os.pidfd_open(starter.pid)
    stack.callback(os.close, descriptor)
    return descriptor


def _wait_for_end(process: Starter, seconds: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, seconds))
