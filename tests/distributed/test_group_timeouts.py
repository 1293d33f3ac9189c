"""A timeout of a group's own bounds its collectives and messages, and no others."""

import time
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.distributed.start import initialize
from flashlight_py.distributed.start.world import current_world
from tests.distributed.conformance import on_ranks, ranks_in

SHORT, MOST = 0.3, 60.0  # seconds: the group's, and far less than the world's
LONG = (1e10, 1e300, float("inf"))  # more than clocks and locks have room for

ranks = ranks_in(("gloo", 3), ("shm", 3), slow=[("hierarchical", 3), ("mpi", 3)])


def waits_in_vain(group: Any, verb: str) -> None:
    """Wait for ranks that never come, until the group's timeout."""
    began, more = time.monotonic(), [(group.rank + 1) % group.size] if verb == "recv" else []
    late = fl.errors.CollectiveTimeoutError, fl.errors.MismatchError  # the others are in the world
    with pytest.raises(late, match=r"0\.\d+ seconds"):
        getattr(group, verb)(np.ones(3), *more)
    assert SHORT * 0.9 < time.monotonic() - began < MOST


@on_ranks()
def test_who_waits_in_a_group_waits_for_its_timeout(rank: int, size: int) -> None:
    made = [fl.new_group([2, 0, 1], timeout=SHORT), fl.split(0, timeout=np.float32(SHORT))]
    made.append(fl.new_group([0, 1], timeout=SHORT))
    made += [group.new_group([1, 0]) for group in made[:2]]  # those of a group have its timeout
    for group, verb in zip(made, ["all_reduce", "recv", "all_gather"] * 2, strict=False):
        if rank == group.ranks[0]:
            waits_in_vain(group, verb)
    assert fl.all_reduce(np.ones(2))[0] == size  # the world goes on
    for group in made:
        group.close()


@on_ranks()
def test_a_timeout_can_be_changed(rank: int, size: int) -> None:
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


@on_ranks(("gloo", 2), ("shm", 2), fresh=True)
def test_that_of_the_world_can_be_changed(rank: int, size: int) -> None:
    world = current_world().group
    world.limit(SHORT)
    if rank == 0:
        waits_in_vain(fl, "all_reduce")
    else:
        time.sleep(4 * SHORT)
    with pytest.raises(fl.errors.DistributedError):
        fl.all_reduce(np.ones(2))
    initialize.leave()


@on_ranks()
def test_ranks_pass_one_timeout(rank: int, size: int) -> None:
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


@on_ranks()
def test_a_timeout_may_be_as_long_as_one_likes(rank: int, size: int) -> None:
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


@on_ranks()
def test_a_wait_for_no_number_of_seconds_ends_at_once(rank: int, size: int) -> None:
    received = fl.irecv(np.zeros(1), (rank - 1) % size)
    with pytest.raises((fl.errors.CollectiveTimeoutError, ValueError)):
        received.wait(float("nan"))
    fl.barrier()
    fl.send(np.full(1, float(rank)), (rank + 1) % size)
    assert received.wait()[0] == (rank - 1) % size
