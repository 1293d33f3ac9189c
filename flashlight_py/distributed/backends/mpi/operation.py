"""An operation: ranks compare what they call, then MPI moves the arrays."""

from __future__ import annotations

import contextlib
import inspect
import math
import time
from typing import TYPE_CHECKING, Any

from flashlight_py.distributed.backends.mpi.progress import Steps
from flashlight_py.distributed.work import Work, limit_passed
from flashlight_py.errors import CollectiveTimeoutError, DistributedError, PeerLostError

if TYPE_CHECKING:
    from flashlight_py.distributed.backends.mpi.group import Group

# How often a rank that waits for MPI looks whether the others still work.
_LOOK_SECONDS = 0.05
# So long an operation of a CPU backend that is closed may take to end.
_ENDING_SECONDS = 0.5


class Operation(Work):
    """An operation called ``name``, its ``steps``, and the ``comparison`` that is first of them.

    What MPI does after it may take ``seconds``.
    """

    steps: Steps

    def __init__(self, group: Group, name: str, seconds: float) -> None:
        self.name, self.seconds = name, seconds
        self.comparison: Work | None = None
        self.is_moving = False  # MPI works on it, or has
        self.ended = False
        self.error: BaseException | None = None
        self.was_raised = False  # somebody knows of its failure
        self._look_at = self.deadline = math.inf
        self._value: Any = None
        self._end_time: float | None = None
        self._group = group

    def begin(self) -> None:
        """Let MPI begin: start the clock."""
        now = time.monotonic()
        self.is_moving = True
        self.deadline = now + self.seconds
        self._look_at = min(now + _LOOK_SECONDS, self.deadline)

    def should_look(self) -> bool:
        """Return whether it is time to see what the others do; once in a while."""
        now = time.monotonic()
        if now < self._look_at:
            return False
        self._look_at = min(now + _LOOK_SECONDS, self.deadline)
        return True

    def end(self, value: Any) -> None:
        """It ended well."""
        if self.ended:  # a signal handler has closed the group meanwhile
            return
        self._end_time = time.monotonic()
        self._value, self.ended = value, True

    def fail(self, error: BaseException) -> None:
        """It broke; requests that MPI still works on are kept."""
        if self.ended:
            return
        if inspect.getgeneratorstate(self.steps) != inspect.GEN_RUNNING:
            self.steps.close()  # else this is a signal handler, which has interrupted it
        self._end_time = time.monotonic()
        self.error, self.ended = error, True

    def compare_for(self, seconds: float | None) -> None:
        """Wait until the calls are compared, for ``seconds`` at most, if that is not None."""
        if self.comparison is not None and not self.ended:
            with contextlib.suppress(DistributedError):  # its next step raises it, or it goes on
                self.comparison.wait(seconds)

    def cause(self) -> DistributedError | None:
        """Return what other ranks have done where the comparison has failed, which ends soon."""
        try:
            if self.comparison is not None:
                self.comparison.wait(_ENDING_SECONDS)
        except (PeerLostError, CollectiveTimeoutError) as error:
            return None if error.goes_on else error
        except DistributedError:
            return None  # it was closed as well, or has failed by itself
        return None

    def wait(self, timeout: float | None = None) -> Any:
        """Wait up to ``timeout`` seconds; see ``Work``. Ctrl-C breaks the group."""
        end = None if timeout is None else time.monotonic() + timeout
        try:
            in_time = self.ended or self._group.progress.wait(self, end)
        except BaseException as error:
            self._group.interrupt(self, error)
            raise
        if timeout is not None and not in_time:
            raise limit_passed(f"[{self.name}] {self._group.place}", timeout)
        if self.error is not None:
            self.was_raised = True
            raise self.error
        return self._value

    def is_completed(self) -> bool:
        """Return whether it has ended, after one look at everything that is under way."""
        if not self.ended:
            self._group.progress.step()
        return self.ended

    def end_time(self) -> float | None:
        """Return when it ended, if it has; see ``Work``."""
        return self._end_time
