"""Connections are created on demand, and shared by a group and its subgroups."""

import contextlib
import os
import re
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.errors import (
    CollectiveTimeoutError,
    GroupClosedError,
    MismatchError,
    PeerLostError,
)
from tests.distributed.conformance import hosts_by_letter, on_ranks
from tests.distributed.harness import run_ranks
from tests.distributed.processes import await_file
from tests.tables import pairs

RANKS = 12  # ranks that forward calls, without a full mesh
# One side listens. The ranks at distance 1, 2, 4 and 8 are 6 different ranks.
AT_FIRST = 1 + 6
LATE = 7
EACH_A_HOST = hosts_by_letter("abcdefghijkl")


def sockets() -> int:
    """Return the number of open sockets. If both ends connect at once, one socket closes soon."""
    return min(open_sockets() for _ in range(20))


def open_sockets() -> int:
    time.sleep(0.005)
    with os.scandir("/proc/self/fd") as entries:
        paths = [Path(entry.path) for entry in entries]
    return sum(path.is_socket() for path in paths)


def among_many(timeout: float = 20) -> Any:
    """Return a decorator that runs a test on new ranks, each on its own host."""
    options: Any = {"params": {"TIMEOUT": timeout}, "env": EACH_A_HOST}
    return on_ranks(("hierarchical", RANKS), fresh=True, **options)


