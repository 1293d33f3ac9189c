"""Connections are made when they are needed, and many ranks pass on what they call."""

import itertools
import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.errors import CollectiveTimeoutError, MismatchError, PeerLostError
from tests.distributed.conformance import in_places, on_ranks
from tests.distributed.harness import run_ranks

RANKS = 12
# One listens; 1, 2, 4 and 8 ranks before and after it are 6 others.
AT_FIRST = 1 + 6
LATE, GONE = 7, 5
EACH_A_HOST = in_places("abcdefghijkl")


def sockets() -> int:
    """Return how many are open; both ends may have begun a connection, and one is given up soon."""
    return min(open_now() for _ in range(20))


def open_now() -> int:
    time.sleep(0.005)
    with os.scandir("/proc/self/fd") as entries:
        paths = [Path(entry.path) for entry in entries]
    return sum(path.is_socket() for path in paths)


def among_many(timeout: float = 20, lost: int | None = None) -> Any:
    """Return a decorator of a test on new ranks, each of which is a host."""
    how: Any = {"params": {"TIMEOUT": timeout}, "env": EACH_A_HOST}
    return on_ranks(("hierarchical", RANKS), fresh=True, lost=lost, **how)


def small_and_large(rank: int, size: int) -> list[int]:
    """Return how many sockets there are at first, after small calls, a message and large ones."""
    counts = [sockets()]
    total = size * (size - 1) // 2
    for count in (0, 1, 100):
        assert (fl.all_reduce(np.full(count, rank)) == total).all()
    assert (fl.all_gather(np.full(3, rank)).reshape(size, 3) == np.arange(size)[:, None]).all()
    assert (fl.broadcast(np.full(5, rank), root=3) == 3).all()
    assert fl.scan(np.full(2, rank)).tolist() == [rank * (rank + 1) // 2] * 2
    gathered = fl.gather(np.full(rank % 2 + 1, rank), root=2)
    assert (gathered is None) == (rank != 2)
    fl.barrier()
    counts.append(sockets())
    far = (rank + size // 2) % size  # no neighbour of this one
    came = np.empty(4, int)
    fl.sendrecv(np.full(4, rank), far, out=came, src=far)
    assert (came == far).all()
    fl.barrier()
    counts.append(sockets())
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
    counts.append(sockets())
    return counts


def test_only_those_who_need_each_other_are_connected() -> None:
    """Small calls need no more than the neighbours, a message one more, large arrays all."""
    world: Any = {"params": {"TIMEOUT": 20}, "env": EACH_A_HOST}
    counts = np.array(run_ranks(small_and_large, RANKS, **world))
    base = counts[:, 0] - AT_FIRST  # what the process had before
    assert (counts[:, 1] == counts[:, 0]).all()
    assert (counts[:, 2] == base + AT_FIRST + 1).all()
    assert (counts[:, 3] == base + RANKS).all()


@among_many()
def test_many_ranks_send_to_the_next_in_a_ring(rank: int, size: int) -> None:
    """Each waited for the next to receive, which waited for the one after it."""
    came = np.empty(1)
    for _ in range(3):
        fl.sendrecv(np.full(1, float(rank)), (rank + 1) % size, out=came, src=(rank - 1) % size)
        assert came[0] == (rank - 1) % size


def on_two_hosts(rank: int, size: int) -> list[int]:
    counts = [sockets()]
    assert (fl.all_reduce(np.full(3, rank)) == size * (size - 1) // 2).all()
    fl.barrier()
    counts.append(sockets())
    came = np.empty(1, int)
    peer = size - 1 - rank
    fl.sendrecv(np.full(1, rank), peer, out=came, src=peer)
    assert came[0] == peer
    return [*counts, sockets()]


def test_ranks_that_share_memory_connect_to_nobody_but_their_counterparts() -> None:
    """What joins all ranks is left alone until a message needs it."""
    counts = np.array(run_ranks(on_two_hosts, 6, params={"TIMEOUT": 20}, env=in_places("ab")))
    assert (counts[:, 0] == counts[:, 1]).all()
    assert (counts[:, 2] == counts[:, 1] + 1).all()


@among_many()
def test_who_calls_something_else_is_named_among_many(rank: int, size: int) -> None:
    """All have heard of all, and the group lives on."""
    with pytest.raises(MismatchError, match=f"rank {LATE}"):
        fl.all_reduce(np.zeros(4 if rank == LATE else 3))
    assert fl.all_reduce(np.ones(1)) == size


@pytest.mark.slow
@among_many(timeout=1)
def test_who_is_late_is_named_among_many(rank: int, size: int) -> None:
    """Not those who wait for it, and were to pass on what it calls."""
    fl.barrier()
    if rank == LATE:
        time.sleep(2.5)
        with pytest.raises(PeerLostError, match="gave up waiting for this rank"):
            fl.barrier()
        return
    time.sleep(0.1 * (rank % 3))  # their times are up one after the other
    with pytest.raises(CollectiveTimeoutError, match=rf"rank {LATE}\b"):
        fl.all_reduce(np.zeros(3))


@pytest.mark.slow
@among_many(lost=GONE)
def test_who_is_gone_is_named_among_many(rank: int, size: int) -> None:
    """Also by those who were not connected to it."""
    fl.barrier()
    if rank == GONE:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError, match=rf"rank {GONE}\b"):
        fl.all_reduce(np.zeros(3))


def first_message(
    rank: int, size: int, folder: Path, ranks: list[int], part: bool, shuts_down: bool
) -> str:
    """Have the first of ``ranks`` give up the second, which stalls, and the third ask the first."""
    gave_up, over = folder / "gave-up", folder / "over"
    group = fl.new_group(ranks) if part else None
    place = ranks.index(rank) if rank in ranks else -1
    text = ""
    if place == 2:
        await_file(gave_up)
    if place in (0, 2):
        source = 1 if place == 0 else 0
        try:
            fl.recv(np.empty(3), source if part else ranks[source], group=group)
        except fl.errors.DistributedError as error:
            text = str(error)
        if shuts_down:
            with suppress(fl.errors.DistributedError):
                fl.distributed_shutdown()
        (gave_up if place == 0 else over).touch()
    await_file(over)
    with suppress(fl.errors.DistributedError):
        fl.distributed_shutdown()
    return text


def await_file(path: Path) -> None:
    while not path.exists():
        time.sleep(0.01)


QUICK = [("aabb", False, True), ("abcdefghijkl", False, False)]
FIRST_MESSAGES = {
    "aabb": [0, 2, 3],
    "aabbc": [1, 3, 4],
    "abcd": [0, 1, 2],
    "abcdefghijkl": [0, 5, 7],  # who are no neighbours
}


@pytest.mark.parametrize(
    ("places", "part", "shuts_down"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
        for case in itertools.product(FIRST_MESSAGES, (False, True), (False, True))
    ],
)
def test_a_first_message_to_a_rank_that_gave_up_finds_the_reason(
    tmp_path: Path, places: str, part: bool, shuts_down: bool
) -> None:
    """Nobody listened there any more, and the well rank was named."""
    ranks = FIRST_MESSAGES[places]
    how = {"params": {"TIMEOUT": 1}, "env": in_places(places)}
    texts = run_ranks(first_message, len(places), tmp_path, ranks, part, shuts_down, **how)
    late = re.compile(rf"rank {1 if part else ranks[1]} did not join")
    for rank in (ranks[0], ranks[2]):
        assert late.search(texts[rank]), texts


def come_back(rank: int, size: int, folder: Path) -> str:
    """Rank 0 stops as a whole until rank 4 has given it up, and asks that for a message then."""
    gave_up, over, pid = folder / "gave-up", folder / "over", folder / "pid"
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
    return text


@pytest.mark.slow
def test_the_first_rank_that_gave_up_has_the_reason(tmp_path: Path) -> None:
    """Rank 0 said that it had lost rank 4, which had given it up."""
    how = {"params": {"TIMEOUT": 1}, "env": in_places("aabbc")}
    texts = run_ranks(come_back, 5, tmp_path, **how)
    assert "rank 0 did not join" in texts[2], texts
