"""A pending operation (``Work``), and classes of operations that need no backend."""

import abc
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Sequence
from concurrent import futures
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Generic

from flashlight_py import errors
from flashlight_py.device import Array

if TYPE_CHECKING:
    from typing_extensions import TypeVar  # TypeVar of Python has ``default`` only since 3.13

    Result_co = TypeVar("Result_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    Result_co = TypeVar("Result_co", covariant=True)

# Errors of operations. Another exception during a wait comes from a signal handler.
FAILURES = errors.DistributedError, ValueError, MemoryError


class Work(abc.ABC, Generic[Result_co]):
    """An operation that was started with ``async_op=True``. The type parameter is its result type.

    Do not read or write the arrays of the operation until :meth:`wait` has returned.
    """

    source: int | None = None
    """For a receive: the rank in the group that sent the message, set when :meth:`wait` returns."""

    flight: Any = None  # for a GPU collective: an object with its end time
    is_settled = False  # True if the result is stored and ``wait`` raises no new error
    _end_time: float | None = None

    @abc.abstractmethod
    def wait(self, timeout: float | None = None) -> Result_co:
        """Block until the operation has ended, and return its result.

        Other Python threads run meanwhile, and Ctrl-C interrupts the wait. After ``timeout``
        seconds the call raises an error, but the operation continues. None: only the timeout of the
        group applies.

        Raises:
            CollectiveTimeoutError: If the operation has not ended after ``timeout`` seconds, or a
                rank does not join it within the timeout of the group.
            PeerLostError: If another rank exited or died.
            MismatchError: If the ranks made different calls.
            GroupClosedError: If the group was closed, or failed earlier.
        """

    @abc.abstractmethod
    def is_completed(self) -> bool:
        """Return whether the operation has ended, successfully or not. Does not block."""

    def __await__(self) -> Generator[Any, None, Result_co]:
        """Wait in a coroutine: ``await work`` returns the result, and other tasks run meanwhile."""
        if not self.is_completed():
            import asyncio

            ended: futures.Future[Result_co] = futures.Future()
            threading.Thread(target=_wait_for, args=(self, ended), daemon=True).start()
            yield from asyncio.wrap_future(ended)
        return self.wait()  # the caller's current GPU stream must wait, too

    def end_time(self) -> float | None:
        """Return the end time in seconds of ``time.monotonic``, or None if it is unknown."""
        return self._end_time

    def cancel(self) -> None:
        """Cancel a receive from any rank. The result of the receive is then None.

        Only backends call this, for receives that they have started themselves. No effect on other
        operations, or after a message has arrived.
        """

    def result(self) -> Result_co:
        """Return the result of an operation that has ended. Raises the errors of :meth:`wait`.

        Raises:
            RuntimeError: If the operation has not ended.
        """
        if not self.is_completed():
            raise RuntimeError("result() was called before the operation ended. Call wait() first.")
        return self.wait()


def _wait_for(work: Work, ended: futures.Future[Any]) -> None:
    if ended.set_running_or_notify_cancel():  # from now on, the task cannot cancel ``ended``
        try:
            ended.set_result(work.wait())
        except BaseException as failure:  # noqa: BLE001 - the awaiting task raises it
            ended.set_exception(failure)


def wait_timeout_error(where: str, timeout: float) -> errors.CollectiveTimeoutError:
    error = errors.CollectiveTimeoutError(
        f"{where}: still running after wait(timeout={timeout:g}) seconds. The operation continues. "
        "Call wait() again for its result."
    )
    error.goes_on = True
    return error


class Done(Work):
    def __init__(self, value: Any = None) -> None:
        self._value = value

    def wait(self, timeout: float | None = None) -> Any:
        return self._value

    def is_completed(self) -> bool:
        return True


class Then(Work):
    """An operation with the result ``finish(result of work)``.

    Only the first ``wait()`` calls ``finish``. Every ``wait()`` returns the same result or raises
    the same error.
    """

    def __init__(self, work: Work, finish: Callable[[Any], Any]) -> None:
        self._work = work
        self._finish: Callable[[Any], Any] | None = finish
        self._value: Any = None
        self._failure: BaseException | None = None  # error of ``finish``, raised by every wait
        self._making = threading.RLock()  # re-entrant: a signal handler may wait on the same thread
        self._is_made_now = False

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for ``work``, and return the result of ``finish``."""
        limit = threading.TIMEOUT_MAX if timeout is None else timeout
        end = time.monotonic() + limit
        try:
            value = self._work.wait(timeout)
        except FAILURES as failure:
            self.is_settled = not getattr(failure, "goes_on", False)  # goes_on: the work continues
            raise
        left = max(0, end - time.monotonic())
        if not self._making.acquire(timeout=min(left, threading.TIMEOUT_MAX)):
            raise wait_timeout_error("the result, which another thread computes", limit)
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
                "wait() in a signal handler: the handler interrupted the wait() that computes this "
                "result on the same thread. Call wait() after the handler has returned."
            )
        self._is_made_now = True
        try:
            self._value = finish(value)
        except BaseException as failure:
            self._failure = failure
            raise
        finally:
            self._finish = None
            self._is_made_now, self.is_settled = False, True

    def cancel(self) -> None:
        self._work.cancel()

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def end_time(self) -> float | None:
        return self._work.end_time()


def wait_for(works: list[Any]) -> None:
    """Wait for ``works`` and remove them. Raise the first failure; a later call raises the next.

    A GroupClosedError is raised last, because another failure may be its cause.
    """
    closed: errors.GroupClosedError | None = None
    for work in list(works):
        try:
            if not work.is_settled:
                work.wait()
        except errors.GroupClosedError as failure:
            closed = closed or failure
        with suppress(ValueError):  # another thread has removed ``work``
            works.remove(work)
    if closed is not None:
        raise closed


class AllOf(Work[list[Any]]):
    """Several operations as one. Its result is the list of their results."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = list(works)
        self._ended = 0  # number of leading works that have ended
        self._failure: Exception | None = None  # set when all works have ended

    def wait(self, timeout: float | None = None) -> list[Any]:
        """Wait at most ``timeout`` seconds for each operation, then raise like ``wait_for``."""
        if self._failure is not None:
            raise self._failure
        results: list[Any] = []
        failures: list[Exception] = []
        for work in self._works:
            try:
                results.append(work.wait(timeout))
            except (errors.DistributedError, ValueError) as failure:  # noqa: PERF203
                failures.append(failure)  # other operations still use their arrays: continue
        if not failures:
            return results
        first_failure = min(failures, key=lambda error: isinstance(error, errors.GroupClosedError))
        # An operation may end just after its wait timed out. Its next wait then returns the result.
        if self.is_completed() and not getattr(first_failure, "goes_on", False):
            self._failure = first_failure
        raise first_failure

    def is_completed(self) -> bool:
        ended = self._ended
        while ended < len(self._works) and self._works[ended].is_completed():
            ended += 1
        self._ended = ended
        return ended == len(self._works)

    def end_time(self) -> float | None:
        """Return the latest end time of the operations, or None if an end time is unknown."""
        times = [time for work in self._works if (time := work.end_time()) is not None]
        return max(times) if times and len(times) == len(self._works) else None


class SelfMessages:
    """Messages of a rank to itself: for each tag, unreceived messages and waiting receives."""

    def __init__(self) -> None:
        self._sent: defaultdict[int, deque[Array]] = defaultdict(deque)
        self._receives: defaultdict[int, deque[_Receive]] = defaultdict(deque)

    def send(self, array: Array, tag: int) -> Work:
        """Fill the oldest receive with this tag. If no receive waits, keep a copy of ``array``."""
        if self._receives[tag]:
            self._receives[tag].popleft().fill(array)
        else:
            self._sent[tag].append(array.copy())
        return Done(array)

    def recv(self, array: Array, tag: int, partial: bool = False) -> Work:
        """Fill ``array`` with the oldest message with this tag, or with the next that is sent."""
        receive = _Receive(array, tag, partial)
        if self._sent[tag]:
            receive.fill(self._sent[tag].popleft())
        else:
            self._receives[tag].append(receive)
        return receive


class _Receive(Work):
    def __init__(self, array: Array, tag: int, partial: bool) -> None:
        self._array, self._tag, self._partial = array, tag, partial
        self._is_completed = False
        self._error: str | None = (
            f"[irecv] this rank waits for a message from itself with tag {tag}, but has not sent "
            "one. Call isend before wait()."
        )

    def fill(self, sent: Array) -> None:
        """Store a message. If its shape or dtype is wrong, ``wait`` raises MismatchError."""
        array = self._array
        if self._partial and sent.ndim == array.ndim:
            array = self._array = array[: sent.shape[0]]
        if sent.shape == array.shape and sent.dtype == array.dtype:
            array[...] = sent
            self._error = None
        else:
            self._error = (
                f"[irecv] message of this rank to itself, tag {self._tag}: expected {array.dtype} "
                f"{array.shape}, got {sent.dtype} {sent.shape}. Pass equal shapes and dtypes."
            )
        self._is_completed = True

    def wait(self, timeout: float | None = None) -> Any:
        """Return the array. If this rank has sent no message, raise instead of blocking."""
        if self._error is not None:
            raise errors.MismatchError(self._error)
        return self._array

    def is_completed(self) -> bool:
        return self._is_completed
