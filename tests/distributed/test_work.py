"""Composed operations, and several threads or asyncio tasks that wait for one operation."""

import asyncio
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.distributed.backends.hierarchical import HierarchicalBackend
from flashlight_py.distributed.backends.mpi.backend import Operation
from flashlight_py.distributed.backends.native import NativeWork
from flashlight_py.distributed.calls import journal
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.calls.journal import Journal
from flashlight_py.distributed.verbs import BARRIER
from flashlight_py.distributed.work import AllOf, Done, Then, Work, wait_timeout_error
from flashlight_py.errors import (
    CollectiveTimeoutError,
    DistributedError,
    GroupClosedError,
    MismatchError,
)
from tests.distributed.conformance import on_ranks, ranks_in


class Fails(Work):
    """An operation that has failed. A real one would need ranks that differ at the right time."""

    def __init__(self, failure: Exception) -> None:
        self._failure = failure
        self.waited = False

    def wait(self, timeout: float | None = None) -> Any:
        self.waited = True
        raise self._failure

    def is_completed(self) -> bool:
        return True


@pytest.mark.parametrize("error", [MismatchError("second"), GroupClosedError("closed")])
def test_all_of_waits_for_all_works_and_raises_the_cause(error: DistributedError) -> None:
    last = Fails(error)
    with pytest.raises(MismatchError, match="the first"):
        AllOf([Done(1), Fails(MismatchError("the first")), last]).wait()
    assert last.waited
    with pytest.raises(CollectiveTimeoutError, match="late"):
        AllOf([Fails(GroupClosedError("closed")), Fails(CollectiveTimeoutError("late"))]).wait()
    with pytest.raises(type(error)):
        AllOf([Done(1), last]).wait()


class Slow:
    """Makes a result when it is allowed to, and counts the calls."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.began, self.may_end = threading.Event(), threading.Event()
        self.failure, self.calls = failure, 0

    def __call__(self, value: str) -> str:
        self.calls += 1
        self.began.set()
        assert self.may_end.wait(20)
        if self.failure is not None:
            raise self.failure
        return f"made of {value}"


def waits_of_two_threads(slow: Slow, release: Callable[[Then], None]) -> list[Any]:
    """Wait twice, the second time while the first wait makes the result; return both results."""
    work = Then(Done("it"), slow)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(work.wait)
        assert slow.began.wait(20)
        second = threads.submit(work.wait)
        release(work)
        slow.may_end.set()
        return [future.exception(20) or future.result() for future in (first, second)]


def test_then_makes_its_result_once_for_two_threads() -> None:
    slow = Slow()

    def release(work: Then) -> None:
        with pytest.raises(CollectiveTimeoutError, match="another thread"):
            work.wait(timeout=0.05)
        assert not work.is_settled

    assert waits_of_two_threads(slow, release) == ["made of it"] * 2
    assert slow.calls == 1


def test_then_raises_the_same_error_in_every_wait() -> None:
    failure = ValueError("no room")
    slow = Slow(failure)
    assert waits_of_two_threads(slow, lambda work: None) == [failure] * 2
    assert slow.calls == 1


class Interruption(Exception):
    """The exception of the signal handler below."""


@pytest.fixture
def interrupting() -> Any:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interruption

    before = signal.signal(signal.SIGUSR2, interrupt)
    yield lambda: signal.raise_signal(signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, before)


def test_then_returns_no_incomplete_result_after_a_signal(interrupting: Callable[[], None]) -> None:
    work = Then(Done(), lambda _: interrupting())
    for _ in range(2):
        with pytest.raises(Interruption):
            work.wait()
    assert work.is_settled


class Interrupted(Work):
    """An operation whose first wait a signal handler interrupts, like a native operation."""

    def __init__(self, interrupt: Callable[[], None]) -> None:
        self._interrupt: list[Callable[[], None]] = [interrupt]

    def wait(self, timeout: float | None = None) -> Any:
        while self._interrupt:
            self._interrupt.pop()()
        return "it"

    def is_completed(self) -> bool:
        return not self._interrupt


def test_wait_can_be_repeated_after_a_handler_raised(interrupting: Callable[[], None]) -> None:
    work = Then(Interrupted(interrupting), lambda value: f"made of {value}")
    with pytest.raises(Interruption):
        work.wait()
    assert not work.is_settled
    assert work.wait() == "made of it"


def test_wait_in_a_handler_raises_for_the_interrupted_work() -> None:
    outputs: list[str] = []

    def handle(number: int, frame: FrameType | None) -> None:
        with pytest.raises(RuntimeError, match="signal handler") as caught:
            work.wait()
        outputs.append(str(caught.value))

    work = Then(Done(), lambda _: signal.raise_signal(signal.SIGUSR2))
    before = signal.signal(signal.SIGUSR2, handle)
    try:
        work.wait()
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert outputs


class EndsAtLimit(Work):
    """Has ended successfully before its first wait reports the timeout."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure or wait_timeout_error("send", 0.0)

    def wait(self, timeout: float | None = None) -> Any:
        if timeout is None:
            return "arrived"
        raise self.failure

    def is_completed(self) -> bool:
        return True


