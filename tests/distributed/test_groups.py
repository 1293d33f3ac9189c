"""Groups of some ranks: who is in them, what they may do at once, how they end."""

import dataclasses
import re

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.distributed.api.group import ProcessGroup
from tests.distributed.conformance import on_ranks, ranks_in

ranks = ranks_in(("gloo", 4), ("shm", 4), slow=[("hierarchical", 5), ("mpi", 4)])


def total(group: ProcessGroup, value: float) -> float:
    return float(fl.all_reduce(np.array([value]), group=group)[0])


@on_ranks()
def test_a_new_group_has_its_members_in_the_order_given(rank: int, size: int) -> None:
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
def test_a_split_is_by_color_then_key_then_rank(rank: int, size: int) -> None:
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
def test_a_group_can_be_made_of_a_groups_ranks_and_ends_with_it(rank: int, size: int) -> None:
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
    outer.close()  # closes the groups made of it
    if inner.is_member:
        with pytest.raises(fl.errors.GroupClosedError, match="closed"):
            inner.barrier()


@on_ranks()
def test_collectives_of_different_groups_are_in_flight_together(rank: int, size: int) -> None:
    """Collectives of three groups, begun in different orders by different ranks."""
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
def test_a_rank_outside_a_group_gets_a_clear_answer(rank: int, size: int) -> None:
    group = fl.new_group([0, 1])
    if group.is_member:
        return
    x = np.ones(2)
    for call in (
        lambda: group.all_reduce(x),
        group.barrier,
        lambda: group.broadcast_object(1),
        lambda: group.all_gather(x),
        lambda: group.new_group([0]),
        lambda: group.all_gather_object(1),
    ):
        with pytest.raises(ValueError, match=r"not in the group.*\[0, 1\].*is_member"):
            call()
    assert np.all(x == 1)
    group.close()


@on_ranks()
def test_wrong_lists_of_ranks_are_refused_before_anything_is_sent(rank: int, size: int) -> None:
    for members, match in (
        ([0, size], f"0 to {size - 1}; got {size}"),
        ([0, -1], "got -1"),
        ([1, 1], "twice"),
        ([], "at least one rank"),
    ):
        with pytest.raises(ValueError, match=match):
            fl.new_group(members)
    with pytest.raises(ValueError, match="color must be an integer"):
        fl.split("red")  # type: ignore[arg-type]
    fl.barrier()  # nothing was sent


@on_ranks()
def test_ranks_that_ask_for_different_groups_raise_on_every_rank(rank: int, size: int) -> None:
    with pytest.raises(fl.errors.MismatchError) as caught:
        fl.new_group([0, 1] if rank else [0, 2])
    fl.barrier()
    assert f"rank {rank} of {size}" in str(caught.value)
    assert "rank 0: new_group [0, 2]" in str(caught.value)
    assert "rank 1: new_group [0, 1]" in str(caught.value)


@on_ranks()
def test_a_closed_group_says_so_and_leaves_the_others_alone(rank: int, size: int) -> None:
    with fl.new_group([0, 1]) as group:
        pass
    if group.is_member:
        for call in (
            lambda: group.all_reduce(np.ones(2)),
            lambda: group.send(np.ones(2), 1 - rank),
            lambda: group.isend(np.ones(2), 1 - rank),
            lambda: group.gather_object(3),
        ):
            with pytest.raises(fl.errors.GroupClosedError, match=f"rank {rank} of 2"):
                call()
        group.close()
    assert re.search("closed|not a member", repr(group))
    assert total(fl.new_group(range(size)), 1.0) == size


@on_ranks()
def test_groups_come_and_go(rank: int, size: int) -> None:
    for _ in range(30):
        with fl.split(rank % 2) as group:
            assert total(group, 1.0) == group.size


@on_ranks()
def test_a_barrier_is_one_of_the_gpus_too(rank: int, size: int) -> None:
    """The GPUs' backend is that of the CPUs here, which counts: what is asked is who is asked."""
    group = fl.new_group(range(size))
    group._joiner = dataclasses.replace(group._joiner, join_gpus=lambda backend: backend)
    gpus = group.join_gpus()
    asked: list[str] = []
    start = gpus.start
    gpus.start = lambda call: (asked.append(call.name), start(call))[1]
    group.barrier()
    group.limit(20.0)
    group.barrier()
    assert asked == ["barrier"] * 2


@on_ranks(("gloo", 2), ("shm", 2), fresh=True)
def test_the_end_of_the_world_closes_its_groups(rank: int, size: int) -> None:
    group = fl.new_group(range(size))
    total(group, 1.0)
    fl.distributed_shutdown()
    with pytest.raises(fl.errors.GroupClosedError):
        group.barrier()
