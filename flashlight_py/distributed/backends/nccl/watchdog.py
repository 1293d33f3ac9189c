"""A thread that ends a communicator whose collective cannot end, or must not.

The host does not wait for collectives, so nobody else would notice: a user who asks the device
for a result would wait for ever on a rank that is gone.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from flashlight_py.distributed.backends.nccl.communicator import Communicator
from flashlight_py.distributed.backends.nccl.comparing import Comparisons
from flashlight_py.distributed.backends.nccl.streams import Flight, Flights
from flashlight_py.distributed.failures import incidents

_INTERVAL = 0.2
# While a profile is taken, which wants to know when collectives ended.
_INTERVAL_OF_PROFILE = 0.0005
# Whether a rank is lost is asked for less often than that: it takes some system calls for each.
_INTERVAL_OF_LOSSES = 0.15
# Of an event's status: success, cudaErrorNotReady, and what concerns a graph that somebody captures
# meanwhile (cudaErrorStreamCaptureUnsupported to cudaErrorStreamCaptureWrongThread).
_NO_FAILURES = {0, 600, *range(900, 909)}


class Watchdog:
    """Looks at the oldest collective on its way, a few times a second, until ``stop``."""

    def __init__(
        self,
        cupy: Any,
        index: int,
        communicator: Communicator,
        flights: Flights,
        comparisons: Comparisons,
    ) -> None:
        self._cuda = cupy.cuda
        self._device = cupy.cuda.Device(index)  # used by the thread alone
        self._communicator, self._flights = communicator, flights
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
            while not self._stop.wait(self._interval()) and self._communicator.broken is None:
                self.look()
        except Exception as error:
            self._communicator.give_up_on(error)  # nobody else would end a wait for the device
            raise

    def _interval(self) -> float:
        return _INTERVAL if incidents.listener is None else _INTERVAL_OF_PROFILE

    def look(self, needs_all: bool = False) -> None:
        """Break the communicator if ranks differ, one is lost, or a collective is late or fails.

        ``needs_all``: this rank waits for the others, though no collective is on its way yet.
        """
        with self._communicator.lock:
            self._comparisons.look()
            # What an aborted communicator leaves behind looks as if it had ended well.
            if self._communicator.broken is not None:
                return
            oldest = self._flights.oldest()
            now = time.monotonic()
            if (oldest is not None or needs_all) and now >= self._next:
                self._next = now + _INTERVAL_OF_LOSSES
                self._comparisons.find_lost("NCCL" if oldest is None else oldest.verb)
            if oldest is not None:
                self._communicator.watch(oldest.verb, oldest.begun(), self._failure_of(oldest))

    def _failure_of(self, flight: Flight) -> str:
        """Return what CUDA says of a collective that cannot end because CUDA itself has failed."""
        runtime = self._cuda.runtime
        status = runtime.eventQuery(flight.event.ptr)
        return "" if status in _NO_FAILURES else str(runtime.CUDARuntimeError(status))
