"""Operations made of others, and several threads, or tasks of asyncio, that wait for one.

Several operations as one: all are waited for, and the failure that shows the cause is raised.
A result that is made from another's: once, whoever waits, and nobody gets it half-made.
Works stand in for real ones, which meet the moments of these tests too rarely.
"""

import asyncio
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.distributed.backends.hierarchical import HierarchicalBackend
from flashlight_py.distributed.backends.mpi.backend import Operation
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
    """An operation that has failed; a real one needs ranks that differ at the right moment."""

    def __init__(self, failure: Exception) -> None:
        self._failure = failure
        self.waited = False

    def wait(self, timeout: float | None = None) -> Any:
        self.waited = True
        raise self._failure

    def is_completed(self) -> bool:
        return True


def test_all_are_waited_for_when_one_fails() -> None:
    last = Fails(MismatchError("the second"))
    with pytest.raises(MismatchError, match="the first"):
        AllOf([Done(1), Fails(MismatchError("the first")), last]).wait()
    assert last.waited


def test_what_closed_the_group_is_raised_and_not_what_followed() -> None:
    works = [Fails(GroupClosedError("closed")), Fails(CollectiveTimeoutError("late"))]
    with pytest.raises(CollectiveTimeoutError, match="late"):
        AllOf(works).wait()


def test_a_closed_group_is_reported_where_nothing_else_failed() -> None:
    with pytest.raises(GroupClosedError):
        AllOf([Done(1), Fails(GroupClosedError("closed"))]).wait()


class Slow:
    """Makes a result when it is allowed to, and counts how often."""

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
    """Wait twice, the second time while the first one makes the result; return what each got."""
    work = Then(Done("it"), slow)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(work.wait)
        assert slow.began.wait(20)
        second = threads.submit(work.wait)
        release(work)
        slow.may_end.set()
        return [future.exception(20) or future.result() for future in (first, second)]


def test_a_second_thread_waits_for_what_the_first_one_makes() -> None:
    slow = Slow()

    def release(work: Then) -> None:
        with pytest.raises(CollectiveTimeoutError, match="another thread"):
            work.wait(timeout=0.05)
        assert not work.is_settled

    assert waits_of_two_threads(slow, release) == ["made of it"] * 2
    assert slow.calls == 1


def test_a_result_that_cannot_be_made_fails_every_wait() -> None:
    failure = ValueError("no room")
    slow = Slow(failure)
    assert waits_of_two_threads(slow, lambda work: None) == [failure] * 2
    assert slow.calls == 1


class Interruption(Exception):
    """What the signal handler below raises."""


@pytest.fixture
def interrupting() -> Any:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interruption

    before = signal.signal(signal.SIGUSR2, interrupt)
    yield lambda: signal.raise_signal(signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, before)


def test_a_result_whose_making_a_signal_handler_ended_is_never_given_half_made(
    interrupting: Callable[[], None],
) -> None:
    work = Then(Done(), lambda _: interrupting())
    for _ in range(2):
        with pytest.raises(Interruption):
            work.wait()
    assert work.is_settled


class Interrupted(Work):
    """An operation whose first wait a signal handler ends, as a native one's."""

    def __init__(self, interrupt: Callable[[], None]) -> None:
        self._interrupt: list[Callable[[], None]] = [interrupt]

    def wait(self, timeout: float | None = None) -> Any:
        while self._interrupt:
            self._interrupt.pop()()
        return "it"

    def is_completed(self) -> bool:
        return not self._interrupt


def test_a_wait_that_a_signal_handler_ended_can_be_taken_up_again(
    interrupting: Callable[[], None],
) -> None:
    work = Then(Interrupted(interrupting), lambda value: f"made of {value}")
    with pytest.raises(Interruption):
        work.wait()
    assert not work.is_settled
    assert work.wait() == "made of it"


