"""Ranks are forked from a process that has imported their modules, so a start takes milliseconds.

``start(door, rank, env, log)`` runs ``rank_main.py`` in a new session and returns a ``Forked``,
which is used like a ``subprocess.Popen``. A rank has its own environment, output and exit handlers,
but starts no interpreter and imports nothing. The server ends with the process that started it, and
its ranks end with the server.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import importlib.util
import os
import pickle
import select
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import BinaryIO

__all__ = ["ONE_THREAD", "Forked", "server_pids", "start"]

# Modules that most ranks use. CUDA and MPI are excluded, because a process that has initialised
# them must not be forked.
PRELOADED = (
    *("numpy", "numpy.testing", "ml_dtypes", "pytest", "hypothesis.strategies"),
    *("concurrent.futures.thread", "flashlight_py.distributed.start.initialize"),
    *("flashlight_py.nn", "flashlight_py.optim", "flashlight_py.parallel"),
    "flashlight_py.parallel.functional",
)
# BLAS threads would only add noise with four ranks on two cores, and a process with threads must
# not be forked.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
LONGEST_PLAN = 1 << 17  # bytes, mostly of an environment

_clients: list[_Client] = []


def start(door: str, rank: int, env: Mapping[str, str], log: BinaryIO) -> Forked:
    if not _clients:
        _clients.append(_Client())
        atexit.register(_clients[0].close)
    return _clients[0].start(pickle.dumps((door, rank, dict(env))), log)


def server_pids() -> set[int]:
    """Return the process id of the fork server, if it runs. It stays between tests."""
    return {client.pid for client in _clients}


class Forked:
    """A rank whose parent is the server. Its exit status arrives on a connection."""

    def __init__(self, link: Connection) -> None:
        self._link = link
        self._poller = select.poll()
        self._poller.register(link, select.POLLIN)
        self.pid: int = link.recv()
        self.returncode: int | None = None

    def fileno(self) -> int:
        """Return a descriptor that is readable once the process has ended."""
        return self._link.fileno()

    def poll(self) -> int | None:
        """Return the exit code (minus the signal), or None while the process runs."""
        if self.returncode is None and self._poller.poll(0):  # independent of a test's clock
            self.returncode = self._link.recv()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raises ``subprocess.TimeoutExpired`` after ``timeout`` seconds."""
        if self.returncode is None:
            if not self._link.poll(timeout):
                raise subprocess.TimeoutExpired("a forked rank", timeout or 0.0)
            self.returncode = self._link.recv()
        return self.returncode  # type: ignore[return-value]


class _Client:
    """Starts the server and requests ranks from it."""

    def __init__(self) -> None:
        self._channel, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        warnings = os.environ.get("FLASHLIGHT_TEST_WARNINGS", "error")
        program = [sys.executable, "-W", warnings, __file__, str(other_end.fileno()), *sys.path]
        with other_end:
            self._process = subprocess.Popen(
                program,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[other_end.fileno()],
                env={**os.environ, **ONE_THREAD},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self, plan: bytes, log: BinaryIO) -> Forked:
        own_end, other_end = socket.socketpair()
        with other_end:
            socket.send_fds(self._channel, [plan], [other_end.fileno(), log.fileno()])
        return Forked(Connection(own_end.detach()))

    def close(self) -> None:
        self._channel.close()
        self._process.wait()


class _Server:
    """Forks a rank for each plan that arrives, and reports its exit status."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._links: dict[int, Connection] = {}
        self._awakened, self._awakener = socket.socketpair()
        self._awakener.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._awakener.fileno())

    def serve(self) -> tuple[str, int] | None:
        """Return (door, rank) in a process that becomes a rank; None at the end."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            selector.register(self._awakened, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if self._awakened in ready:
                    self._awakened.recv(4096)
                    self._reap()
                if self._channel in ready:
                    plan, fds, *_ = socket.recv_fds(self._channel, LONGEST_PLAN, 2)
                    if not plan:
                        self._close()
                        return None
                    door, rank, env = pickle.loads(plan)
                    if self._fork(*fds, env=env):
                        return door, rank

    def _fork(self, link: int, log: int, *, env: dict[str, str]) -> bool:
        """Return True in the child."""
        pid = os.fork()
        if pid != 0:
            os.close(log)
            self._links[pid] = Connection(link)
            self._links[pid].send(pid)
            return False
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._close()
        os.close(link)
        os.setsid()
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        os.environ.clear()
        os.environ.update(env)
        return True

    def _close(self) -> None:
        signal.set_wakeup_fd(-1)
        for end in (self._channel, self._awakened, self._awakener, *self._links.values()):
            end.close()

    def _reap(self) -> None:
        while self._links:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            with self._links.pop(pid) as link, contextlib.suppress(BrokenPipeError):
                link.send(os.waitstatus_to_exitcode(status))  # the client may have exited


def _main(descriptor: str, *path: str) -> None:
    sys.path[:] = path
    for name in PRELOADED:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)
    from tests.distributed import rank_main

    gc.freeze()  # a collection in a rank would copy every shared page
    with socket.socket(fileno=int(descriptor)) as channel:
        plan = _Server(channel).serve()
    if plan is not None:
        rank_main.main(*plan)


if __name__ == "__main__":
    _main(*sys.argv[1:])
