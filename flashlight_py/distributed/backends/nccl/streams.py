"""The order between a group's communication stream and the compute streams of users.

A collective waits for the work that was queued on the caller's current stream. A request for the
result makes the caller's stream wait for the collective. The host never waits, so only the watchdog
detects a collective that cannot end.
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
# Seconds between checks while a profile is recorded, which shows when collectives ended.
_PROFILE_INTERVAL = 0.0005
# Maximum number of pending collectives of a communicator. CUDA queues 1,024 launches; a further
# launch would block the host, and an abort would block as well.
MAX_PENDING = 256
# Minimum seconds between checks for lost ranks: a check takes some system calls per rank.
_LOSS_INTERVAL = 0.15
# Statuses of an event that has not failed: success, cudaErrorNotReady, and errors during a capture
# by another thread (cudaErrorStreamCaptureUnsupported to cudaErrorStreamCaptureWrongThread).
_NO_FAILURES = {0, 600, *range(900, 909)}


@dataclass
class DeviceFlight:
    """A collective that was launched on the device; ``started`` is a time in seconds.

    ``event`` is recorded after the collective, and may later serve another collective. ``ended`` is
    the time at which the end of the collective was first detected. ``compared`` is the comparison
    of the ranks' calls. ``arrays`` are kept, because CuPy would reuse their memory too early.
    """

    verb: str
    event: Any
    arrays: Sequence[Array]
    compared: Work = field(default_factory=Done)
    started: float = field(default_factory=time.monotonic)
    has_ended: bool = False
    ended: float | None = None

    def start_time(self, free: float = 0.0) -> float:
        """Return when the device could start: all ranks have called, and ``free`` has passed."""
        if not self.compared.is_completed():
            return math.inf  # not late: the comparison has its own timeout
        return max(self.started, self.compared.end_time() or 0.0, free)

    def check(self) -> bool:
        """Return whether the collective has ended; releases the arrays if it has."""
        if not self.has_ended and self.event.done:
            self.has_ended, self.arrays, self.ended = True, (), time.monotonic()
        return self.has_ended


class Flights:
    """The pending collectives in launch order. They also end in this order.

    They use a fixed set of ``events``. The watchdog removes ended collectives while other threads
    add new ones.
    """

    def __init__(self, events: Iterable[Any]) -> None:
        self._pending: deque[DeviceFlight] = deque()
        self._events = deque(events)
        self._lock = threading.RLock()  # reentrant: releasing an array may run any code
        self.last_end = 0.0  # time at which the end of a collective was last detected

    def free_event(self) -> Any | None:
        """Return an event for the next collective, or None if all are in use."""
        with self._lock:
            if not self._events:
                self.oldest()
            return self._events[0] if self._events else None

    def add(self, flight: DeviceFlight) -> None:
        """Add ``flight``, whose event is from ``free_event``. Remove the oldest one if it ended."""
        with self._lock:
            self._events.popleft()
            self._pending.append(flight)
            if self._pending[0].check():
                self._remove_oldest()

    def oldest(self) -> DeviceFlight | None:
        """Return the first collective that has not ended, or None."""
        with self._lock:
            while self._pending and self._pending[0].check():
                self._remove_oldest()
            return self._pending[0] if self._pending else None

    def _remove_oldest(self) -> None:
        flight = self._pending.popleft()
        self._events.append(flight.event)
        self.last_end = flight.ended or self.last_end

    def newest(self) -> DeviceFlight | None:
        """Return the collective with the latest launch, or None if all have ended."""
        with self._lock:
            return self._pending[-1] if self._pending else None

    def clear(self) -> None:
        """Remove all collectives and release their arrays. No collective may be running."""
        with self._lock:
            while self._pending:
                self._pending.popleft().arrays = ()
            self._events.clear()


class NcclWatchdog:
    """A thread that ends the communicator if its oldest collective is late or fails."""

    def __init__(self, cuda: Any, index: int, flights: Flights, comparisons: Comparisons) -> None:
        self._runtime = cuda.runtime
        self._device = cuda.Device(index)  # only the watchdog's thread uses it
        self._communicator, self._flights = comparisons.communicator, flights
        self._comparisons, self._next = comparisons, 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flashlight-nccl", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; blocks for at most one check."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._device.use()
            while self._communicator.broken is None:
                profiled = journal.listener is not None
                if self._stop.wait(_PROFILE_INTERVAL if profiled else _INTERVAL):
                    break
                self.check()
        except Exception as error:
            prefix, name = self._communicator.doing("watchdog"), type(error).__name__
            reason = "Without its watchdog the group cannot detect lost ranks, so it is closed"
            self._communicator.fail(DistributedError(f"{prefix}: {name}: {error}. {reason}"))
            raise

    def check(self, needs_all: bool = False) -> None:
        """End the communicator if calls differ, a rank is lost, or a collective is late or fails.

        Set ``needs_all`` if this rank waits for other ranks before a launch. A check takes no lock
        that a thread inside a launch holds.
        """
        communicator = self._communicator
        self._comparisons.check()
        self._comparisons.look_back()
        # After an abort, ``watch`` would see no error: NCCL's state is that of a normal end.
        if communicator.broken is not None:
            return
        oldest, now = self._flights.oldest(), time.monotonic()
        blocks = now - communicator.launching_since > _INTERVAL
        if (oldest is not None or needs_all or blocks) and now >= self._next:
            self._next = now + _LOSS_INTERVAL
            self._comparisons.find_lost("NCCL" if oldest is None else oldest.verb)
        if oldest is not None:
            # If CUDA has failed, the event never completes, and only its status shows the failure.
            status = self._runtime.eventQuery(oldest.event.ptr)
            is_failure = status not in _NO_FAILURES
            failure = str(self._runtime.CUDARuntimeError(status)) if is_failure else ""
            if not oldest.has_ended:  # otherwise another collective uses its event
                communicator.watch(oldest.verb, oldest.start_time(self._flights.last_end), failure)
        elif blocks:
            communicator.watch("launch", math.inf)
