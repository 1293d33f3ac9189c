"""A pending operation, and the few forms it takes."""

from __future__ import annotations

import abc
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent import futures
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic

from flashlight_py.errors import CollectiveTimeoutError, DistributedError, GroupClosedError

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # Python's own has defaults from 3.13 on

    Result_co = TypeVar("Result_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    Result_co = TypeVar("Result_co", covariant=True)

# The failures of operations. Any other exception in a wait is that of a signal handler.
FAILURES = DistributedError, ValueError, MemoryError


class Work(abc.ABC, Generic[Result_co]):
    """An operation that was started with ``async_op=True``; type checkers know its result's type.

    The arrays given to it must not be read or written until :meth:`wait` has returned.
    """

    source: int | None = None
    """Of a receive: the rank in the group that has sent, once :meth:`wait` has returned."""

    flight: Any = None  # of a collective that a device does: has when it ``ended``
    is_heard = False  # a ``wait`` would raise nothing new, and the result has been made

    @abc.abstractmethod
    def wait(self, timeout: float | None = None) -> Result_co:
        """Block until the operation has ended, and return its result.

        Waiting releases the GIL and answers Ctrl-C. ``timeout`` (seconds, None: the group's own
        limit alone) bounds this wait only; the operation goes on.

        Raises:
            CollectiveTimeoutError: it has not ended after ``timeout`` seconds, or a rank did not
                join it within the group's timeout.
            PeerLostError: another rank is gone.
            MismatchError: the ranks called different things.
            GroupClosedError: the group was closed or broke before.
        """

    @abc.abstractmethod
    def is_completed(self) -> bool:
        """Return, without blocking, whether the operation has ended, well or not."""

    def __await__(self) -> Generator[Any, None, Result_co]:
        """Return what :meth:`wait` does, in ``await work``, while other tasks of asyncio go on."""
        if not self.is_completed():
            import asyncio

            ended: futures.Future[Result_co] = futures.Future()
            threading.Thread(target=_wait_for, args=(self, ended), daemon=True).start()
            yield from asyncio.wrap_future(ended)
        return self.wait()  # also has the caller's stream of a GPU wait

    def end_time(self) -> float | None:
        """Return when the operation ended, in seconds of ``time.monotonic``; None: not known."""
        return None

    def cancel(self) -> None:
        """End a receive from any rank that a backend has begun for itself: its result is None.

        Nothing happens where something has come, and to other operations, also those of users.
        """

    def result(self) -> Result_co:
        """Return the result of an operation that has ended; raises what :meth:`wait` raises.

        Raises:
            RuntimeError: it has not ended yet.
        """
        if not self.is_completed():
            raise RuntimeError("the operation has not ended yet; call wait() first")
        return self.wait()


def _wait_for(work: Work, ended: futures.Future[Any]) -> None:
    if ended.set_running_or_notify_cancel():  # from here on no task that ends cancels it
        try:
            ended.set_result(work.wait())
        except BaseException as failure:  # noqa: BLE001 - of the task that awaits it
            ended.set_exception(failure)


def limit_passed(where: str, timeout: float) -> CollectiveTimeoutError:
    """Return what a wait raises that was limited to ``timeout`` seconds, which have passed."""
    error = CollectiveTimeoutError(
        f"{where}: still running after wait(timeout={timeout:g}) seconds; it goes on, and can be "
        "waited for again"
    )
    error.goes_on = True
    return error


class Done(Work):
    """An operation that ended before it was asked about."""

    def __init__(self, value: Any = None) -> None:
        self._value = value

    def wait(self, timeout: float | None = None) -> Any:
        """Return the result at once; ``timeout`` (seconds) is never needed."""
        return self._value

    def is_completed(self) -> bool:
        return True


class Then(Work):
    """An operation whose result is made from another's, once, by the first who waits for it.

    Other threads that wait get that result, or the error with which making it has ended.
    """

    def __init__(self, work: Work, finish: Callable[[Any], Any]) -> None:
        self._work = work
        self._finish: Callable[[Any], Any] | None = finish
        self._value: Any = None
        self._failure: BaseException | None = None  # of making it: every wait raises the same
        self._making = threading.RLock()  # signal handlers run on the thread that holds it
        self._is_made_now = False

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the other operation (up to ``timeout`` seconds), finish, return the result.

        Raises:
            RuntimeError: called in a signal handler that has interrupted the making of the result.
        """
        limit = threading.TIMEOUT_MAX if timeout is None else timeout
        end = time.monotonic() + limit
        try:
            value = self._work.wait(timeout)
        except FAILURES as failure:
            self.is_heard = not getattr(failure, "goes_on", False)  # which is not final
            raise
        left = max(0, end - time.monotonic())
        if not self._making.acquire(timeout=min(left, threading.TIMEOUT_MAX)):
            raise limit_passed("another thread makes the result", limit)
        try:
            if self._finish is not None:
                self._make(self._finish, value)
            if self._failure is not None:
                raise self._failure
            return self._value
        finally:
            self._making.release()

    def _make(self, finish: Callable[[Any], Any], value: Any) -> None:
        if self._is_made_now:
            raise RuntimeError(
                "wait() in a signal handler: it has interrupted the wait that makes this result, "
                "on the same thread; wait for it after the handler"
            )
        self._is_made_now = True
        try:
            self._value = finish(value)
        except BaseException as failure:
            self._failure = failure
            raise
        finally:
            self._finish = None
            self._is_made_now, self.is_heard = False, True

    def cancel(self) -> None:
        self._work.cancel()

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def end_time(self) -> float | None:
        return self._work.end_time()


def wait_for(works: list[Any]) -> None:
    """Block until all ``works`` have ended, and empty the list; raises each failure once.

    A GroupClosedError is raised after all others: the failure of a later work may be its cause.
    """
    closed: GroupClosedError | None = None
    for work in list(works):
        try:
            if not work.is_heard:
                work.wait()
        except GroupClosedError as failure:
            closed = closed or failure
        with suppress(ValueError):  # another thread has removed it
            works.remove(work)
    if closed is not None:
        raise closed


class AllOf(Work[list[Any]]):
    """Several operations as one; the result is the list of their results."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = list(works)
        self._ended = 0  # so many, from the first on, need not be asked again
        self._failure: DistributedError | ValueError | None = None  # once all have ended

    def wait(self, timeout: float | None = None) -> list[Any]:
        """Wait for each in turn, up to ``timeout`` seconds each; then raise the first failure.

        Where one has closed the group, the others only follow: its failure is raised, not theirs.
        """
        if self._failure is not None:
            raise self._failure
        results: list[Any] = []
        failures: list[DistributedError | ValueError] = []
        for work in self._works:
            try:
                results.append(work.wait(timeout))
            except (DistributedError, ValueError) as failure:  # noqa: PERF203
                failures.append(failure)  # the others still use their arrays
        if not failures:
            return results
        found = min(failures, key=lambda failure: isinstance(failure, GroupClosedError))
        if self.is_completed():
            self._failure = found
        raise found

    def is_completed(self) -> bool:
        ended = self._ended
        while ended < len(self._works) and self._works[ended].is_completed():
            ended += 1
        self._ended = ended
        return ended == len(self._works)

    def end_time(self) -> float | None:
        """Return when the last of them ended, where all know; see ``Work``."""
        times = [time for work in self._works if (time := work.end_time()) is not None]
        return max(times) if times and len(times) == len(self._works) else None
