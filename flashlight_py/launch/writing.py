"""Write all of it to a descriptor: waiting until there is room, or never waiting."""

from __future__ import annotations

import os
import select
from collections.abc import Callable

from flashlight_py.launch.loop import Loop

__all__ = ["Outgoing", "write_whole"]


def write_whole(descriptor: int, data: bytes) -> None:
    """Write ``data``; blocks until it is written, also where the descriptor itself would not.

    Whoever shares it, a rank on our terminal for one, may have made it non-blocking for all.

    Raises:
        OSError: the system says so; ``BrokenPipeError`` if nobody is at the other end.
    """
    while data:
        data = data[_write_some(descriptor, data) :]


class Outgoing:
    """Writes what is put to ``descriptor``, which is made not to block, as the other end reads.

    ``emptied`` is called whenever all of it has been written. Once nobody is at the other end,
    what is put is dropped.
    """

    def __init__(
        self, loop: Loop, descriptor: int, emptied: Callable[[], object] = lambda: None
    ) -> None:
        os.set_blocking(descriptor, False)
        self._loop, self._descriptor, self._emptied = loop, descriptor, emptied
        self._rest = b""
        self._is_closed = self._is_watched = False

    def put(self, data: bytes) -> None:
        """Write ``data`` behind what was put before; does not block."""
        if not self._is_closed:
            self._rest += data
            self._write()

    def close(self) -> None:
        """Drop what is not written yet; the descriptor stays open."""
        self._is_closed, self._rest = True, b""
        self._watch(False)

    def _write(self) -> None:
        try:
            self._rest = self._rest[os.write(self._descriptor, self._rest) :]
        except BlockingIOError:
            pass
        except ConnectionError:  # it reads no more
            self.close()
            return
        self._watch(bool(self._rest))
        if not self._rest:
            self._emptied()

    def _watch(self, wanted: bool) -> None:
        if wanted and not self._is_watched:
            self._loop.watch(self._descriptor, self._write, writing=True)
        elif self._is_watched and not wanted:
            self._loop.forget(self._descriptor)
        self._is_watched = wanted


def _write_some(descriptor: int, data: bytes) -> int:
    """Return how much could be written; if nothing, wait until there is room."""
    try:
        return os.write(descriptor, data)
    except BlockingIOError:
        select.select([], [descriptor], [])
        return 0