@pytest.mark.parametrize("goes_on", [True, False])
def test_hierarchical_group_ends_only_if_the_operation_has_failed(goes_on: bool) -> None:
    ended: list[DistributedError] = []
    work = EndsAtLimit(
        wait_timeout_error("late", 0.0) if goes_on else CollectiveTimeoutError("late")
    )
    owner: Any = SimpleNamespace(end=ended.append, _is_closed=False)
    with pytest.raises(CollectiveTimeoutError, match="late"):
        HierarchicalBackend.guarded(owner, "send", lambda: work.wait(0.0))
    assert len(ended) == (not goes_on)


def test_wait_timeout_is_not_recorded_as_a_failure() -> None:
    journal = Journal("test", [0], "nothing")
    work = journal.run([Call(BARRIER, blocking=False)], "barrier", EndsAtLimit)
    with pytest.raises(CollectiveTimeoutError):
        work.wait(0.0)
    assert work.wait() == "arrived"
    (record,) = journal.records()
    assert record.ended
    assert not record.error


def test_all_of_returns_its_results_after_a_wait_has_timed_out() -> None:
    work = AllOf([Done(1), EndsAtLimit()])
    with pytest.raises(CollectiveTimeoutError):
        work.wait(0.0)
    assert work.wait() == [1, "arrived"]


class FakeReplacedResult(NativeWork):
    """Another thread replaces the result function after its first read."""

    _forks, _backend = journal.forks, MagicMock()
    _lib, _status = SimpleNamespace(FL_PENDING=1, FL_OK=0), lambda *_: 0
    _reads = iter([lambda _: [1]])
    _result = property(lambda self: next(self._reads, [1]), lambda *_: None)


def test_two_threads_may_wait_for_one_result() -> None:
    assert object.__new__(FakeReplacedResult).wait() == [1]


@pytest.mark.parametrize("goes_on", [True, False])
def test_comparison_is_the_cause_only_if_it_has_failed(goes_on: bool) -> None:
    operation = Operation(SimpleNamespace(rank_text="a rank"), "send", 1.0)  # type: ignore[arg-type]
    late = wait_timeout_error("late", 0.0) if goes_on else CollectiveTimeoutError("late")
    operation.comparison = EndsAtLimit(late)
    assert operation.cause() is (None if goes_on else late)


# Large enough that threads wake up during the reduction and the copy.
SIDE = 300
ROUNDS = 5

ranks = ranks_in(("gloo", 3), ("shm", 3), slow=[("hierarchical", 5), ("mpi", 3)])


@on_ranks()
def test_all_of_returns_the_complete_result_to_two_threads(rank: int, size: int) -> None:
    total = size * (size + 1) / 2
    with ThreadPoolExecutor(2) as threads:
        for _ in range(ROUNDS):
            strided = np.full((SIDE, SIDE), rank + 1.0).T[::2]
            work = fl.all_reduce(strided, async_op=True)

            def reduced(work: Any = work) -> float:
                return float(work.wait().min())  # the result must be complete by then

            waits = [threads.submit(reduced) for _ in range(2)]
            assert [wait.result(30) for wait in waits] == [total] * 2

            pair = [np.full((SIDE, SIDE), rank + 1.0).T[::2], np.full(7, rank + 1.0)]
            several = fl.all_reduce_multiple(pair, async_op=True, contiguous=True)

            def both_reduced(work: Any = several) -> list[float]:
                return [float(x.min()) for x in work.wait()]

            waits_of_both = [threads.submit(both_reduced) for _ in range(2)]
            assert [wait.result(30) for wait in waits_of_both] == [[total] * 2] * 2

            gathered = fl.all_gather(np.full(SIDE, rank), async_op=True)
            results = [
                wait.result(30) for wait in [threads.submit(gathered.wait) for _ in range(2)]
            ]
            assert all(np.array_equal(x, np.repeat(np.arange(size), SIDE)) for x in results)


async def await_while_other_tasks_run(rank: int, size: int) -> None:
    total, strided = size * (size + 1) / 2, np.full((SIDE, SIDE), rank + 1.0).T[::2]
    if rank:  # the last rank joins after a message that rank 0 sends while it awaits
        if rank == size - 1:
            fl.recv(np.empty(1), 0)
        assert (await fl.all_reduce(strided, async_op=True)).min() == total
    else:
        reduced = asyncio.ensure_future(fl.all_reduce(strided, async_op=True))
        await asyncio.sleep(0)
        assert not reduced.done()
        fl.send(np.ones(1), size - 1)
        assert (await reduced) is strided
        assert strided.min() == total
    every = [fl.all_gather(np.full(k, rank), async_op=True) for k in range(1, 6)]
    gathered = await asyncio.gather(*every)
    assert [len(x) for x in gathered] == [size * k for k in range(1, 6)]
    work = fl.irecv(np.empty(1), (rank - 1) % size)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(work, 0.01)
    fl.barrier()
    fl.isend(np.array([float(rank)]), (rank + 1) % size)
    assert await work == (rank - 1) % size
    with pytest.raises(fl.errors.MismatchError):
        await fl.all_reduce(np.ones(rank + 1), async_op=True)


@on_ranks()
def test_await_does_not_block_the_event_loop(rank: int, size: int) -> None:
    asyncio.run(await_while_other_tasks_run(rank, size))
