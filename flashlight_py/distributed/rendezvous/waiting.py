"""Says who is still missing while a start lasts, on rank 0."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection

from flashlight_py.distributed.rendezvous._peers import name_ranks

__all__ = ["Waiting"]

# When it is said first, and how often after that, in seconds.
FIRST_SECONDS, NEXT_SECONDS = 10.0, 30.0

_log = logging.getLogger("flashlight_py")


class Waiting:
    """One wait of rank ``rank`` for others. Only rank 0 says anything."""

    def __init__(self, rank: int, how: str) -> None:
        self._speaks, self._how = rank == 0, how
        self._began = time.monotonic()
        self._due = self._began + FIRST_SECONDS

    def look(self, missing: Collection[int]) -> None:
        """Say who is ``missing``, if it is time to."""
        now = time.monotonic()
        if not self._speaks or now < self._due or not missing:
            return
        self._due += NEXT_SECONDS
        names, seconds = name_ranks(missing), now - self._began
        _log.warning("Still waiting for %s (%.0f s): %s", names, seconds, self._how)

    def until(self, deadline: float) -> float:
        """Return when to look again, at the latest: a time of ``time.monotonic``."""
        return min(deadline, self._due) if self._speaks else deadline
