"""Pipes and processes for selectors that accept only sockets, as on Windows; see ``system``."""

from __future__ import annotations

import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any

__all__ = ["Popen", "close", "pipe", "read", "send", "set_blocking"]

_CHUNK = 1 << 16
_LAST_SECONDS = 0.5  # seconds to wait for the output of an ended process: children may hold it

close = socket.close


def pipe() -> tuple[int, int]:
    """Return two connected sockets. The first is for reading."""
    reading, writing = socket.socketpair()
    return reading.detach(), writing.detach()


@contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    wire = socket.socket(fileno=descriptor)
    try:
        yield wire
    finally:
        wire.detach()


def read(descriptor: int, size: int) -> bytes:
    with _borrowed(descriptor) as wire:
        return wire.recv(size)


def send(descriptor: int, data: bytes) -> int:
    with _borrowed(descriptor) as wire:
        return wire.send(data)


def set_blocking(descriptor: int, blocking: bool) -> None:
    with _borrowed(descriptor) as wire:
        wire.setblocking(blocking)


class Popen(subprocess.Popen[bytes]):
    """A process whose output threads copy to ends of ``pipe``, if these are passed."""

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        ends = {
            name: options[name] for name in ("stdout", "stderr") if (options.get(name) or 0) > 0
        }
        super().__init__(command, **{**options, **dict.fromkeys(ends, subprocess.PIPE)})
        self._copies = list[threading.Thread]()
        for name, end in ends.items():
            with _borrowed(end) as wire:
                args = getattr(self, name), wire.dup()
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
