"""Ranks that return from a small collective before the other ranks have called it."""

import contextlib
import itertools
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.distributed import verbs
from flashlight_py.distributed.calls.call import ANY_RANK, Call, Matched
from flashlight_py.distributed.constants import ReduceOp
from flashlight_py.distributed.groups.membership import members_of
from flashlight_py.distributed.start.world import current_world
from flashlight_py.errors import DistributedError, MismatchError
from tests.distributed.conformance import (
    first_error,
    late_mismatch,
    mismatch_error,
    on_ranks,
    raises,
    ranks_in,
)


def in_both(size: int, **options: Any) -> Any:
    return on_ranks(("shm", size), ("gloo", size), native=True, **options)


# Over TCP, data without a waiting receiver may stay in the kernel for 200 ms.
CALLS, LONGEST = 16, 0.1
COARSE = 6  # Linux's CLOCK_MONOTONIC_COARSE, which Python does not define
# Each verb with the ranks that need no other rank, and the results of all ranks.
VERBS: dict[str, Any] = {
    "broadcast": (fl.broadcast, lambda rank, root: rank == root),
    "scatter": (lambda x: fl.scatter(np.stack([x] * 3), 0), lambda rank, root: rank == root),
    "reduce": (fl.reduce, lambda rank, root: rank != root),
    "gather": (fl.gather, lambda rank, root: rank != root),
    "scan": (fl.scan, lambda rank, root: rank == 0),
}


def tell(rank: int, *pairs: tuple[int, int]) -> None:
    """Of each pair, let the second rank continue after the first one has reached this line."""
    for sender, receiver in pairs:
        if rank == sender:
            fl.send(np.zeros(1), receiver)
        elif rank == receiver:
            fl.recv(np.zeros(1), sender)


@pytest.mark.parametrize("verb", VERBS)
@in_both(3)
def test_call_that_needs_no_other_rank_does_not_wait(rank: int, size: int, verb: str) -> None:
    """Call before ranks that can only call after a message of this rank."""
    call, is_free = VERBS[verb]
    free = [r for r in range(size) if is_free(r, 0)]
    pairs = [(sender, r) for sender in free for r in range(size) if r not in free]
    if rank not in free:
        tell(rank, *pairs)
    for _ in range(3):
        call(np.full(3, rank + 1.0))
    if rank in free:
        tell(rank, *pairs)
    assert np.all(fl.all_reduce(np.full(3, rank + 1.0)) == size * (size + 1) / 2)


def make_calls_ahead(op: ReduceOp) -> None:
    cpu = members_of(None).backend()
    assert cpu.look_back is not None
    for last in [ReduceOp.SUM] * 99 + [op]:
        call = Call(
            verbs.ALL_REDUCE, np.ones(3), last, compared=True, is_ahead=True, blocking=False
        )
        cpu.start(call).wait()
    while not cpu.look_back("all_reduce", 30.0):
        time.sleep(0)


@on_ranks(("shm", 3), fresh=True)
def test_look_back_compares_calls_made_ahead(rank: int, size: int) -> None:
    make_calls_ahead(ReduceOp.SUM)
    with raises(MismatchError, "op=max", "op=sum"):
        make_calls_ahead(ReduceOp.MAX if rank == 1 else ReduceOp.SUM)
    with pytest.raises(MismatchError):
        fl.barrier()  # the next compared call raises as well


@on_ranks(("shm", 2), lost=1)
def test_look_back_raises_after_the_group_has_ended(rank: int, size: int) -> None:
    """Rank 1 does not make the call, and the group has ended meanwhile."""
    cpu = members_of(None).backend()
    assert cpu.look_back is not None
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    cpu.start(Call(verbs.ALL_REDUCE, np.ones(3), compared=True, is_ahead=True, blocking=False))
    with pytest.raises(DistributedError):
        fl.all_reduce(np.ones(100_000))
    with pytest.raises(DistributedError, match="rank 1"):
        cpu.look_back("all_reduce", 30.0)


