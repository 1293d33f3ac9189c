"""The order between a group's communication stream and the streams that users compute on.

A collective starts when the work is done that the caller's current stream had at the call, and
the caller's stream goes on, once the result is asked for, when the collective is done. Both are
waits of streams for events on the device: the host goes on at once.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flashlight_py.device import Array
from flashlight_py.distributed.work import Done, Work


class CommunicationStream:
    """A stream on device ``index`` for the collectives of one group, in the order of the calls.

    The device must be the current one for every method.
    """

    def __init__(self, cupy: Any, index: int) -> None:
        self._cuda = cupy.cuda
        self._index = index
        # Not ordered with the legacy default stream, which would serialise what is to overlap.
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.pointer = int(self.stream.ptr)
        self._ready = cupy.cuda.Event(disable_timing=True)

    def follow(self) -> None:
        """Have what comes next wait for all that the caller's current stream has so far."""
        # One event serves every call: a wait is for the record that came last before it.
        self._ready.record(self._current())
        self.stream.wait_event(self._ready)

    def mark(self) -> Any:
        """Return an event that is done when all that was given to this stream is."""
        event = self._cuda.Event(disable_timing=True)
        event.record(self.stream)
        return event

    def lead(self, event: Any) -> None:
        """Have the caller's current stream wait for ``event``."""
        self._current().wait_event(event)

    def _current(self) -> Any:
        return self._cuda.get_current_stream(self._index)


@dataclass
class Flight:
    """A collective that was given to the device; ``started`` is a time in seconds.

    ``ended`` is when it was first seen to have ended, ``compared`` what compares the calls of it.

    ``arrays`` are kept: CuPy would hand the memory of one that is dropped to whoever asks next on
    the stream that it was made on, while the collective still reads and writes it.
    """

    verb: str
    event: Any
    arrays: Sequence[Array]
    compared: Work = field(default_factory=Done)
    started: float = field(default_factory=time.monotonic)
    landed: bool = False
    ended: float | None = None

    def begun(self) -> float:
        """Return since when all ranks had called it, in seconds; inf: not yet, as far as is known.

        So long another limit holds, that of the comparison.
        """
        if not self.compared.is_completed():
            return math.inf
        return max(self.started, self.compared.end_time() or 0.0)

    def ask(self) -> bool:
        """Return whether it has ended; lets go of the arrays when it has."""
        if not self.landed and self.event.done:
            self.landed, self.arrays, self.ended = True, (), time.monotonic()
        return self.landed


class Flights:
    """What is on its way, in the order of the launches, which is that of the ends.

    The watchdog lets go of what has ended while other threads ask.
    """

    def __init__(self) -> None:
        self._pending: deque[Flight] = deque()
        self._lock = threading.RLock()  # to let go of an array may run anything

    def add(self, flight: Flight) -> None:
        """Keep ``flight``, and forget those that have ended."""
        with self._lock:
            self.oldest()
            self._pending.append(flight)

    def oldest(self) -> Flight | None:
        """Return the first that has not ended, if any."""
        with self._lock:
            while self._pending and self._pending[0].ask():
                self._pending.popleft()
            return self._pending[0] if self._pending else None

    def newest(self) -> Flight | None:
        """Return the one that ends last, if any is on its way."""
        with self._lock:
            return self._pending[-1] if self._pending else None

    def clear(self) -> None:
        """Forget all of them: nothing runs any more."""
        with self._lock:
            self._pending.clear()
