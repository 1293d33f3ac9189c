"""Groups: members, concurrent operations, timeouts, and their end."""

import dataclasses
import re
import time
from functools import partial
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.distributed.api.group import ProcessGroup
from tests.distributed.conformance import on_ranks, raises, ranks_in

ranks = ranks_in(("gloo", 4), ("shm", 4), slow=[("hierarchical", 5), ("mpi", 4)])


def total(group: ProcessGroup, value: float) -> float:
    return float(fl.all_reduce(np.array([value]), group=group)[0])


@on_ranks()
def test_new_group_keeps_the_order_of_its_ranks(rank: int, size: int) -> None:
    with fl.new_group([3, 1]) as group:
        assert group.size == 2
        assert group.ranks == (3, 1)
        assert group.is_member == (rank in (1, 3))
        assert group.rank == {3: 0, 1: 1}.get(rank, -1)
        if group.is_member:
            assert total(group, rank) == 4.0
            gathered = fl.all_gather(np.array([rank]), group=group)
            assert gathered.tolist() == [3, 1]
            assert fl.broadcast_object(rank, root=0, group=group) == 3
    assert total(fl.new_group(range(size)), 1.0) == size


@on_ranks()
def test_split_orders_ranks_by_color_key_and_rank(rank: int, size: int) -> None:
    group = fl.split(rank % 2, key=-rank)
    expected = [r for r in range(size) if r % 2 == rank % 2][::-1]
    assert group.ranks == tuple(expected)
    assert total(group, 1.0) == len(expected)
    group.close()
    outside = fl.split(None if rank == 0 else 7)
    assert outside.is_member == (rank != 0)
    if rank != 0:
        assert outside.ranks == tuple(range(1, size))


@on_ranks()
def test_subgroup_ends_with_its_parent(rank: int, size: int) -> None:
    outer = fl.new_group([0, 2, 3])
    if not outer.is_member:
        return
    inner = outer.new_group([2, 0])  # ranks of the outer group: 3 and 0 of the world
    assert inner.ranks == (3, 0)
    if inner.is_member:
        assert total(inner, rank) == 3.0
        alone = inner.split(inner.rank)
        assert (alone.ranks, alone.size, alone.rank) == ((rank,), 1, 0)
        assert total(alone, 5.0) == 5.0
    outer.close()  # also closes its subgroups
    if inner.is_member:
        with pytest.raises(fl.errors.GroupClosedError, match="closed"):
            inner.barrier()


@on_ranks()
def test_collectives_of_different_groups_run_at_the_same_time(rank: int, size: int) -> None:
    everyone = fl.new_group(range(size))
    parity, half = fl.split(rank % 2), fl.split(int(rank < 2))
    begun = [(everyone, size), (parity, parity.size), (half, half.size)]
    for _ in range(20):
        arrays = [np.ones(50_000) for _ in begun]
        order = range(3) if rank % 2 else (2, 1, 0)
        works = [fl.all_reduce(arrays[i], async_op=True, group=begun[i][0]) for i in order]
        for work in works:
            work.wait()
        for array, (_, expected) in zip(arrays, begun, strict=True):
            assert np.all(array == expected)
    for group, _ in begun:
        group.close()


@on_ranks()
def test_group_raises_on_a_rank_that_is_no_member(rank: int, size: int) -> None:
    group = fl.new_group([0, 1])
    if group.is_member:
        return
    x, no_member = np.ones(2), r"member of the group of world ranks \[0, 1\].*is_member"
    for call in (
        *(partial(group.all_reduce, x), partial(group.all_gather, x), group.barrier),
        *(partial(group.broadcast_object, 1), partial(group.all_gather_object, 1)),
        partial(group.new_group, [0]),
    ):
        with pytest.raises(ValueError, match=no_member):
            call()
    assert np.all(x == 1)
    group.close()


@on_ranks()
def test_new_group_rejects_invalid_ranks_before_it_sends(rank: int, size: int) -> None:
    for members, match in (
        ([0, size], f"0 to {size - 1}, got {size}"),
        ([0, -1], "got -1"),
        ([1, 1], "duplicates"),
        ([], "at least one rank"),
    ):
        with pytest.raises(ValueError, match=match):
            fl.new_group(members)
    with pytest.raises(ValueError, match="color must be an integer"):
        fl.split("red")  # type: ignore[arg-type]
    fl.barrier()  # nothing was sent


@on_ranks()
def test_new_group_raises_on_every_rank_if_ranks_pass_different_lists(rank: int, size: int) -> None:
    words = f"rank {rank} of {size}", "rank 0: new_group [0, 2]", "rank 1: new_group [0, 1]"
    with raises(fl.errors.MismatchError, *words):
        fl.new_group([0, 1] if rank else [0, 2])
    fl.barrier()


@on_ranks()
def test_closed_group_raises_and_leaves_other_groups_usable(rank: int, size: int) -> None:
    with fl.new_group([0, 1]) as group:
        pass
    if group.is_member:
        for call, *args in (
            *((group.all_reduce, np.ones(2)), (group.gather_object, 3)),
            *((group.send, np.ones(2), 1 - rank), (group.isend, np.ones(2), 1 - rank)),
        ):
            with pytest.raises(fl.errors.GroupClosedError, match=f"rank {rank} of 2"):
                call(*args)
        group.close()
    assert re.search("closed|not a member", repr(group))
    assert total(fl.new_group(range(size)), 1.0) == size


