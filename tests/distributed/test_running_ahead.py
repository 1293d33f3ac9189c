"""Ranks that return from a small collective before the others have called it."""

import contextlib
import os
import signal
import sys
import time
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.distributed.backends.nccl.comparing import ComparesAhead
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.constants import ReduceOp
from flashlight_py.distributed.groups.membership import of
from flashlight_py.distributed.verbs import ALL_REDUCE
from flashlight_py.errors import DistributedError, MismatchError
from tests.distributed.conformance import on_ranks
from tests.distributed.told import told, told_later


def in_both(size: int, **how: Any) -> Any:
    return on_ranks(("shm", size), ("gloo", size), **how)


# Over TCP what nobody waits for may lie in the kernel for 200 ms; what somebody does must not.
CALLS, LONGEST = 16, 0.1
COARSE = 6  # Linux's CLOCK_MONOTONIC_COARSE, which Python has no name for
# Each with the ranks that need nobody in it, and what all have afterwards.
VERBS: dict[str, Any] = {
    "broadcast": (fl.broadcast, lambda rank, root: rank == root),
    "scatter": (lambda x: fl.scatter(np.stack([x] * 3), 0), lambda rank, root: rank == root),
    "reduce": (fl.reduce, lambda rank, root: rank != root),
    "gather": (fl.gather, lambda rank, root: rank != root),
    "scan": (fl.scan, lambda rank, root: rank == 0),
}


@pytest.mark.parametrize("verb", VERBS)
@in_both(3)
def test_who_needs_nobody_does_not_wait(rank: int, size: int, verb: str) -> None:
    """Call before those who can call only after a message of this rank."""
    call, is_free = VERBS[verb]
    token = np.zeros(1)
    free = [r for r in range(size) if is_free(r, 0)]
    waiting = [r for r in range(size) if r not in free]
    if rank in waiting:
        for other in free:
            fl.recv(token, other)
    for _ in range(3):
        call(np.full(3, rank + 1.0))
    if rank in free:
        for other in waiting:
            fl.send(token, other)
    total = fl.all_reduce(np.full(3, rank + 1.0))
    assert np.all(total == size * (size + 1) / 2)


@pytest.mark.parametrize("differ", [False, True])
@on_ranks(("shm", 3), fresh=True)
def test_calls_that_are_compared_ahead_are_compared_when_a_rank_looks_back(
    rank: int, size: int, differ: bool
) -> None:
    """Make many calls that are compared ahead, the last of another op on rank 1 if they differ."""
    cpu, x, error = of(None).backend(), np.ones(3), ""
    assert isinstance(cpu, ComparesAhead)
    try:
        for n in range(100):
            op = ReduceOp.MAX if differ and rank == 1 and n == 99 else ReduceOp.SUM
            call = Call(ALL_REDUCE, x, op, compared=True, is_ahead=True, blocking=False)
            cpu.start(call).wait()
        while not cpu.look_back("all_reduce", 30.0):
            time.sleep(0)
    except MismatchError as mismatch:
        error = str(mismatch)
        with pytest.raises(MismatchError):
            fl.barrier()  # the next call that compares finds it too
    assert ("op=max" in error) == ("op=sum" in error) == differ


@on_ranks(("shm", 2), lost=1)
def test_a_look_back_in_a_group_that_has_ended_raises(rank: int, size: int) -> None:
    """Look back at a call that rank 1 does not make, in a group that has ended meanwhile."""
    cpu = of(None).backend()
    assert isinstance(cpu, ComparesAhead)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    cpu.start(Call(ALL_REDUCE, np.ones(3), compared=True, is_ahead=True, blocking=False))
    with pytest.raises(DistributedError):
        fl.all_reduce(np.ones(100_000))
    with pytest.raises(DistributedError, match="rank 1"):
        cpu.look_back("all_reduce", 30.0)


@in_both(3)
def test_many_calls_ahead_bring_what_was_given(rank: int, size: int) -> None:
    """More calls than a rank may be ahead, of all sizes; each brings what was given to it."""
    for n in range(300):
        x = np.full(1 + 37 * n % 700, n + 1000.0 * (rank == n % size))
        assert np.all(fl.broadcast(x, n % size) == n + 1000.0)
        parts = fl.gather(np.full(n % 5 * (1000 if n % 50 == 0 and rank == 1 else 1), float(rank)))
        if rank == 0:
            rows = [n % 5 * (1000 if n % 50 == 0 and r == 1 else 1) for r in range(size)]
            assert np.array_equal(parts, np.repeat(np.arange(float(size)), rows))


