"""Groups that are made of a group share its connections and threads, and nothing else."""

import contextlib
import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.errors import CollectiveTimeoutError, GroupClosedError, PeerLostError
from tests.distributed.conformance import in_places, on_ranks

# More than what fits into the kernel's memory of a connection; and what a lost rank may take.
LARGE, PROMPT = 4_000_000, 10.0


def by_both(size: int) -> Any:
    """Return a decorator of a test on new ranks, in shared memory and over TCP."""
    return on_ranks(("gloo", size), ("shm", size), fresh=True, params={"TIMEOUT": 30})


# So many pass on what they call, and are not all connected.
MANY = 12


def total(group: Any = None) -> int:
    return int(fl.all_reduce(np.ones(1, int), group=group)[0])


def goes_on(size: int) -> None:
    """Check that the world does: collectives, messages, large and small."""
    assert total() == size
    x = np.full(LARGE, 1.0)
    assert fl.all_reduce(x)[-1] == size
    rank = fl.get_world_rank()
    for count in (1, LARGE // 4):
        came = np.empty(count)
        fl.sendrecv(np.full(count, float(rank)), (rank + 1) % size, out=came, src=(rank - 1) % size)
        assert (came == (rank - 1) % size).all()


def tasks_and_descriptors() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


@by_both(4)
def test_groups_cost_no_threads_and_no_descriptors(rank: int, size: int) -> None:
    assert total() == size
    before = tasks_and_descriptors()
    groups = [fl.new_group(range(size)) for _ in range(200)]
    halves = [group.split(rank % 2, rank) for group in groups[:10]]
    for group in (*groups, *halves):
        assert total(group) == group.size
        came, after, ahead = np.empty(1, int), group.rank + 1, group.rank - 1
        group.sendrecv(np.array([group.rank]), after % group.size, out=came, src=ahead % group.size)
        assert came[0] == ahead % group.size
    tasks, descriptors = tasks_and_descriptors()
    assert tasks == before[0]
    assert descriptors <= before[1] + size - 1  # of each other process one, at the first long wait
    for group in groups:  # a thread that has done its call is in use until it runs again
        assert group.all_reduce(np.ones(1, int), async_op=True).wait()[0] == size
    assert tasks_and_descriptors()[0] <= before[0] + 10
    for group in groups[::2]:
        group.close()
    assert all(total(group) == size for group in groups[1::2])


@by_both(3)
def test_what_is_late_for_a_closed_group_does_not_disturb_others(rank: int, size: int) -> None:
    """What comes for a group that a rank has closed, or was to go out of it, is in nobody's way."""
    for count in (3, LARGE):
        group = fl.new_group(range(size))
        works = [group.isend(np.ones(count), (rank + 1) % size, tag=tag) for tag in range(5)]
        works.append(group.all_reduce(np.ones(count), async_op=True) if rank else works[0])
        works.append(group.irecv(np.ones(count), (rank - 1) % size, tag=9))
        if rank == 1:
            group.irecv(np.ones(count), 0)
        time.sleep(0.01 * (rank % 3))
        group.close()
        for work in works:
            with contextlib.suppress(PeerLostError, GroupClosedError):  # or it was in time
                work.wait()
        goes_on(size)


@by_both(3)
def test_a_group_that_is_closed_while_it_sends_sends_nothing_else(rank: int, size: int) -> None:
    """Its array is filled with something else at once: none of that may arrive as the array.

    Where it is read from the sender's memory some may be in one that has not arrived.
    """
    is_read = fl.distributed_backend() is fl.DistributedBackend.SHM
    for seconds in (0.0, 0.003, 0.01, 0.03):
        group = fl.new_group(range(size))
        x, y = np.full(2 * LARGE, 1.0), np.full(2 * LARGE, -1.0)
        if rank == 0:
            group.isend(x, 1)
            time.sleep(seconds)
            group.close()
            x.fill(np.nan)
        else:
            work = group.irecv(y, 0) if rank == 1 else group.irecv(y, 1)
            if rank == 1:
                try:
                    work.wait()
                    assert (y == 1).all()
                except PeerLostError:
                    assert is_read or not np.isnan(y).any()
                group.close()
            else:
                with pytest.raises(PeerLostError):
                    work.wait()
        goes_on(size)


@by_both(3)
def test_who_waits_in_a_group_for_one_that_closes_it_raises(rank: int, size: int) -> None:
    group = fl.new_group([2, 1, 0])
    assert total(group) == size
    if rank == 1:
        time.sleep(0.2)
        group.close()
    else:
        began = time.monotonic()
        with pytest.raises(
            PeerLostError, match=r"lost rank 1.*ended normally or closed this group"
        ):
            group.barrier()
        assert time.monotonic() - began < PROMPT
    goes_on(size)


@on_ranks(("gloo", 3), fresh=True, params={"TIMEOUT": 30})
def test_a_group_that_breaks_breaks_no_other(rank: int, size: int) -> None:
    # In shared memory who comes late finds all calls there, and is in time.
    group, other = fl.new_group(range(size), timeout=0.5), fl.new_group(range(size))
    if rank == 2:
        time.sleep(1.5)
        with pytest.raises(PeerLostError, match="gave up waiting for this rank"):
            group.barrier()
    else:
        with pytest.raises(CollectiveTimeoutError, match="rank 2 did not join"):
            group.barrier()
        with pytest.raises(GroupClosedError):
            group.barrier()
    assert total(other) == size
    goes_on(size)


@on_ranks(
    *(("gloo", 4), ("shm", 4), ("gloo", MANY), ("shm", MANY)), lost=-1, params={"TIMEOUT": 30}
)
def test_a_lost_rank_ends_the_groups_that_have_it(rank: int, size: int) -> None:
    with_it, without = fl.new_group([0, size - 1, 1]), fl.new_group(range(size - 1))
    pair = without.split(rank % 2) if without.is_member else without
    fl.barrier()
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for group in (with_it, None):
        if group is None or group.is_member:
            with pytest.raises(PeerLostError, match=rf"lost rank {1 if group else size - 1}\b"):
                fl.barrier(group=group)
    for group in (without, pair):
        assert total(group) == group.size
        assert fl.all_reduce(np.ones(LARGE), group=group)[-1] == group.size


@by_both(3)
def test_groups_are_made_in_any_order(rank: int, size: int) -> None:
    """Threads of a rank make groups of different groups at the same time."""
    parents = [fl.new_group(range(size)) for _ in range(4)]
    made: dict[int, Any] = {}

    def make(place: int) -> None:
        parent = parents[place]
        order = list(range(size))[place % size :] + list(range(size))[: place % size]
        for _ in range(20):
            made[place] = parent.new_group(order[: 2 + place % 2])
            if made[place].is_member:
                assert total(made[place]) == made[place].size

    threads = [threading.Thread(target=make, args=(place,)) for place in range(4)]
    for thread in threads[:: 1 if rank % 2 else -1]:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 4
    goes_on(size)


@by_both(MANY)
def test_a_group_connects_who_is_not_connected(rank: int, size: int) -> None:
    """Ranks that are no neighbours: connections are made by the group that needs them first."""
    far = fl.split(rank % (size // 2), rank)
    assert far.ranks == (rank % 6, rank % 6 + 6)
    again = far.new_group([1, 0])
    assert total(again) == total(far) == 2
    ended = fl.split(rank % (size // 3), rank)  # others that are no neighbours
    if ended.rank == 0:
        ended.close()
    else:
        with pytest.raises(PeerLostError):
            ended.recv(np.ones(1), 0)
    goes_on(size)


@by_both(2)
def test_a_group_outlives_one_that_is_dropped_and_not_the_world(rank: int, size: int) -> None:
    for _ in range(3):
        middle = fl.new_group(range(size))
        inner = middle.new_group(range(size))
        del middle
        assert total(inner) == total() == size
    fl.distributed_shutdown()
    with pytest.raises(GroupClosedError):
        inner.barrier()


@on_ranks(("hierarchical", 4), fresh=True, params={"TIMEOUT": 30}, env=in_places("ab"))
def test_groups_over_hosts_cost_no_threads(rank: int, size: int) -> None:
    assert total() == size
    before = tasks_and_descriptors()
    groups = [fl.new_group([3, 0, 1, 2]) for _ in range(10)]
    assert tasks_and_descriptors()[0] == before[0]
    for group in groups:
        assert total(group) == size
        x = np.full(LARGE, 1.0)
        assert fl.all_reduce(x, group=group)[-1] == size
        came = np.empty(1, int)
        group.sendrecv(np.array([group.rank]), 3 - group.rank, out=came, src=3 - group.rank)
        assert came[0] == 3 - group.rank
    for group in groups:
        group.close()
    assert total() == size
