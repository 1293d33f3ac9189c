"""Pipes and processes for selectors that accept only sockets, as on Windows; see ``system``."""

import socket
import subprocess
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO, Any

__all__ = ["Popen", "close", "pipe", "read", "send", "set_blocking"]

_CHUNK = 1 << 16
_LAST_SECONDS = 0.5  # seconds to wait for the output of an ended process: children may hold it

close = socket.close


def pipe() -> tuple[int, int]:
    """Return two connected sockets. The first is for reading."""
    reading, writing = socket.socketpair()
    return reading.detach(), writing.detach()


def _for_descriptors(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``method`` of sockets as a function whose first argument is a descriptor."""

    def call(descriptor: int, *args: Any) -> Any:
        wire = socket.socket(fileno=descriptor)
        try:
            return method(wire, *args)
        finally:
            wire.detach()

    return call


read, send = _for_descriptors(socket.socket.recv), _for_descriptors(socket.socket.send)
set_blocking = _for_descriptors(socket.socket.setblocking)
_dup = _for_descriptors(socket.socket.dup)


class Popen(subprocess.Popen[bytes]):
    """A process whose output threads copy to ends of ``pipe``, if these are passed."""

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        ends = {name: options.get(name) or 0 for name in ("stdout", "stderr")}
        ends = {name: end for name, end in ends.items() if end > 0}
        super().__init__(command, **{**options, **dict.fromkeys(ends, subprocess.PIPE)})
        self._copies = list[threading.Thread]()
        for name, end in ends.items():
            args = getattr(self, name), _dup(end)
            self._copies.append(threading.Thread(target=_copy, args=args, daemon=True))
            self._copies[-1].start()

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process, and shortly for its last output."""
        code = super().wait(timeout)
        for thread in self._copies:
            thread.join(_LAST_SECONDS)
        return code


def _copy(source: IO[bytes], target: socket.socket) -> None:
    with source, target, suppress(OSError):  # the launcher has closed its end
        while data := source.read(_CHUNK):  # all available bytes, because ``bufsize`` is 0
            target.sendall(data)