@in_both(3)
def test_many_calls_ahead_deliver_their_data(rank: int, size: int) -> None:
    """More calls than a rank may be ahead, of all sizes. Each delivers its data."""
    for n in range(1200):
        x = np.full(1 + 37 * n % 700, n + 1000.0 * (rank == n % size))
        assert np.all(fl.broadcast(x, n % size) == n + 1000.0)
        parts = fl.gather(np.full(n % 5 * (1000 if n % 50 == 0 and rank == 1 else 1), float(rank)))
        if rank == 0:
            rows = [n % 5 * (1000 if n % 50 == 0 and r == 1 else 1) for r in range(size)]
            assert np.array_equal(parts, np.repeat(np.arange(float(size)), rows))


@in_both(3)
def test_large_send_does_not_wait_for_a_rank_that_ran_ahead(rank: int, size: int) -> None:
    """One rank sends more data than the first message holds. One rank sends nothing."""
    began = time.monotonic()
    for n in range(CALLS):
        all_of_them = fl.gather(np.full(20_000 if rank == 1 else 0, float(n)))
        assert rank or np.array_equal(all_of_them, np.full(20_000, float(n)))
        tell(rank, (0, 2))
    assert time.monotonic() - began < CALLS * LONGEST


@in_both(3)
def test_next_call_names_the_earlier_mismatch_and_its_call_sites(rank: int, size: int) -> None:
    x = np.full(3 if rank == 0 else 4, rank + 1.0)
    line = sys._getframe().f_lineno + 1
    now = mismatch_error(lambda: fl.broadcast(x))
    assert (now == "") == (rank == 0)
    assert np.all(x == rank + 1)
    message = late_mismatch()
    assert late_mismatch() == ""
    assert "an earlier call of this group, 1 before this one: " in message
    for who, rows in (("rank 0", 3), ("ranks 1, 2", 4)):
        call = f"{who} called broadcast(float64 ({rows},), root=0) at "
        assert f"{call}distributed/test_running_ahead.py:{line}" in message, message
    assert "FLASHLIGHT_CHECKS=sync" in message


@on_ranks(("shm", 2), ("gloo", 2), fresh=True, native=True)
def test_shutdown_raises_an_unreported_mismatch(rank: int, size: int) -> None:
    now = mismatch_error(lambda: fl.broadcast(np.zeros(3 + rank)))
    later = mismatch_error(fl.distributed_shutdown)
    assert later
    assert "rank 0 called broadcast(float64 (3,), root=0)" in (now or later)


@in_both(3)
def test_data_arrives_after_its_sender_has_left(rank: int, size: int) -> None:
    """The sender ends before the other ranks receive."""
    group = fl.new_group(range(size))
    if rank == 0:
        for n in range(3):
            group.broadcast(np.full(3, n + 1.0))
        group.close()
    tell(rank, (0, 1), (0, 2))
    if rank:
        for n in range(3):
            assert np.all(group.broadcast(np.zeros(3)) == n + 1)
        with pytest.raises(fl.errors.DistributedError):
            group.all_reduce(np.zeros(1))
        with contextlib.suppress(fl.errors.DistributedError):
            group.close()
    fl.barrier()


def in_a_tree(rank: int) -> Any:
    """Return an array that the ranks of a broadcast over Gloo forward in a tree."""
    return np.full(2000, rank + 1.0)


@on_ranks(("gloo", 4), ("gloo", 7), native=True)
def test_tree_forwards_arrays_and_objects_of_every_root(rank: int, size: int) -> None:
    for n in range(100):
        root, text = n % size, "x" * 20_000 * (n % 5)
        assert np.all(fl.broadcast(in_a_tree(rank), root) == root + 1)
        assert fl.broadcast_object([n, text] if rank == root else None, root) == [n, text]
        if n % 7 == 0:
            assert fl.all_reduce(1) == size


@pytest.mark.parametrize("other", range(4))
@on_ranks(("gloo", 4), native=True)
def test_ranks_of_a_tree_raise_mismatches_of_every_rank(rank: int, size: int, other: int) -> None:
    """Rank 3 receives from rank 2, and ranks 1 and 2 from the root."""
    for count in (2001, 1):
        x = np.zeros(count) if rank == other else in_a_tree(rank)
        message = mismatch_error(lambda: fl.broadcast(x)) + late_mismatch()  # noqa: B023
        assert f"rank {other} called broadcast(float64 ({count},), root=0)" in message
        assert np.all(fl.broadcast(in_a_tree(rank)) == 1)


