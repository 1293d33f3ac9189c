"""A thread that ends a communicator whose collective cannot end, or must not.

The host does not wait for collectives, so nobody else would notice: a user who asks the device
for a result would wait for ever on a rank that is gone.
"""

from __future__ import annotations

import threading
from typing import Any

from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.backends.nccl.checks import Checks
from flashlight_py.distributed.backends.nccl.communicator import Communicator
from flashlight_py.distributed.backends.nccl.streams import Flight, Flights
from flashlight_py.distributed.recorder import incidents
from flashlight_py.errors import DistributedError

__all__ = ["Watchdog"]

_INTERVAL = 0.2
# While a profile is taken, which wants to know when collectives ended.
_INTERVAL_OF_PROFILE = 0.0005
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
        cpu: Backend,
        checks: Checks | None,
    ) -> None:
        self._cuda = cupy.cuda
        self._device = cupy.cuda.Device(index)  # used by the thread alone
        self._communicator, self._flights = communicator, flights
        self._cpu, self._checks = cpu, checks
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
            # What an aborted communicator leaves behind looks as if it had ended well.
            if self._communicator.broken is not None:
                return
            oldest = self._flights.oldest()
            trouble = self._find_trouble(needs_all or oldest is not None)
            if trouble is not None:
                self._end(trouble)
            elif oldest is not None:
                self._communicator.watch(oldest.verb, oldest.started, self._failure_of(oldest))

    def _failure_of(self, flight: Flight) -> str:
        """Return what CUDA says of a collective that cannot end because CUDA itself has failed."""
        runtime = self._cuda.runtime
        status = runtime.eventQuery(flight.event.ptr)
        return "" if status in _NO_FAILURES else str(runtime.CUDARuntimeError(status))

    def _find_trouble(self, needs_all: bool) -> DistributedError | None:
        if self._checks is None:
            return None
        found = self._checks.find_trouble()
        return self._checks.find_dead() if found is None and needs_all else found

    def _end(self, trouble: DistributedError) -> None:
        """Cut off what runs on the device, and whoever asks the others over the CPU's side."""
        self._communicator.who_is_missing = None  # that is known
        self._communicator.fail(trouble)
        self._cpu.abort(trouble)
