"""Messages between the launcher and its agents, one line of JSON each, with readers and writers.

The launcher sends these messages: ``prepare`` an attempt, ``task`` (what the ranks run), ``start``
the ranks, ``signal`` for the ranks, ``input`` for rank 0, ``collect`` flight records, ``finish``
the attempt, and ``leave`` (end the agent). An agent also ends if the connection ends, so a killed
launcher leaves no ranks behind.

An agent sends these messages: ``here`` (it has started), ``ready`` (it can start ranks),
``cannot_run`` the program, ``output`` of a rank, ``exited`` with a rank's exit code, ``more`` (rank
0 accepts input), ``record`` with a flight record, ``left_out`` for a record that is not sent, and
``finished`` with the pids of processes that SIGKILL did not end.

The launcher and the agents send ``pulse`` regularly to show that they are alive.

An agent blocks until its message is written; meanwhile the ranks block when they print. The
launcher never blocks on an agent. Otherwise the two could wait for each other.
"""

import io
import json
from collections.abc import Callable
from typing import Any

from flashlight_py import system
from flashlight_py.launch.loop import BEAT_SECONDS, Poll

_CHUNK = 1 << 16
_WITH_BYTES = ("output", "input", "record")  # messages whose last value is bytes (sent as Latin-1)
_PULSE = b'["pulse"]\n'


def message(kind: str, *values: Any) -> bytes:
    return json.dumps([kind, *values], default=lambda data: data.decode("latin-1")).encode() + b"\n"


def parsed(line: bytes) -> tuple[str, list[Any]]:
    """Return the kind and the values that ``message`` encoded as ``line``."""
    kind, *values = json.loads(line)
    if kind in _WITH_BYTES:
        values[-1] = values[-1].encode("latin-1")
    return kind, values


class Reader:
    """A non-blocking reader of lines; ``on_data`` is called after each successful read."""

    def __init__(self, descriptor: int, on_data: Callable[[], object] = lambda: None) -> None:
        system.set_blocking(descriptor, False)
        self._descriptor, self._on_data = descriptor, on_data
        self._partial_line = b""
        self.received = 0  # bytes
        self.has_ended = False

    def lines(self) -> list[bytes]:
        """Return complete new lines except pulses; set ``has_ended`` if the stream has ended."""
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
        return [line for line in io.BytesIO(complete + newline) if line != _PULSE]


def write_whole(descriptor: int, data: bytes, on_wait: Callable[[], object] = lambda: None) -> None:
    """Write all of ``data``; blocks even if the descriptor is non-blocking.

    A rank that uses the same terminal may have made it non-blocking. While nothing can be written,
    ``on_wait`` is called every ``BEAT_SECONDS``. Raises BrokenPipeError if the reader has closed
    its end, and other OSErrors of the system.
    """
    while data:
        try:
            data = data[system.write(descriptor, data) :]
        except BlockingIOError:  # noqa: PERF203 - it waits here anyway
            if not system.can_write(descriptor, BEAT_SECONDS):
                on_wait()


class Outgoing:
    """A non-blocking writer to ``descriptor``, with a buffer for unsent bytes.

    ``on_empty`` is called whenever all bytes are written. After the reader has closed the
    connection, unsent and later bytes are dropped.
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
        if self._is_open:
            self._is_busy = True
            self._unsent += data
            self._write()

    def put_if_idle(self, data: bytes) -> None:
        """Write ``data``, or drop it if other bytes are unsent. Signal handlers may call this."""
        if not self._is_busy:
            self.put(data)

    def close(self) -> None:
        """Drop the unsent bytes and close this writer's duplicate of the descriptor."""
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
    """A reader of input for rank 0. ``ask`` reads one chunk and calls ``deliver(chunk)``."""

    def __init__(self, loop: Poll, descriptor: int, deliver: Callable[[bytes], None]) -> None:
        self._loop, self._descriptor, self._deliver = loop, descriptor, deliver

    def ask(self) -> None:
        """Deliver one chunk as soon as input arrives; b"" at the end of the input."""
        try:
            self._loop.watch(self._descriptor, self._read)
        except PermissionError:  # a regular file: always readable, and poll rejects it
            self._read()

    def stop(self) -> None:
        self._loop.unwatch(self._descriptor)

    def _read(self) -> None:
        self._loop.unwatch(self._descriptor)
        self._deliver(system.read(self._descriptor, _CHUNK))