@on_ranks(("gloo", 4), native=True)
def test_data_of_a_tree_arrives_after_its_senders_have_left(rank: int, size: int) -> None:
    group = fl.new_group(range(size))
    if rank == 3:
        tell(rank, (0, 3), (1, 3), (2, 3))
    for _ in range(3):
        assert np.all(group.broadcast(in_a_tree(rank)) == 1)
    if rank != 3:
        group.close()
        tell(rank, (0, 3), (1, 3), (2, 3))
    fl.barrier()


@on_ranks(("gloo", 4), lost=2)
def test_rank_without_its_parent_in_a_tree_raises(rank: int, size: int) -> None:
    fl.broadcast(in_a_tree(rank))
    fl.barrier()  # a killed rank loses data that it has not sent
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    assert "rank 2" in first_error(*[lambda: fl.broadcast(in_a_tree(rank))] * 1000)


@on_ranks(("gloo", 4), fresh=True, params={"TIMEOUT": 1})
def test_ranks_of_a_tree_name_a_late_root(rank: int, size: int) -> None:
    fl.barrier()
    if rank == 0:
        time.sleep(1.5)
    error = first_error(lambda: fl.broadcast(in_a_tree(rank)), fl.barrier)
    assert error if rank == 0 else "rank 0" in error


@pytest.mark.parametrize("verb", ["broadcast", "scatter"])
@in_both(3)
def test_ranks_continue_after_a_root_rejects_its_arguments(rank: int, size: int, verb: str) -> None:
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
def test_call_that_raises_an_old_mismatch_sends_no_data(rank: int, size: int, verb: str) -> None:
    """Ranks differ in a call from which the root returns early. Check which later calls raise."""
    call = VERBS[verb][0]
    mismatch_error(lambda: fl.broadcast(np.zeros(3 + (rank > 0))))
    tell(rank, *itertools.permutations(range(size), 2))  # after the headers of all calls
    errors = [mismatch_error(lambda: call(np.full(3, rank + 1.0))) for _ in range(40)]
    assert late_mismatch() == ""  # all ranks have been notified
    numbers, message = [n for n, error in enumerate(errors) if error], "".join(errors)
    of_root = fl.broadcast_object(numbers)
    assert len(of_root) == 1
    if rank > 0 and verb in ("reduce", "gather"):  # the root needs the other ranks
        assert numbers == []
    else:
        assert numbers == of_root
        assert "made different calls in an earlier call of this group" in message


@in_both(3)
def test_withdrawn_call_raises_the_old_mismatch_once_on_other_ranks(rank: int, size: int) -> None:
    """Rank 1 waits for the call of rank 0 and has not been notified of the mismatch."""
    if rank == 2:
        tell(rank, (1, 2))
    assert (mismatch_error(lambda: fl.scan(np.zeros(3 + (rank == 2)))) != "") == (rank == 2)
    if rank == 1:
        work = fl.broadcast(np.ones(5), async_op=True)
        tell(rank, (1, 2), (1, 0))
        message = mismatch_error(work.wait)
    else:
        tell(rank, (1, 0), (2, 0))
        tick = time.clock_gettime(COARSE)
        while time.clock_gettime(COARSE) == tick:
            pass  # a call in the same clock tick compares earlier calls after itself
        message = mismatch_error(lambda: fl.broadcast(np.ones(5)))
    assert "an earlier call of this group, 1 before this one: " in message
    assert "rank 2 called scan(float64 (4,)" in message
    assert late_mismatch() == ""  # all ranks have been notified


@in_both(2)
def test_two_earlier_mismatches_are_both_raised(rank: int, size: int) -> None:
    """Rank 1 makes the second of two wrong calls after the root has raised the first."""
    raised = []

    def call(count: int) -> None:
        raised.append(mismatch_error(lambda: fl.broadcast(np.zeros(count))) != "")

    if rank == 0:
        call(1)
        call(1)
        tell(rank, (0, 1), (1, 0))
        time.sleep(0.05)  # a call in the same clock tick compares earlier calls after itself
        call(1)
        tell(rank, (0, 1))
    else:
        tell(rank, (0, 1))
        call(2)
        tell(rank, (1, 0), (0, 1))
        call(2)
        call(1)
    tell(rank, (1, 0))
    for _ in range(10):
        call(3)
    assert late_mismatch() == ""
    root, other = fl.all_gather_object(raised)
    assert root[:3] == [False, False, True]
    # A call in the same clock tick as the previous call leaves the second mismatch to the next
    # call.
    assert sorted(root[3:5]) == [False, True]
    assert not any(root[5:])
    assert other == [True, True, *root[2:]]


