"""Operations of a hierarchical backend that can be waited for."""

from __future__ import annotations

import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, Any

from flashlight_py.distributed.work import Work
from flashlight_py.errors import CollectiveTimeoutError, DistributedError, MismatchError

if TYPE_CHECKING:
    from flashlight_py.distributed.backends.hierarchical_messages import HierarchicalMessages


class FutureWork(Work):
    """An operation on the thread of a hierarchical backend."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future
        self.failure_reported = False
        self._end_time: float | None = None
        future.add_done_callback(self._note_end)

    def _note_end(self, _: Future[Any]) -> None:
        self._end_time = time.monotonic()

    def wait(self, timeout: float | None = None) -> Any:
        """Wait up to ``timeout`` seconds; see ``Work``."""
        try:
            return self._future.result(timeout)
        except FutureTimeout as error:
            if self._future.done():
                self.failure_reported = True
                raise  # the operation's own timeout
            raise CollectiveTimeoutError(
                f"still running after wait(timeout={timeout}) seconds; it goes on"
            ) from error
        except DistributedError:
            self.failure_reported = True
            raise

    def is_completed(self) -> bool:
        """Return whether it has ended."""
        return self._future.done()

    def end_time(self) -> float | None:
        """Return when it ended, if it has; see ``Work``."""
        return self._end_time


class GuardedWork(Work):
    """A message; what breaks the backend that carries it ends the others as well."""

    def __init__(self, work: Work, owner: HierarchicalMessages) -> None:
        self._work, self._owner = work, owner

    def wait(self, timeout: float | None = None) -> Any:
        """Wait up to ``timeout`` seconds; see ``Work``."""
        try:
            return self._work.wait(timeout)
        except DistributedError as error:
            group_lives = isinstance(error, MismatchError) and error.group_lives
            if self._work.is_completed() and not group_lives:
                self._owner.end(error)
            raise

    def is_completed(self) -> bool:
        """Return whether it has ended."""
        return self._work.is_completed()

    def end_time(self) -> float | None:
        """Return when it ended, if it has; see ``Work``."""
        return self._work.end_time()
