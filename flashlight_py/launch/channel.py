"""Messages between the launcher and its agents, one line of JSON each, and what descriptors need.

To an agent: ``prepare`` for ranks of a ``task``, ``start`` them, send them a ``signal``, ``input``
for rank 0, ``collect`` flight records, ``finish`` what the ranks have left, ``leave``. The end of
the connection means leave, too: a launcher that was killed leaves no ranks behind.
From an agent: it is ``here``, ``ready``, or ``cannot_run`` the program; ``output`` of a rank, a
rank has ``exited``, ``more`` input can be taken; the ``record`` of a rank, or why it is
``left_out``; all is ``finished``, but for some processes.
Both ways: a ``pulse`` of an end that is there.

An agent waits until the launcher has taken its message; meanwhile its ranks wait to print. The
launcher never waits for an agent, or each of the two might wait for the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from flashlight_py import system
from flashlight_py.launch.loop import BEAT_SECONDS, Poll

_CHUNK = 1 << 16
_WITH_BYTES = ("output", "input", "record")  # their last value; it travels as text of Latin-1
_PULSE = b'["pulse"]\n'


def message(kind: str, *values: Any) -> bytes:
    return json.dumps([kind, *values], default=lambda data: data.decode("latin-1")).encode() + b"\n"


def parsed(line: bytes) -> tuple[str, list[Any]]:
    """Return what ``message`` was called with."""
    kind, *values = json.loads(line)
    if kind in _WITH_BYTES:
        values[-1] = values[-1].encode("latin-1")
    return kind, values


class Reader:
    """Reads messages from ``descriptor``, which is made not to block; ``heard`` is of each read."""

    def __init__(self, descriptor: int, heard: Callable[[], object] = lambda: None) -> None:
        system.set_blocking(descriptor, False)
        self._descriptor, self._heard = descriptor, heard
        self._rest = b""
        self.received = 0  # bytes
        self.has_ended = False

    def lines(self) -> list[bytes]:
        """Return the messages that are here, without pulses; sets ``has_ended`` at the end."""
        try:
            data = system.read(self._descriptor, _CHUNK)
        except BlockingIOError:
            return []
        except OSError:
            data = b""  # a socket whose other end was killed, or cannot be reached any more
        self.has_ended = not data
        if data:
            self.received += len(data)
            self._heard()
        whole, end, self._rest = (self._rest + data).rpartition(b"\n")
        return [line for line in (whole + end).splitlines(keepends=True) if line != _PULSE]


def write_whole(descriptor: int, data: bytes, waited: Callable[[], object] = lambda: None) -> None:
    """Write ``data``; blocks until it is written, even if the descriptor does not block.

    A rank that shares our terminal may have made it non-blocking. Then ``waited`` is called every
    ``BEAT_SECONDS`` until something can be written.

    Raises:
        OSError: the system says so; ``BrokenPipeError`` if nobody is at the other end.
    """
    while data:
        try:
            data = data[system.write(descriptor, data) :]
        except BlockingIOError:  # noqa: PERF203 - where it waits anyway
            if not system.can_write(descriptor, BEAT_SECONDS):
                waited()


class Outgoing:
    """Writes to a copy of ``descriptor`` without blocking, as the other end reads.

    ``emptied`` is called whenever all is written. Once the other end is closed, bytes are dropped.
    """

    def __init__(
        self, loop: Poll, descriptor: int, emptied: Callable[[], object] = lambda: None
    ) -> None:
        self._loop, self._emptied, self._rest = loop, emptied, b""
        self._is_busy = False
        # A copy, as a socket that is read from as well is watched for that already.
        self._descriptor = system.dup(descriptor)
        system.set_blocking(self._descriptor, False)
        self._is_open, self._is_watched = True, False

    def put(self, data: bytes) -> None:
        """Write ``data`` behind what was put before; does not block."""
        if self._is_open:
            self._is_busy = True
            self._rest += data
            self._write()

    def put_if_idle(self, data: bytes) -> None:
        """Write ``data`` unless something is being written, as a signal's handler may wish."""
        if not self._is_busy:
            self.put(data)

    def close(self) -> None:
        """Drop what is not written yet, and close the copy."""
        if self._is_open:
            self._is_open = False
            self._loop.forget(self._descriptor)
            system.close(self._descriptor)

    def _write(self) -> None:
        self._is_busy = True
        try:
            self._rest = self._rest[system.write(self._descriptor, self._rest) :]
        except BlockingIOError:
            pass
        except OSError:  # nobody reads it any more
            self.close()
            return
        if not self._rest:
            self._loop.forget(self._descriptor)
            self._is_watched = self._is_busy = False
            self._emptied()
        elif not self._is_watched:
            self._is_watched = True
            self._loop.watch(self._descriptor, self._write, writing=True)


class Supply:
    """Reads ``descriptor`` in chunks, one for each call of ``ask``, and hands them to ``deliver``.

    The other end asks when it can take more. The last chunk, at the end of the input, is empty.
    """

    def __init__(self, loop: Poll, descriptor: int, deliver: Callable[[bytes], None]) -> None:
        self._loop, self._descriptor, self._deliver = loop, descriptor, deliver

    def ask(self) -> None:
        """Deliver the next chunk as soon as there is one; at once from a file."""
        try:
            self._loop.watch(self._descriptor, self._read)
        except PermissionError:  # a file: it can be read at any time, and cannot be waited for
            self._read()

    def stop(self) -> None:
        self._loop.forget(self._descriptor)

    def _read(self) -> None:
        self._loop.forget(self._descriptor)
        self._deliver(system.read(self._descriptor, _CHUNK))
