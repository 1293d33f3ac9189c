"""Messages between the launcher and its agents, one line of JSON each, with readers and writers.

Launcher to agent: ``prepare`` for ranks, the ``task`` of the ranks, ``start`` ranks, send them a
``signal``, ``input`` of rank 0, ``collect`` flight records, ``finish`` the attempt, ``leave``. An
agent also leaves if the connection ends, so a killed launcher leaves no ranks behind.

Agent to launcher: the agent is ``here``, it is ``ready``, it ``cannot_run`` the program, ``output``
of a rank, a rank has ``exited``, rank 0 accepts ``more`` input, a flight ``record``, a record is
``left_out``, the attempt is ``finished`` (with the pids of processes that SIGKILL did not end).

Both directions: a ``pulse``, which shows that the sender is alive.

An agent blocks until the launcher has read its message; meanwhile the ranks block when they print.
The launcher never blocks on an agent. Otherwise the two could wait for each other.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from flashlight_py import system
from flashlight_py.launch.loop import BEAT_SECONDS, Poll

_CHUNK = 1 << 16
_WITH_BYTES = ("output", "input", "record")  # last value: bytes, sent as Latin-1 text
_PULSE = b'["pulse"]\n'


def message(kind: str, *values: Any) -> bytes:
    return json.dumps([kind, *values], default=lambda data: data.decode("latin-1")).encode() + b"\n"


def parsed(line: bytes) -> tuple[str, list[Any]]:
    """Return the arguments of ``message`` from its line."""
    kind, *values = json.loads(line)
    if kind in _WITH_BYTES:
        values[-1] = values[-1].encode("latin-1")
    return kind, values


class Reader:
    """A non-blocking reader of messages; ``on_data`` is called after each successful read."""

    def __init__(self, descriptor: int, on_data: Callable[[], object] = lambda: None) -> None:
        system.set_blocking(descriptor, False)
        self._descriptor, self._on_data = descriptor, on_data
        self._partial_line = b""
        self.received = 0  # bytes
        self.has_ended = False

    def lines(self) -> list[bytes]:
        """Return the messages received so far, without pulses; set ``has_ended`` at the end."""
        try:
            data = system.read(self._descriptor, _CHUNK)
        except BlockingIOError:
            return []
        except OSError:
            data = b""  # the peer of a socket was killed or is unreachable
        self.has_ended = not data
        if data:
            self.received += len(data)
            self._on_data()
        complete, newline, self._partial_line = (self._partial_line + data).rpartition(b"\n")
        return [line for line in (complete + newline).splitlines(keepends=True) if line != _PULSE]


def write_whole(descriptor: int, data: bytes, on_wait: Callable[[], object] = lambda: None) -> None:
    """Write all of ``data``; blocks even if the descriptor is non-blocking.

    A rank that shares our terminal may have made it non-blocking. While nothing can be written,
    ``on_wait`` is called every ``BEAT_SECONDS``. Raises OSError, and BrokenPipeError if the other
    end is closed.
    """
    while data:
        try:
            data = data[system.write(descriptor, data) :]
        except BlockingIOError:  # noqa: PERF203 - it waits here anyway
            if not system.can_write(descriptor, BEAT_SECONDS):
                on_wait()


class Outgoing:
    """A non-blocking writer to a duplicate of ``descriptor``, which buffers unsent bytes.

    ``on_empty`` is called whenever all bytes are written. Bytes for a closed end are dropped.
    """

    def __init__(
        self, loop: Poll, descriptor: int, on_empty: Callable[[], object] = lambda: None
    ) -> None:
        self._loop, self._on_empty, self._unsent = loop, on_empty, b""
        self._is_busy = False
        # A duplicate, because the original descriptor may already be watched for reading.
        self._descriptor = system.dup(descriptor)
        system.set_blocking(self._descriptor, False)
        self._is_open, self._is_watched = True, False

    def put(self, data: bytes) -> None:
        """Append ``data`` to the unsent bytes and write without blocking."""
        if self._is_open:
            self._is_busy = True
            self._unsent += data
            self._write()

    def put_if_idle(self, data: bytes) -> None:
        """Write ``data`` unless other bytes are unsent. Signal handlers may call this method."""
        if not self._is_busy:
            self.put(data)

    def close(self) -> None:
        """Drop the unsent bytes and close the duplicate."""
        if self._is_open:
            self._is_open = False
            self._loop.unwatch(self._descriptor)
            system.close(self._descriptor)

    def _write(self) -> None:
        self._is_busy = True
        try:
            self._unsent = self._unsent[system.write(self._descriptor, self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:  # the other end is closed
            self.close()
            return
        if not self._unsent:
            self._loop.unwatch(self._descriptor)
            self._is_watched = self._is_busy = False
            self._on_empty()
        elif not self._is_watched:
            self._is_watched = True
            self._loop.watch(self._descriptor, self._write, writing=True)


class Supply:
    """A reader of chunks: each call of ``ask`` passes one chunk of input to ``deliver``.

    The receiver calls ``ask`` when it can accept more. An empty chunk is the end of the input.
    """

    def __init__(self, loop: Poll, descriptor: int, deliver: Callable[[bytes], None]) -> None:
        self._loop, self._descriptor, self._deliver = loop, descriptor, deliver

    def ask(self) -> None:
        """Deliver the next chunk when it arrives; for a file, deliver it immediately."""
        try:
            self._loop.watch(self._descriptor, self._read)
        except PermissionError:  # a regular file: always readable, and poll rejects it
            self._read()

    def stop(self) -> None:
        self._loop.unwatch(self._descriptor)

    def _read(self) -> None:
        self._loop.unwatch(self._descriptor)
        self._deliver(system.read(self._descriptor, _CHUNK))
