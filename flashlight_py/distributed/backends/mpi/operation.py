"""An operation that has been started: what is left of it to do, until when, and how it ended."""

from __future__ import annotations

import math
import time
from typing import Any, Protocol

from flashlight_py.distributed.backends.mpi.presence import RollCall
from flashlight_py.distributed.backends.mpi.progress import Progress, Steps
from flashlight_py.distributed.call_site import call_site
from flashlight_py.distributed.work import Work
from flashlight_py.errors import CollectiveTimeoutError

__all__ = ["Operation", "Owner"]


class Owner(Protocol):
    """The group that an operation belongs to."""

    progress: Progress
    place: str

    def interrupt(self, error: BaseException) -> None:
        """A wait has been ended from outside by ``error``."""


class Operation(Work):
    """``steps`` of an operation called ``name``, which may take ``seconds`` from its start on.

    A collective has a ``number``, from 1, once it has begun; a message has the rank of its
    ``peer``.
    """

    def __init__(
        self,
        owner: Owner,
        name: str,
        steps: Steps,
        seconds: float,
        peer: int | None = None,
        call: int = 0,
    ) -> None:
        self.name, self.seconds, self.peer = name, seconds, peer
        self.call = call  # its number, as users count; 0: not known
        self.where = f"[{name}] {owner.place}"
        self.site = call_site()
        self.steps = steps
        self.number = 0
        self.deadline = math.inf
        self.roll_call: RollCall | None = None
        self.grace: float | None = None  # until when a message of a rank that has left may end
        self.ended = False
        self.error: BaseException | None = None
        self.was_heard = False  # its failure has been told to somebody
        self._value: Any = None
        self._end_time: float | None = None
        self._owner = owner

    def begin(self, number: int) -> None:
        """Start the clock."""
        self.number = number
        self.deadline = time.monotonic() + self.seconds

    def end(self, value: Any) -> None:
        """It ended well."""
        self._end_time = time.monotonic()
        self._value, self.ended = value, True

    def fail(self, error: BaseException) -> None:
        """It broke; requests that MPI still works on are kept."""
        self.steps.close()
        self._end_time = time.monotonic()
        self.error, self.ended = error, True

    def wait(self, timeout: float | None = None) -> Any:
        """Wait up to ``timeout`` seconds; see ``Work``. Ctrl-C breaks the group."""
        end = None if timeout is None else time.monotonic() + timeout
        if not self.ended and not self._ends_until(end):
            raise CollectiveTimeoutError(
                f"{self.where}: still running after wait(timeout={timeout:g}) seconds; it goes "
                "on, and can be waited for again"
            )
        if self.error is not None:
            self.was_heard = True
            raise self.error
        return self._value

    def _ends_until(self, end: float | None) -> bool:
        try:
            return self._owner.progress.wait(lambda: self.ended, end)
        except BaseException as error:
            self._owner.interrupt(error)
            raise

    def is_completed(self) -> bool:
        """Return whether it has ended, after one look at everything that is under way."""
        if not self.ended:
            self._owner.progress.step()
        return self.ended

    def end_time(self) -> float | None:
        """Return when it ended, if it has; see ``Work``."""
        return self._end_time