@in_both(3)
def test_who_gives_much_does_not_wait_for_who_has_run_ahead(rank: int, size: int) -> None:
    """One gives more than goes with a call; one gives nothing, and waits until the root has all."""
    token = np.zeros(1)
    began = time.monotonic()
    for n in range(CALLS):
        all_of_them = fl.gather(np.full(20_000 if rank == 1 else 0, float(n)))
        if rank == 0:
            assert np.array_equal(all_of_them, np.full(20_000, float(n)))
            fl.send(token, 2)
        if rank == 2:
            fl.recv(token, 0)
    assert time.monotonic() - began < CALLS * LONGEST


@in_both(3)
def test_the_next_call_names_the_earlier_one_and_its_lines(rank: int, size: int) -> None:
    x = np.full(3 if rank == 0 else 4, rank + 1.0)
    line = sys._getframe().f_lineno + 1
    now = told(lambda: fl.broadcast(x))
    assert (now == "") == (rank == 0)
    assert np.all(x == rank + 1)
    message = told_later()
    assert told_later() == ""
    assert "an earlier call of this group, 1 before this one: " in message
    for who, rows in (("rank 0", 3), ("ranks 1, 2", 4)):
        call = f"{who} called broadcast(float64 ({rows},), root=0) at "
        assert f"{call}distributed/test_running_ahead.py:{line}" in message, message
    assert "FLASHLIGHT_CHECKS=sync" in message


@on_ranks(("shm", 2), ("gloo", 2), fresh=True)
def test_a_shutdown_raises_what_nobody_was_told(rank: int, size: int) -> None:
    now = told(lambda: fl.broadcast(np.zeros(3 + rank)))
    later = told(fl.distributed_shutdown)
    assert later
    assert "rank 0 called broadcast(float64 (3,), root=0)" in (now or later)


@in_both(3)
def test_what_was_given_arrives_when_its_giver_has_left(rank: int, size: int) -> None:
    """Give, and be gone before the others take it."""
    group = fl.new_group(range(size))
    token = np.zeros(1)
    if rank == 0:
        for n in range(3):
            group.broadcast(np.full(3, n + 1.0))
        group.close()
        for other in range(1, size):
            fl.send(token, other)
    else:
        fl.recv(token, 0)
        for n in range(3):
            assert np.all(group.broadcast(np.zeros(3)) == n + 1)
        with pytest.raises(fl.errors.DistributedError):
            group.all_reduce(token)
        with contextlib.suppress(fl.errors.DistributedError):
            group.close()
    fl.barrier()


@pytest.mark.parametrize("verb", ["broadcast", "scatter"])
@in_both(3)
def test_all_ranks_go_on_after_refusals_of_a_root(rank: int, size: int, verb: str) -> None:
    """Refuse calls on the root, which every rank catches, and go on."""
    call = {"broadcast": fl.broadcast, "scatter": lambda x: fl.scatter(x if rank == 0 else None)}
    for times in (1, 2, 3, 20):
        for _ in range(times):
            with pytest.raises(TypeError if rank == 0 else MismatchError):
                fl.broadcast("text" if rank == 0 else np.ones(3))  # type: ignore[type-var]
        for n in range(3):
            x = call[verb](np.full((size, 2), 5.0 + n) if rank == 0 else np.zeros((size, 2)))
            assert np.all(x == 5 + n)
        assert fl.all_reduce(1) == size


@pytest.mark.parametrize("verb", VERBS)
@in_both(3)
def test_a_call_that_raises_for_an_earlier_one_gives_nothing(
    rank: int, size: int, verb: str
) -> None:
    """Differ in a call from which the root returns, and see which later calls raise."""
    call = VERBS[verb][0]
    told(lambda: fl.broadcast(np.zeros(3 + (rank > 0))))
    fl.send(np.zeros(1), (rank + 1) % size)  # all have called
    fl.recv(np.zeros(1), (rank - 1) % size)
    errors = [told(lambda: call(np.full(3, rank + 1.0))) for _ in range(40)]
    assert told_later() == ""  # all have been told
    numbers, message = [n for n, error in enumerate(errors) if error], "".join(errors)
    of_root = fl.broadcast_object(numbers)
    assert len(of_root) == 1
    if rank > 0 and verb in ("reduce", "gather"):  # the root needs the others, they do not need it
        assert numbers == []
    else:
        assert numbers == of_root
        assert "called different things in an earlier call of this group" in message


