"""Links between this process and new processes that run ``rank_main``, and their tasks.

On Linux, a process inherits its end of the link, and the memory with the task. Elsewhere, it reads
the task from a pipe, and connects to a port of the loopback interface.
"""

import hmac
import multiprocessing
import os
import pickle
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import spawn as mp_spawn
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from flashlight_py.system import IS_PORTABLE

_RANK_MAIN = Path(__file__).with_name("rank_main.py")
_LOOK_SECONDS = 0.1  # seconds between two checks whether a process has ended before it connected
_GREETING_SECONDS = 5.0  # seconds for a process that has connected to send the key


@contextmanager
def shared(task: bytes) -> Iterator[Any]:
    """Yield ``task`` for links: on Linux, a descriptor of memory that no other user can change."""
    if IS_PORTABLE:
        yield task
        return
    with open(os.memfd_create("flashlight task"), "wb") as memory:
        memory.write(task)
        memory.flush()
        yield memory.fileno()


class InheritedLink:
    """A link to a process that is started with ``command``, ``stdin`` and ``descriptors``."""

    stdin = subprocess.DEVNULL

    def __init__(self, folder: str, task: Any) -> None:
        self._link, self._child_end = Pipe()
        os.set_blocking(self._link.fileno(), True)  # gevent may have made it non-blocking
        self.descriptors = [self._child_end.fileno(), task]
        self.command = _command(folder, task, self._child_end.fileno(), os.getpid())

    def on_start(self, process: subprocess.Popen[bytes]) -> None:
        self._child_end.close()
        with suppress(ConnectionError):  # the owner of the link detects that the process died
            self._link.send_bytes(multiprocessing.current_process().authkey)

    def connect(self) -> Connection:
        return self._link


class LoopbackLink:
    """Like ``InheritedLink``, for systems other than Linux."""

    stdin, descriptors = subprocess.PIPE, list[int]()

    def __init__(self, folder: str, task: Any) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(_LOOK_SECONDS)
        self._key = bytes(multiprocessing.current_process().authkey)
        head = self._server.getsockname()[1], self._key, len(task)
        self._content = pickle.dumps(head) + task
        self.command = _command(folder)

    def on_start(self, process: subprocess.Popen[bytes]) -> None:
        """Send the task in a thread, because a stopped process does not read it."""
        self._process = process
        threading.Thread(target=self._send, daemon=True).start()

    def _send(self) -> None:
        pipe = self._process.stdin
        assert pipe
        with suppress(OSError, ValueError):  # the process has ended
            while self._content:
                self._content = self._content[os.write(pipe.fileno(), self._content) :]

    def connect(self) -> Connection:
        """Wait for the process. If it has ended, the returned link is at its end."""
        with self._server:
            while self._process.poll() is None:
                with suppress(OSError, EOFError):  # not yet, or not this process
                    wire, _ = self._server.accept()
                    wire.setblocking(True)
                    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    link = Connection(wire.detach())
                    has_key = link.poll(_GREETING_SECONDS)
                    if has_key and hmac.compare_digest(link.recv_bytes(len(self._key)), self._key):
                        return link
                    link.close()
        own_end, other_end = socket.socketpair()
        other_end.close()
        return Connection(own_end.detach())


new_link = LoopbackLink if IS_PORTABLE else InheritedLink


def _command(folder: str, *numbers: int) -> list[str]:
    """Return the command of ``rank_main`` with the interpreter options of this process (-O, -W)."""
    command = [os.fsdecode(word) for word in mp_spawn.get_command_line()]
    return [*command[: command.index("-c")], str(_RANK_MAIN), folder, *map(str, numbers)]
