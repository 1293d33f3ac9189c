"""A thread that ends a communicator whose collective cannot end.

The host does not wait for collectives, so nobody else would notice: a user who asks the device
for a result would wait for ever on a rank that is gone.
"""

from __future__ import annotations

import threading
from typing import Any

from flashlight_py.distributed.backends.nccl.communicator import Communicator
from flashlight_py.distributed.backends.nccl.streams import Flights
from flashlight_py.distributed.recorder import incidents

__all__ = ["Watchdog"]

_INTERVAL = 0.2
# While a profile is taken, which wants to know when collectives ended.
_INTERVAL_OF_PROFILE = 0.0005


class Watchdog:
    """Looks at the oldest collective on its way, a few times a second, until ``stop``."""

    def __init__(self, cupy: Any, index: int, communicator: Communicator, flights: Flights) -> None:
        self._device = cupy.cuda.Device(index)  # used by the thread alone
        self._communicator, self._flights = communicator, flights
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flashlight-nccl", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; blocks for as long as one look takes."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        self._device.use()
        while not self._stop.wait(self._interval()) and self._communicator.broken is None:
            self.look()

    def _interval(self) -> float:
        return _INTERVAL if incidents.listener is None else _INTERVAL_OF_PROFILE

    def look(self) -> None:
        """Break the communicator if it failed, or its oldest collective takes too long."""
        with self._communicator.lock:
            # What an aborted communicator leaves behind looks as if it had ended well.
            if self._communicator.broken is not None:
                return
            oldest = self._flights.oldest()
            if oldest is not None:
                self._communicator.watch(oldest.verb, oldest.started)