@among_many()
def test_collectives_connect_only_the_ranks_that_exchange_data(rank: int, size: int) -> None:
    """Small calls connect neighbours, a message one more rank, large arrays all ranks."""
    first = sockets()
    total = size * (size - 1) // 2
    for count in (0, 1, 100):
        assert (fl.all_reduce(np.full(count, rank)) == total).all()
    assert (fl.all_gather(np.full(3, rank)).reshape(size, 3) == np.arange(size)[:, None]).all()
    assert (fl.broadcast(np.full(5, rank), root=3) == 3).all()
    assert fl.scan(np.full(2, rank)).tolist() == [rank * (rank + 1) // 2] * 2
    gathered = fl.gather(np.full(rank % 2 + 1, rank), root=2)
    assert (gathered is None) == (rank != 2)
    fl.barrier()
    assert sockets() == first
    far = (rank + size // 2) % size  # not a neighbour of this rank
    got = np.empty(4, int)
    fl.sendrecv(np.full(4, rank), far, out=got, src=far)
    assert (got == far).all()
    fl.barrier()
    assert sockets() == first + 1
    for count in (2000, 50000):
        array = np.full(count, rank)
        assert (fl.all_reduce(array) == total).all()
        assert (fl.broadcast(np.full(count, rank), root=4) == 4).all()
        moved = fl.all_to_all(np.repeat(np.arange(size) * size + rank, count // size))
        assert (moved.reshape(size, -1) == (rank * size + np.arange(size))[:, None]).all()
        part = fl.reduce_scatter(np.arange(size * 7.0) + rank)
        assert part.tolist() == [size * (rank * 7 + i) + total for i in range(7)]
        got = fl.reduce(np.full(count, rank), root=1)
        assert rank != 1 or (got == total).all()
        rows = fl.scatter(np.arange(size * 3).reshape(size, 3) if rank == 0 else None, root=0)
        assert rows.reshape(-1).tolist() == [3 * rank, 3 * rank + 1, 3 * rank + 2]
    assert sockets() == first - AT_FIRST + RANKS


@among_many()
def test_mismatch_error_names_the_rank_with_another_call_among_many(rank: int, size: int) -> None:
    """Every rank raises, and the group remains usable: a ring of messages does not deadlock."""
    with pytest.raises(MismatchError, match=f"rank {LATE}"):
        fl.all_reduce(np.zeros(4 if rank == LATE else 3))
    got = np.empty(1)
    for _ in range(3):
        fl.sendrecv(np.full(1, float(rank)), (rank + 1) % size, out=got, src=(rank - 1) % size)
        assert got[0] == (rank - 1) % size


@pytest.mark.slow
@among_many(timeout=1)
def test_timeout_error_names_the_late_rank_among_many(rank: int, size: int) -> None:
    """Ranks that wait for the late rank, and would forward its call, are not named."""
    fl.barrier()
    if rank == LATE:
        time.sleep(2.5)
        with pytest.raises(PeerLostError, match="gave up waiting for this rank"):
            fl.barrier()
        return
    time.sleep(0.1 * (rank % 3))  # their timeouts end one after the other
    with pytest.raises(CollectiveTimeoutError, match=rf"rank {LATE}\b"):
        fl.all_reduce(np.zeros(3))


def first_message(
    rank: int, size: int, folder: Path, ranks: list[int], part: bool, shuts_down: bool
) -> str:
    """Make the first of ``ranks`` declare the second, which stalls, lost. The third asks the
    first."""
    gave_up, over = folder / "gave-up", folder / "over"
    group = fl.new_group(ranks) if part else None
    index = ranks.index(rank) if rank in ranks else -1
    text = ""
    if index == 2:
        await_file(gave_up)
    if index in (0, 2):
        source = 1 if index == 0 else 0
        try:
            fl.recv(np.empty(3), source if part else ranks[source], group=group)
        except fl.errors.DistributedError as error:
            text = str(error)
        if shuts_down:
            with suppress(fl.errors.DistributedError):
                fl.distributed_shutdown()
        (gave_up if index == 0 else over).touch()
    await_file(over)
    with suppress(fl.errors.DistributedError):
        fl.distributed_shutdown()
    return text


FIRST_MESSAGES = {
    "aabb": [0, 2, 3],
    "aabbc": [1, 3, 4],
    "abcd": [0, 1, 2],
    "abcdefghijkl": [0, 5, 7],  # not neighbours
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("places", "part", "shuts_down"), pairs([*FIRST_MESSAGES], (False, True), (False, True))
)
def test_first_message_to_a_failed_rank_returns_the_reason_of_the_failure(
    tmp_path: Path, places: str, part: bool, shuts_down: bool
) -> None:
    """Regression: no thread listened on that rank any more, and a healthy rank was named."""
    ranks = FIRST_MESSAGES[places]
    options = {"params": {"TIMEOUT": 1}, "env": hosts_by_letter(places)}
    texts = run_ranks(first_message, len(places), tmp_path, ranks, part, shuts_down, **options)
    late = re.compile(rf"rank {1 if part else ranks[1]} did not join")
    for rank in (ranks[0], ranks[2]):
        assert late.search(texts[rank]), texts


@pytest.mark.slow
@on_ranks(("hierarchical", 5), fresh=True, params={"TIMEOUT": 1}, env=hosts_by_letter("aabbc"))
def test_stopped_rank_reports_the_first_failure(rank: int, size: int, tmp_path: Path) -> None:
    """Rank 0 stops until rank 4 has declared it lost, then asks rank 4 for a message.

    Regression: rank 0 reported the loss of rank 4.
    """
    gave_up, over, pid = tmp_path / "gave-up", tmp_path / "over", tmp_path / "pid"
    text = ""
    try:
        if rank == 0:
            pid.write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
            fl.recv(np.empty(3), 4)
        elif rank == 4:
            fl.recv(np.empty(3), 0)
        elif rank == 1:
            await_file(gave_up)
            os.kill(int(pid.read_text()), signal.SIGCONT)
        elif rank == 2:
            await_file(over)
            fl.recv(np.empty(3), 0)
    except fl.errors.DistributedError as error:
        text = str(error)
    if rank in (0, 4):
        (over if rank == 0 else gave_up).touch()
    await_file(over)
    with suppress(fl.errors.DistributedError):
        fl.distributed_shutdown()
    assert rank != 2 or "rank 0 did not join" in text


LARGE = 1_000_000  # as float64, more bytes than the socket buffer of the kernel


def on_both_backends(size: int, **options: Any) -> Any:
    """Return a decorator that runs a test on new ranks, in shared memory and over TCP."""
    return on_ranks(("gloo", size), ("shm", size), fresh=True, params={"TIMEOUT": 30}, **options)


def total(group: Any = None) -> int:
    return int(fl.all_reduce(np.ones(1, int), group=group)[0])


def check_world(size: int) -> None:
    """Check that the world works: collectives and messages, large and small."""
    assert total() == size
    x = np.full(LARGE, 1.0)
    assert fl.all_reduce(x)[-1] == size
    rank = fl.get_world_rank()
    for count in (1, LARGE // 4):
        got = np.empty(count)
        fl.sendrecv(np.full(count, float(rank)), (rank + 1) % size, out=got, src=(rank - 1) % size)
        assert (got == (rank - 1) % size).all()


def tasks_and_descriptors() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


@on_both_backends(4, native=True)
def test_groups_add_no_threads_and_no_descriptors(rank: int, size: int) -> None:
    assert total() == size
    before = tasks_and_descriptors()
    groups = [fl.new_group(range(size)) for _ in range(60)]
    halves = [group.split(rank % 2, rank) for group in groups[:10]]
    for group in (*groups, *halves):
        assert total(group) == group.size
        got, after, ahead = np.empty(1, int), group.rank + 1, group.rank - 1
        group.sendrecv(np.array([group.rank]), after % group.size, out=got, src=ahead % group.size)
        assert got[0] == ahead % group.size
    tasks, descriptors = tasks_and_descriptors()
    assert tasks == before[0]
    assert descriptors <= before[1] + size - 1  # one per process, at the first long wait
    for group in groups:  # a thread counts as used until it runs again
        assert group.all_reduce(np.ones(1, int), async_op=True).wait()[0] == size
    assert tasks_and_descriptors()[0] <= before[0] + 10
    for group in groups[::2]:
        group.close()
    assert all(total(group) == size for group in groups[1::2])


@on_both_backends(3)
def test_late_data_for_a_closed_group_does_not_disturb_other_groups(rank: int, size: int) -> None:
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
        check_world(size)


@on_both_backends(3)
def test_group_closed_during_a_send_sends_no_later_content(rank: int, size: int) -> None:
    """The array is overwritten at once. The new content must not arrive.

    If the receiver reads the memory of the sender, an incomplete message may contain new content.
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
        check_world(size)


@on_ranks(("gloo", 3), fresh=True, native=True, params={"TIMEOUT": 30})
def test_failed_group_leaves_other_groups_usable(rank: int, size: int) -> None:
    # In shared memory a late rank finds all calls and is in time.
    group, other = fl.new_group(range(size), timeout=0.3), fl.new_group(range(size))
    if rank == 2:
        time.sleep(0.9)
        with pytest.raises(PeerLostError, match="gave up waiting for this rank"):
            group.barrier()
    else:
        with pytest.raises(CollectiveTimeoutError, match="rank 2 did not join"):
            group.barrier()
        with pytest.raises(GroupClosedError):
            group.barrier()
    assert total(other) == size
    check_world(size)


@on_ranks(
    *(("gloo", 4), ("shm", RANKS)),
    slow=[("shm", 4), ("gloo", RANKS)],
    lost=-1,
    params={"TIMEOUT": 30},
)
def test_lost_rank_ends_only_the_groups_that_contain_it(rank: int, size: int) -> None:
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


@on_both_backends(3)
def test_threads_create_groups_in_any_order(rank: int, size: int) -> None:
    parents = [fl.new_group(range(size)) for _ in range(4)]
    made: dict[int, Any] = {}

    def make(index: int) -> None:
        parent = parents[index]
        order = list(range(size))[index % size :] + list(range(size))[: index % size]
        for _ in range(20):
            made[index] = parent.new_group(order[: 2 + index % 2])
            if made[index].is_member:
                assert total(made[index]) == made[index].size

    threads = [threading.Thread(target=make, args=(index,)) for index in range(4)]
    for thread in threads[:: 1 if rank % 2 else -1]:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 4
    check_world(size)


@on_ranks(("gloo", RANKS), slow=[("shm", RANKS)], fresh=True, params={"TIMEOUT": 30})
def test_group_connects_members_that_were_not_connected(rank: int, size: int) -> None:
    """The group that first needs a connection creates it."""
    far = fl.split(rank % (size // 2), rank)
    assert far.ranks == (rank % 6, rank % 6 + 6)
    again = far.new_group([1, 0])
    assert total(again) == total(far) == 2
    ended = fl.split(rank % (size // 3), rank)  # other ranks that are not neighbours
    if ended.rank == 0:
        ended.close()
    else:
        with pytest.raises(PeerLostError):
            ended.recv(np.ones(1), 0)
    check_world(size)


@on_both_backends(2)
def test_group_outlives_its_dropped_parent_but_not_the_world(rank: int, size: int) -> None:
    for _ in range(3):
        middle = fl.new_group(range(size))
        inner = middle.new_group(range(size))
        del middle
        assert total(inner) == total() == size
    fl.distributed_shutdown()
    with pytest.raises(GroupClosedError):
        inner.barrier()


@on_ranks(("hierarchical", 4), fresh=True, params={"TIMEOUT": 30}, env=hosts_by_letter("ab"))
def test_groups_across_hosts_add_no_threads(rank: int, size: int) -> None:
    assert total() == size
    before = tasks_and_descriptors()
    groups = [fl.new_group([3, 0, 1, 2]) for _ in range(10)]
    assert tasks_and_descriptors()[0] == before[0]
    for group in groups:
        assert total(group) == size
        x = np.full(LARGE, 1.0)
        assert fl.all_reduce(x, group=group)[-1] == size
        got = np.empty(1, int)
        group.sendrecv(np.array([group.rank]), 3 - group.rank, out=got, src=3 - group.rank)
        assert got[0] == 3 - group.rank
    for group in groups:
        group.close()
    assert total() == size