def test_a_handler_that_waits_for_what_it_has_interrupted_gets_an_error() -> None:
    said: list[str] = []

    def handle(number: int, frame: FrameType | None) -> None:
        with pytest.raises(RuntimeError, match="signal handler") as caught:
            work.wait()
        said.append(str(caught.value))

    work = Then(Done(), lambda _: signal.raise_signal(signal.SIGUSR2))
    before = signal.signal(signal.SIGUSR2, handle)
    try:
        work.wait()
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert said


# The limit of a wait passes just as the operation ends: it is no failure --------------------------


class EndsAtLimit(Work):
    """Has ended well by the time that its first wait reports the limit."""

    def __init__(self, failure: Exception | None = None) -> None:
        self.failure = failure or wait_timeout_error("send", 0.0)

    def wait(self, timeout: float | None = None) -> Any:
        if timeout is None:
            return "arrived"
        raise self.failure

    def is_completed(self) -> bool:
        return True


@pytest.mark.parametrize("goes_on", [True, False])
def test_hierarchical_group_ends_by_the_operation_alone(goes_on: bool) -> None:
    ended: list[DistributedError] = []
    work = EndsAtLimit(
        wait_timeout_error("late", 0.0) if goes_on else CollectiveTimeoutError("late")
    )
    owner: Any = SimpleNamespace(end=ended.append)
    with pytest.raises(CollectiveTimeoutError, match="late"):
        HierarchicalBackend.guarded(owner, "send", lambda: work.wait(0.0))
    assert len(ended) == (not goes_on)


def test_record_is_no_failure() -> None:
    journal = Journal("test", [0], "nothing")
    call = Call(BARRIER, blocking=False)
    work = journal.run([call], "barrier", EndsAtLimit)
    with pytest.raises(CollectiveTimeoutError):
        work.wait(0.0)
    assert work.wait() == "arrived"
    (record,) = journal.records()
    assert record.ended
    assert not record.error


@pytest.mark.parametrize("goes_on", [True, False])
def test_comparison_of_mpi_is_the_cause_by_itself_alone(goes_on: bool) -> None:
    operation = Operation(SimpleNamespace(rank_text="a rank"), "send", 1.0)  # type: ignore[arg-type]
    late = wait_timeout_error("late", 0.0) if goes_on else CollectiveTimeoutError("late")
    operation.comparison = EndsAtLimit(late)
    assert operation.cause() is (None if goes_on else late)


# On ranks: each thread, or task, gets its result, when it is there --------------------------------


# Large enough to be reduced and brought home while the threads wake up.
SIDE = 300
ROUNDS = 10

ranks = ranks_in(("gloo", 3), ("shm", 3), ("hierarchical", 5), ("mpi", 3))


@on_ranks()
def test_each_of_two_threads_gets_the_whole_result(rank: int, size: int) -> None:
    total = size * (size + 1) / 2
    with ThreadPoolExecutor(2) as threads:
        for _ in range(ROUNDS):
            strided = np.full((SIDE, SIDE), rank + 1.0).T[::2]
            work = fl.all_reduce(strided, async_op=True)

            def reduced(work: Any = work) -> float:
                return float(work.wait().min())  # at once: it must be all there by then

            waits = [threads.submit(reduced) for _ in range(2)]
            assert [wait.result(30) for wait in waits] == [total] * 2

            pair = [np.full((SIDE, SIDE), rank + 1.0).T[::2], np.full(7, rank + 1.0)]
            several = fl.all_reduce_multiple(pair, async_op=True, contiguous=True)

            def both_reduced(work: Any = several) -> list[float]:
                return [float(x.min()) for x in work.wait()]

            waits_of_both = [threads.submit(both_reduced) for _ in range(2)]
            assert [wait.result(30) for wait in waits_of_both] == [[total] * 2] * 2

            gathered = fl.all_gather(np.full(SIDE, rank), async_op=True)
            found = [wait.result(30) for wait in [threads.submit(gathered.wait) for _ in range(2)]]
            assert all(np.array_equal(x, np.repeat(np.arange(size), SIDE)) for x in found)


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
