"""The order between a group's communication stream and the streams that users compute on.

A collective waits for the work that the caller's current stream had at the call. Once the result
is asked for, the caller's stream waits for the collective. The host waits for neither, so only the
watchdog notices a collective that cannot end.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashlight_py.device import Array
from flashlight_py.distributed.backends.nccl.comparing import Comparisons
from flashlight_py.distributed.calls import journal
from flashlight_py.distributed.work import Done, Work
from flashlight_py.errors import DistributedError

_INTERVAL = 0.2
# While a profile is taken, which wants to know when collectives ended.
_INTERVAL_OF_PROFILE = 0.0005
# Most collectives of a communicator on the device. CUDA queues 1,024 launches; the next launch
# blocks the host, and so does an abort then.
MOST_UNFINISHED = 256
# Whether a rank is lost is asked for less often than that: it takes some system calls for each.
_INTERVAL_OF_LOSSES = 0.15
# Of an event's status: success, cudaErrorNotReady, and what concerns a graph that somebody captures
# meanwhile (cudaErrorStreamCaptureUnsupported to cudaErrorStreamCaptureWrongThread).
_NO_FAILURES = {0, 600, *range(900, 909)}


@dataclass
class DeviceFlight:
    """A collective that was given to the device; ``started`` is a time in seconds.

    ``event`` is recorded after it and reused later. ``ended`` is when its end was first seen,
    ``compared`` the comparison of its calls. ``arrays`` are kept, because CuPy would reuse their
    memory while the collective still uses it.
    """

    verb: str
    event: Any
    arrays: Sequence[Array]
    compared: Work = field(default_factory=Done)
    started: float = field(default_factory=time.monotonic)
    landed: bool = False
    ended: float | None = None

    def begun(self, free: float = 0.0) -> float:
        """Return the time since when all ranks have called and the stream is ``free``."""
        if not self.compared.is_completed():
            return math.inf  # until then the limit of the comparison holds
        return max(self.started, self.compared.end_time() or 0.0, free)

    def ask(self) -> bool:
        """Return whether it has ended; lets go of the arrays when it has."""
        if not self.landed and self.event.done:
            self.landed, self.arrays, self.ended = True, (), time.monotonic()
        return self.landed


class Flights:
    """The collectives on their way, in the order of the launches, which is that of the ends.

    ``events`` serve them in turn. The watchdog lets go of what has ended while other threads ask.
    """

    def __init__(self, events: Iterable[Any]) -> None:
        self._pending: deque[DeviceFlight] = deque()
        self._events = deque(events)
        self._lock = threading.RLock()  # to let go of an array may run anything
        self.last_end = 0.0  # when the newest ended collective was seen to have ended, in seconds

    def free_event(self) -> Any | None:
        """Return an event for the next collective; None: all are in use."""
        with self._lock:
            if not self._events:
                self.oldest()
            return self._events[0] if self._events else None

    def add(self, flight: DeviceFlight) -> None:
        """Keep ``flight``, whose event is that of ``free_event``; forget one that has ended."""
        with self._lock:
            self._events.popleft()
            self._pending.append(flight)
            if self._pending[0].ask():
                self._land()

    def oldest(self) -> DeviceFlight | None:
        """Return the first that has not ended, if any."""
        with self._lock:
            while self._pending and self._pending[0].ask():
                self._land()
            return self._pending[0] if self._pending else None

    def _land(self) -> None:
        landed = self._pending.popleft()
        self._events.append(landed.event)
        self.last_end = landed.ended or self.last_end

    def newest(self) -> DeviceFlight | None:
        """Return the one that ends last, if any is on its way."""
        with self._lock:
            return self._pending[-1] if self._pending else None

    def clear(self) -> None:
        """Forget all of them: nothing runs any more. A flight record keeps them, without arrays."""
        with self._lock:
            while self._pending:
                self._pending.popleft().arrays = ()
            self._events.clear()


class NcclWatchdog:
    """A thread that ends a communicator whose oldest collective cannot end, until ``stop``."""

    def __init__(self, cuda: Any, index: int, flights: Flights, comparisons: Comparisons) -> None:
        self._runtime = cuda.runtime
        self._device = cuda.Device(index)  # used by the thread alone
        self._communicator, self._flights = comparisons.communicator, flights
        self._comparisons, self._next = comparisons, 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flashlight-nccl", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; blocks for as long as one look takes."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._device.use()
            while self._communicator.broken is None:
                profiled = journal.listener is not None
                if self._stop.wait(_INTERVAL_OF_PROFILE if profiled else _INTERVAL):
                    break
                self.look()
        except Exception as error:
            words = f"{type(error).__name__}: {error}; without a watchdog nothing ends a wait for a"
            where = self._communicator.doing("watchdog")
            self._communicator.fail(DistributedError(f"{where}: {words} rank that is gone"))
            raise

    def look(self, needs_all: bool = False) -> None:
        """Break the communicator if ranks differ, one is lost, or a collective is late or fails.

        ``needs_all``: this rank waits for the others before a collective is on its way. Takes no
        lock that a thread inside a launch holds.
        """
        communicator = self._communicator
        self._comparisons.look()
        self._comparisons.look_back()
        # The remains of an aborted communicator look as if it had ended well.
        if communicator.broken is not None:
            return
        oldest, now = self._flights.oldest(), time.monotonic()
        blocks = now - communicator.launching_since > _INTERVAL
        if (oldest is not None or needs_all or blocks) and now >= self._next:
            self._next = now + _INTERVAL_OF_LOSSES
            self._comparisons.find_lost("NCCL" if oldest is None else oldest.verb)
        if oldest is not None:
            # The event cannot end if CUDA itself has failed.
            status = self._runtime.eventQuery(oldest.event.ptr)
            is_failure = status not in _NO_FAILURES
            failure = str(self._runtime.CUDARuntimeError(status)) if is_failure else ""
            if not oldest.landed:  # else the event serves another one by now
                communicator.watch(oldest.verb, oldest.begun(self._flights.last_end), failure)
        elif blocks:
            communicator.watch("launch", math.inf)
