"""A collective on the communication stream, as a ``Work``."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from flashlight_py.distributed.backends.nccl.streams import Flight
from flashlight_py.distributed.work import Done, Work, limit_passed

if TYPE_CHECKING:
    from flashlight_py.distributed.backends.nccl.backend import NcclBackend

# CUDA has no wait with a time limit, and one without would not answer Ctrl-C.
_INTERVAL = 0.0002


class Led(Done):
    """A collective that the caller's stream waits for already: the result can be used."""

    def __init__(self, flight: Flight, result: Any) -> None:
        super().__init__(result)
        self.flight = flight


class StreamWork(Work):
    """Waiting makes the caller's current stream wait; the host blocks only for a ``timeout``."""

    def __init__(self, backend: NcclBackend, flight: Flight, result: Any) -> None:
        self._backend, self._result = backend, result
        self.flight: Flight = flight

    def wait(self, timeout: float | None = None) -> Any:
        """Return the result, which the current stream can use; see ``Work``.

        With ``timeout`` the host blocks, up to so many seconds, until the device is done.
        """
        if timeout is not None:
            self.block(timeout)
        self._backend.join(self.flight)
        return self._result

    def is_completed(self) -> bool:
        """Return whether the device is done with it, or it failed."""
        return self._backend.has_ended(self.flight)

    def end_time(self) -> float | None:
        """Return when it was seen to have ended; see ``Work``."""
        return self.flight.ended

    def block(self, timeout: float = math.inf) -> None:
        """Block the host until it has ended, well or not, for at most ``timeout`` seconds.

        Raises:
            CollectiveTimeoutError: it has not; it goes on, and can be waited for again.
        """
        end = time.monotonic() + timeout
        while not self.is_completed():
            if not time.monotonic() < end:
                place = f"rank {self._backend.rank} of {self._backend.size}"
                raise limit_passed(f"[{self.flight.verb}] {place}", timeout)
            time.sleep(_INTERVAL)