def tell(sender: int, receiver: int, rank: int) -> None:
    """Let ``receiver`` go on only when ``sender`` has come so far."""
    if rank in (sender, receiver):
        message = np.zeros(1)
        fl.send(message, receiver) if rank == sender else fl.recv(message, sender)


@in_both(3)
def test_ranks_that_need_a_withdrawn_call_raise_the_earlier_mismatch_once(
    rank: int, size: int
) -> None:
    """Rank 0 raises a mismatch that rank 1, which waits for its call, has not been told either."""
    if rank == 2:
        tell(1, 2, rank)
    assert (told(lambda: fl.scan(np.zeros(3 + (rank == 2)))) != "") == (rank == 2)
    if rank == 1:
        work = fl.broadcast(np.ones(5), async_op=True)
        tell(1, 2, rank)
        tell(1, 0, rank)
        message = told(work.wait)
    else:
        tell(1, 0, rank)
        tell(2, 0, rank)
        tick = time.clock_gettime(COARSE)
        while time.clock_gettime(COARSE) == tick:
            pass  # a call in the same tick as the one before compares earlier ones behind it
        message = told(lambda: fl.broadcast(np.ones(5)))
    assert "an earlier call of this group, 1 before this one: " in message
    assert "rank 2 called scan(float64 (4,)" in message
    assert told_later() == ""  # all have been told


@in_both(2)
def test_each_of_two_earlier_mismatches_is_raised(rank: int, size: int) -> None:
    """Rank 1 makes the second of two wrong calls after the root has raised the first."""
    raised = []

    def call(count: int) -> None:
        raised.append(told(lambda: fl.broadcast(np.zeros(count))) != "")

    if rank == 0:
        call(1)
        call(1)
        tell(0, 1, rank)
        tell(1, 0, rank)
        time.sleep(0.05)  # a call in the same tick of the clock compares earlier ones behind it
        call(1)
        tell(0, 1, rank)
    else:
        tell(0, 1, rank)
        call(2)
        tell(1, 0, rank)
        tell(0, 1, rank)
        call(2)
        call(1)
    tell(1, 0, rank)
    for _ in range(10):
        call(3)
    assert told_later() == ""
    root, other = fl.all_gather_object(raised)
    assert root[:3] == [False, False, True]
    # A call in the same clock tick as the one before it leaves the second one to the next call.
    assert sorted(root[3:5]) == [False, True]
    assert not any(root[5:])
    assert other == [True, True, *root[2:]]


@in_both(3)
def test_a_gather_goes_on_after_an_earlier_mismatch(rank: int, size: int) -> None:
    """Rank 1 is many calls ahead of a gather in which rank 2 raises the earlier mismatch."""
    one, root = np.zeros(1), 2
    if rank == 1:
        tell(0, 1, rank)
    told(lambda: fl.broadcast(np.zeros(1 + (rank > 0)), 0))
    told(lambda: fl.broadcast(one, 0))
    if rank == 0:
        tell(0, 1, rank)
    if rank != 2:
        told(lambda: fl.gather(one, root))
    for n in range(7):
        if rank == 1 and n == 4:
            tell(2, 1, rank)
        if rank == 2 and n == 0:
            tell(2, 1, rank)
            tell(1, 2, rank)
            told(lambda: fl.gather(np.zeros(30_000), root))
        if rank == 1 and n == 6:
            tell(1, 2, rank)
        told(lambda: fl.broadcast(one, 1))
    told_later()
    for n in range(3):
        assert np.all(fl.all_reduce(np.full(60_000, rank + 1.0 + n)) == 6 + 3 * n)


@in_both(2)
def test_all_ranks_find_the_same_earlier_mismatches(rank: int, size: int) -> None:
    """The root waits for all in a scatter of 5 KB, and raises; another does not know its size."""
    told(lambda: fl.broadcast(np.zeros(3 + rank), 1))
    raised = told(lambda: fl.scatter(np.ones((size, 300)) if rank == 1 else None, 1))
    told_later()
    assert len(set(fl.all_gather_object(raised != ""))) == 1


def sync_on_rank_1(rank: int) -> dict[str, str]:
    return {"FLASHLIGHT_CHECKS": "sync"} if rank == 1 else {}


@in_both(3, env=sync_on_rank_1)
def test_one_rank_may_compare_each_call_at_once(rank: int, size: int) -> None:
    raised = told(lambda: fl.broadcast(np.zeros(3 + (rank > 0)))) != ""
    assert raised == (rank > 0)
    assert told(lambda: fl.all_reduce(np.full(40_000, 1.0))) != ""
    assert told_later() == ""