@in_both(3)
def test_gather_works_after_an_earlier_mismatch(rank: int, size: int) -> None:
    """Rank 1 is many calls ahead of a gather in which rank 2 raises the earlier mismatch."""
    one, root = np.zeros(1), 2
    if rank == 1:
        tell(rank, (0, 1))
    mismatch_error(lambda: fl.broadcast(np.zeros(1 + (rank > 0)), 0))
    mismatch_error(lambda: fl.broadcast(one, 0))
    if rank == 0:
        tell(rank, (0, 1))
    if rank != 2:
        mismatch_error(lambda: fl.gather(one, root))
    for n in range(7):
        if rank == 1 and n in (4, 6):
            tell(rank, (2, 1) if n == 4 else (1, 2))
        if rank == 2 and n == 0:
            tell(rank, (2, 1), (1, 2))
            mismatch_error(lambda: fl.gather(np.zeros(30_000), root))
        mismatch_error(lambda: fl.broadcast(one, 1))
    late_mismatch()
    for n in range(3):
        assert np.all(fl.all_reduce(np.full(60_000, rank + 1.0 + n)) == 6 + 3 * n)


@in_both(2)
def test_all_ranks_raise_the_same_earlier_mismatches(rank: int, size: int) -> None:
    """The root raises in a scatter of 5 KB. Another rank does not know its size."""
    mismatch_error(lambda: fl.broadcast(np.zeros(3 + rank), 1))
    raised = mismatch_error(lambda: fl.scatter(np.ones((size, 300)) if rank == 1 else None, 1))
    late_mismatch()
    assert len(set(fl.all_gather_object(raised != ""))) == 1


def sync_on_rank_1(rank: int) -> dict[str, str]:
    return {"FLASHLIGHT_CHECKS": "sync"} if rank == 1 else {}


@on_ranks(("shm", 3), slow=[("gloo", 3)], env=sync_on_rank_1, native=True)
def test_flashlight_checks_sync_may_be_set_on_one_rank(rank: int, size: int) -> None:
    raised = mismatch_error(lambda: fl.broadcast(np.zeros(3 + (rank > 0)))) != ""
    assert raised == (rank > 0)
    assert mismatch_error(lambda: fl.all_reduce(np.full(40_000, 1.0))) != ""
    assert late_mismatch() == ""


ranks = ranks_in(("shm", 4), ("gloo", 3), ("hierarchical", 4), native=True)


