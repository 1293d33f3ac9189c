"""Standard input on its way to a rank on another host: never more than there is room for."""

from __future__ import annotations

import os
from collections.abc import Callable

from flashlight_py.launch.loop import Loop
from flashlight_py.launch.writing import Outgoing

__all__ = ["Feed", "Supply"]

_CHUNK = 1 << 16


class Supply:
    """Reads ``descriptor`` in chunks, one for each call of ``ask``, and hands them to ``deliver``.

    The last chunk, at the end of the input, is empty.
    """

    def __init__(self, loop: Loop, descriptor: int, deliver: Callable[[bytes], None]) -> None:
        self._loop, self._descriptor, self._deliver = loop, descriptor, deliver

    def ask(self) -> None:
        """Deliver the next chunk as soon as there is one; at once from a file."""
        try:
            self._loop.watch(self._descriptor, self._read)
        except PermissionError:  # a file: it can be read at any time, and cannot be waited for
            self._read()

    def stop(self) -> None:
        """Deliver nothing any more."""
        self._loop.forget(self._descriptor)

    def _read(self) -> None:
        self._loop.forget(self._descriptor)
        self._deliver(os.read(self._descriptor, _CHUNK))


class Feed:
    """A pipe to a process. Asks for ``more`` whenever all that was put has been written."""

    def __init__(self, loop: Loop, more: Callable[[], None]) -> None:
        self._more = more
        self.theirs, self._ours = os.pipe()
        self._out = Outgoing(loop, self._ours, more)

    def begin(self) -> None:
        """Close our copy of the process's end, which has been given to it, and ask."""
        os.close(self.theirs)
        self._more()

    def put(self, data: bytes) -> None:
        """Write ``data`` as the process reads; nothing: close the pipe."""
        if data:
            self._out.put(data)
        else:
            os.close(self._ours)