@on_ranks()
def test_barrier_waits_for_the_gpus(rank: int, size: int) -> None:
    """The GPU backend is replaced by the CPU backend, which counts its calls."""
    group = fl.new_group(range(size))
    group._joiner = dataclasses.replace(group._joiner, join_gpus=lambda backend: backend)
    gpus = group.join_gpus()
    calls: list[str] = []
    start = gpus.start
    gpus.start = lambda call: (calls.append(call.name), start(call))[1]
    group.barrier()
    group.limit(20.0)
    group.barrier()
    assert calls == ["barrier"] * 2


SHORT, MOST = 0.3, 60.0  # seconds: the group's, and far less than the world's
LONG = (1e10, 1e300, float("inf"))  # beyond the range of clocks and locks

THREE = ("gloo", 3), ("shm", 3), ("hierarchical", 3), ("mpi", 3)
of_three = on_ranks(*THREE[:2], slow=THREE[2:])


def waits_in_vain(group: Any, verb: str) -> None:
    began, more = time.monotonic(), [(group.rank + 1) % group.size] if verb == "recv" else []
    late = fl.errors.CollectiveTimeoutError, fl.errors.MismatchError  # other ranks call the world
    with pytest.raises(late, match=r"0\.\d+ seconds"):
        getattr(group, verb)(np.ones(3), *more)
    assert SHORT * 0.9 < time.monotonic() - began < MOST


@on_ranks(THREE[1], slow=[THREE[0], *THREE[2:]])
def test_group_operations_use_the_timeout_of_the_group(rank: int, size: int) -> None:
    made = [fl.new_group([2, 0, 1], timeout=SHORT), fl.split(0, timeout=np.float32(SHORT))]
    made.append(fl.new_group([0, 1], timeout=SHORT))
    made += [group.new_group([1, 0]) for group in made[:2]]  # subgroups inherit the timeout
    for group, verb in zip(made, ["all_reduce", "recv", "all_gather"] * 2, strict=False):
        if rank == group.ranks[0]:
            waits_in_vain(group, verb)
    assert fl.all_reduce(np.ones(2))[0] == size  # the world works
    for group in made:
        group.close()


@on_ranks(THREE[0], slow=THREE[1:])
def test_group_limit_changes_its_timeout(rank: int, size: int) -> None:
    group = fl.new_group(range(size))
    group.limit(MOST)
    assert group.all_reduce(np.ones(2))[0] == size
    group.limit(SHORT)
    child = group.new_group(range(size))
    if rank == 0:
        waits_in_vain(child, "all_gather")
        waits_in_vain(group, "all_reduce")
    assert fl.all_reduce(np.ones(2))[0] == size
    group.close()


@of_three
def test_new_group_rejects_invalid_or_different_timeouts(rank: int, size: int) -> None:
    with pytest.raises(fl.errors.MismatchError, match=r"rank 1: new_group \[0, 1\], timeout=1\.0"):
        fl.new_group([0, 1], timeout=rank or None)
    with pytest.raises(fl.errors.MismatchError, match=r"rank 0: split; rank 1: split, timeout=1"):
        fl.split(0, timeout=rank or None)
    for timeout in (0, -1, "1", float("nan"), True):
        with pytest.raises(ValueError, match="timeout must be a positive number of seconds"):
            fl.new_group([0, 1], timeout=timeout)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="timeout must be a positive number of seconds"):
            fl.split(0, timeout=timeout)  # type: ignore[arg-type]
    assert fl.all_reduce(np.ones(2))[0] == size


@of_three
def test_timeout_may_exceed_the_range_of_clocks(rank: int, size: int) -> None:
    for timeout in LONG:
        with fl.new_group(range(size), timeout=timeout) as group:
            group.barrier(timeout)
            assert group.all_reduce(np.ones(3))[0] == size
            made = group.all_gather(np.ones((3, 2)).T, async_op=True)
            assert made.wait(timeout).shape == (2 * size, 3)
            pair = [np.ones(2), np.ones(3)]
            several = fl.all_reduce_multiple(pair, async_op=True, contiguous=True, group=group)
            assert several.wait(timeout)[1][0] == size
            received = group.irecv(np.zeros(1), (rank - 1) % size)
            group.send(np.full(1, float(rank)), (rank + 1) % size)
            assert received.wait(timeout)[0] == (rank - 1) % size


@of_three
def test_wait_with_nan_seconds_ends_at_once(rank: int, size: int) -> None:
    received = fl.irecv(np.zeros(1), (rank - 1) % size)
    with pytest.raises((fl.errors.CollectiveTimeoutError, ValueError)):
        received.wait(float("nan"))
    fl.barrier()
    fl.send(np.full(1, float(rank)), (rank + 1) % size)
    assert received.wait()[0] == (rank - 1) % size