class OfGpu(SimpleNamespace):
    """Stands for a CuPy array. It has only a dtype and a shape."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def __getitem__(self, rows: slice) -> "OfGpu":
        return of_gpu(rows.stop, *self.shape[1:], dtype=self.dtype)


def of_gpu(*shape: int, dtype: Any = np.float32) -> Any:
    sizes = {"ndim": len(shape), "size": math.prod(shape)}
    return OfGpu(dtype=np.dtype(dtype), shape=shape, **sizes)


def compare(call: Call, blocking: bool) -> Any:
    backend = current_world().group.backend()
    return backend.start(replace(call, compared=True, blocking=blocking)).wait()


@contextlib.contextmanager
def stand_in() -> Iterator[None]:
    with mock.patch.dict(sys.modules, cupy=SimpleNamespace(ndarray=OfGpu)):
        yield


@pytest.mark.parametrize(
    ("ranks", "blocking"),
    [(("shm", 4), True), (("gloo", 3), False), (("hierarchical", 4), True)],
    indirect=["ranks"],
)
@on_ranks()
@stand_in()
def test_compared_calls_send_no_data_but_have_shapes(rank: int, size: int, blocking: bool) -> None:
    x = of_gpu(2 * size, 3)
    rows = [1] * (size - 1) + [size + 1]
    for call in (
        Call(verbs.ALL_REDUCE, x, ReduceOp.MAX),
        Call(verbs.REDUCE, x, root=1),
        Call(verbs.BROADCAST, x),
        Call(verbs.REDUCE_SCATTER, x, scale=0.5),
        Call(verbs.REDUCE_SCATTER, x, rows=rows),
        Call(verbs.ALL_TO_ALL, x),
        Call(verbs.BARRIER),
    ):
        assert compare(call, blocking) is None, call
    lengths = [r + 1 for r in range(size)]
    for call in (
        Call(verbs.ALL_GATHER, of_gpu(rank + 1, 3)),
        Call(verbs.GATHER, of_gpu(rank + 1, 3), root=1),
        Call(verbs.ALL_TO_ALL, of_gpu(rank + 1, 3), rows=[rank + 1] + [0] * (size - 1)),
    ):
        assert compare(call, blocking) == lengths, call
    parts = [of_gpu(5, dtype=np.int16)] * size if rank == 1 else None
    assert compare(Call(verbs.SCATTER, parts, root=1), blocking) == (np.dtype(np.int16), (5,))
    after, before = (rank + 1) % size, (rank - 1) % size
    backend = current_world().group.backend()
    calls = [Call(verbs.SEND, x, peer=after, tag=3), Call(verbs.RECV, x, peer=before, tag=3)]
    backend.start_many([replace(c, compared=True, blocking=blocking) for c in calls]).wait()
    sent = backend.start(Call(verbs.SEND, x[: rank + 1], peer=after, compared=True, blocking=False))
    got = compare(Call(verbs.RECV, x, peer=before, partial=True), blocking=True)
    assert got == Matched(before, before + 1)
    sent.wait()


@on_ranks()
def test_compared_message_has_the_same_number_on_both_ends(rank: int, size: int) -> None:
    """Twenty messages from rank 0 to the last rank, with several kinds of receives."""
    backend, x, numbers = current_world().group.backend(), np.zeros((3, 2)), []
    for i in range(20):
        results: list[int] = []
        call = Call(verbs.SEND, x, peer=size - 1)
        if rank == size - 1:
            call = Call(verbs.RECV, x, peer=ANY_RANK if i % 2 else 0, partial=i % 5 == 0)
        if rank in (0, size - 1):
            call = replace(call, compared=True, tag=i % 3, blocking=i % 4 > 1, received=results)
            backend.start(call).wait()
        numbers += results
    sent, *others, received = fl.all_gather_object(numbers)
    assert not any(others)
    assert sent == received
    assert len(set(sent)) == 20


@on_ranks()
def test_lost_returns_a_dead_rank_without_a_call(rank: int, size: int) -> None:
    """Rank 1 leaves two groups: one normally, and one when its program raises."""
    groups = [fl.new_group(range(size)) for _ in range(2)]
    left, broken = [group.backend() for group in groups]
    assert left.lost("wait") is broken.lost("wait") is None
    fl.barrier()
    if rank == 1:
        groups[0].close()
        broken.abort("ValueError: of rank 1\nTraceback ...")
    fl.barrier()
    end = time.monotonic() + 10.0
    while rank != 1 and broken.lost("wait") is None and time.monotonic() < end:
        time.sleep(0.01)
    lost, why = str(left.lost("wait")), str(broken.lost("all_reduce"))
    fl.barrier()
    rank_text = f"rank {rank} of {size}"
    closed = f"[wait] {rank_text}: the group is closed. Create it again"
    assert lost == (closed if rank == 1 else "None")
    end = "the group cannot be used any more" if rank == 1 else "lost rank 1"
    assert why.startswith(f"[all_reduce] {rank_text}: {end}")
    assert rank == 1 or "it raised ValueError: of rank 1" in why


@on_ranks()
@stand_in()
def test_compared_mismatch_raises_the_calls_on_every_rank(rank: int, size: int) -> None:
    x = of_gpu(4, 3)
    for other_call, words in (
        (Call(verbs.ALL_REDUCE, of_gpu(4, 2)), "all_reduce(cupy float32 (4, 2)"),
        (Call(verbs.ALL_REDUCE, np.zeros((4, 3), np.float32)), "called all_reduce(float32 (4, 3)"),
        (Call(verbs.ALL_REDUCE, x, ReduceOp.MAX), "op=max"),
        (Call(verbs.BROADCAST, x), "broadcast(cupy float32 (4, 3), root=0)"),
    ):
        with raises(MismatchError, "rank 0 called all_reduce(cupy float32 (4, 3)", words):
            compare(Call(verbs.ALL_REDUCE, x) if rank == 0 else other_call, blocking=True)
        compare(Call(verbs.ALL_REDUCE, x), blocking=True)  # the group remains usable
