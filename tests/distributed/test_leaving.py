"""Ranks that leave while other ranks wait for their messages: which ranks raise, and when."""

import contextlib
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.distributed.conformance import on_ranks, slow
from tests.distributed.test_interrupted_verbs import LIMIT, MANY, PROMPT, Group, Verb, ones, pair

IN_SHUTDOWN = r"it waits in distributed_shutdown\(\) and has not begun this message"

# Operations in which other ranks wait for rank 0 after it has left.
MESSAGES: dict[str, Verb] = {
    "send": lambda g: g.send(ones(MANY), 0),
    "send of 4 MB": lambda g: g.send(np.ones(1 << 19), 0),
    "recv": lambda g: g.recv(ones(), 0),
    "recv of any rank": lambda g: g.recv(ones(), None),
    "recv in part": lambda g: g.recv(ones(), 0, partial=True),
    "sendrecv": lambda g: g.sendrecv(ones(), 0, out=ones(), src=0),
    "isend": lambda g: g.isend(ones(MANY), 0).wait(),
    "irecv": lambda g: g.irecv(ones(), 0).wait(),
    "batch_isend_irecv": lambda g: g.batch_isend_irecv(
        [fl.P2POp(kind, ones(), 0) for kind in ("send", "recv")]
    ).wait(),
    "sync_distributed": lambda g: [g.irecv(ones(), 0), g.synchronize()],
}
# Operations in which a rank waits after all other ranks have left.
FROM_ANY: dict[str, Verb] = {
    "recv of any rank": lambda g: g.recv(ones(), None),
    "recv of any rank in part": lambda g: g.recv(ones(), None, partial=True),
    "irecv of any rank": lambda g: g.irecv(ones(), None).wait(),
}
# Operations that wait behind others, one of which fails.
BEHIND: dict[str, Verb] = {
    "irecv": lambda g: [g.irecv(ones(), 0) for _ in range(3)][-1].wait(),
    "irecv in part": lambda g: [g.irecv(ones(), 0), g.irecv(ones(), 0, partial=True).wait()],
    "isend": lambda g: [g.isend(ones(MANY), 0) for _ in range(3)][-1].wait(),
    "recv": lambda g: [g.irecv(ones(), 0), g.recv(ones(), 0)],
    "irecv of any rank": lambda g: [g.irecv(ones(), None) for _ in range(3)][-1].wait(),
}

# Calls that rank 0, or all ranks but the last, may finish and leave before the last rank calls. The
# last rank gets the results. Each element is ``expected(size)``.
GIVEN: list[tuple[Verb, Callable[[int], int]]] = [
    (lambda g: g.broadcast(ones(), 0, async_op=True), lambda size: 1),
    (lambda g: g.scatter(np.ones((g.size, 3)), 0, async_op=True), lambda size: 1),
    (lambda g: g.reduce(ones(), g.size - 1, async_op=True), lambda size: size),
    (lambda g: g.gather(ones(), g.size - 1, async_op=True), lambda size: 1),
    (lambda g: g.scan(ones(), async_op=True), lambda size: size),
    (lambda g: g.exscan(ones(), async_op=True), lambda size: size - 1),
    (pair(lambda g: g.isend(ones(), g.size - 1), lambda g: g.irecv(ones(), 0)), lambda size: 1),
]

SIZES = {"shm": 4, "hierarchical": 4, "gloo": 3, "mpi": 3}
WORLDS: list[Any] = [(name, n, {"params": {"TIMEOUT": LIMIT}}) for name, n in SIZES.items()]


def everywhere(fast: int = 1, fresh: bool = True) -> Any:
    """Return a decorator that runs a test in all worlds, as a slow test after ``fast`` worlds."""
    return on_ranks(*WORLDS[:fast], slow=WORLDS[fast:], fresh=fresh)


def in_some(names: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Return each of ``names`` in two of the four worlds."""
    return [(WORLDS[i % 4], name) for j, name in enumerate(names) for i in (j, j + 1 + j % 3)]


def call_once_more(group: Group, rounds: int, async_op: bool) -> str:
    """Rank 1 leaves after ``rounds`` calls. The other ranks start three more, and wait for one."""
    count = rounds + 3 * (group.rank != 1)
    works = [group.all_reduce(np.ones(3), async_op=True) for _ in range(count * async_op)]
    for n in range(rounds):
        works[n].wait() if async_op else group.all_reduce(np.ones(3))
    if group.rank == 1:
        return ""
    advice = r"\(it ended normally.*drop_last=True to DistributedSampler.*fl.join\(\)"
    with pytest.raises(fl.errors.PeerLostError, match=f"lost rank 1 {advice}") as caught:
        works[rounds].wait() if async_op else group.all_reduce(np.ones(3))
    return str(caught.value)


@contextlib.contextmanager
def raises_soon(kind: type[Exception], match: str) -> Iterator[None]:
    began = time.monotonic()
    with pytest.raises(kind, match=match):
        yield
    assert time.monotonic() - began < PROMPT


def wait_for_one_that_left(group: Group, name: str) -> None:
    if group.rank == group.size - 1:
        time.sleep(0.05)  # before rank 0 leaves, or soon after
    with raises_soon(fl.errors.PeerLostError, "lost rank 0"):
        MESSAGES[name](group)


def wait_for_any_that_left(group: Group, name: str) -> None:
    everyone = ", ".join(map(str, range(group.size - 1)))
    with raises_soon(fl.errors.PeerLostError, f"(?s)(?=.*{IN_SHUTDOWN}).*lost ranks {everyone} "):
        FROM_ANY[name](group)


def wait_behind_others(group: Group, name: str) -> None:
    with raises_soon(fl.errors.DistributedError, f"{IN_SHUTDOWN}|the group is closed"):
        BEHIND[name](group)


@everywhere(fresh=False)
def test_message_wait_raises_peer_lost_error_if_the_peer_closes(rank: int, size: int) -> None:
    for name in MESSAGES:
        group = fl.new_group(range(size))
        if rank:
            wait_for_one_that_left(group, name)
        group.close()
        fl.barrier()


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        (WORLDS[0], "send of 4 MB"),
        *slow(*in_some(name for name in MESSAGES if name not in FROM_ANY)),
    ],
    indirect=["ranks"],
)
@on_ranks(fresh=True)
def test_message_wait_raises_peer_lost_error_at_shutdown(rank: int, size: int, name: str) -> None:
    """Rank 0 shuts down. Other ranks wait for its messages in the world or in another group."""
    group = fl.new_group(range(size))
    if rank:
        wait_for_one_that_left(group, name)
    with contextlib.suppress(fl.errors.PeerLostError):
        fl.distributed_shutdown()


@everywhere(fast=2, fresh=False)
def test_peer_lost_error_says_how_many_fewer_calls_the_rank_made(rank: int, size: int) -> None:
    for rounds, async_op in itertools.product((0, 3), (False, True)):
        with contextlib.closing(fl.new_group(range(size))) as group:
            error = call_once_more(group, rounds, async_op)
        words = fl.all_gather_object(error)
        # A rank that another rank notified of the loss before its call may not know the numbers.
        ended = f"(it ended normally or closed this group after {rounds} calls of it, 1 fewer than "
        assert any(ended in text for text in words), words
        fl.barrier()


@pytest.mark.parametrize("rounds", [0, 3])
@everywhere(fast=2)
def test_error_names_a_rank_that_shut_down_earlier(rank: int, size: int, rounds: int) -> None:
    for _ in range(rounds):
        fl.all_reduce(ones())
    end = f"{rounds} calls" + ", 1 fewer than this rank" * (rank != 1)
    site = r"distributed_shutdown\(\) at \S*test_leaving.py:\d+"
    with pytest.raises(fl.errors.MismatchError, match=f"; rank 1 called {site} after {end}[.;]"):
        fl.distributed_shutdown() if rank == 1 else fl.all_reduce(ones())
    with contextlib.suppress(fl.errors.PeerLostError):
        fl.distributed_shutdown()


WAITS = [
    *((wait_for_any_that_left, name) for name in FROM_ANY),
    *((wait_behind_others, name) for name in BEHIND),
]


@pytest.mark.parametrize(
    ("ranks", "wait"), [(WORLDS[0], WAITS[0]), *slow(*in_some(WAITS))], indirect=["ranks"]
)
@on_ranks(fresh=True)
def test_message_wait_ends_if_other_ranks_leave(rank: int, size: int, wait: Any) -> None:
    group = fl.new_group(range(size))
    if rank == size - 1:
        wait[0](group, wait[1])
    with contextlib.suppress(fl.errors.DistributedError):
        fl.distributed_shutdown()


@pytest.mark.slow
@everywhere(fast=2)
def test_receive_from_any_rank_waits_for_the_remaining_ranks(rank: int, size: int) -> None:
    """Ranks shut down after their send. The next sender waits longer than a wait in vain."""
    if rank == 0:
        fl.irecv(ones(), None, tag=1)  # no rank waits for it
        sources = set()
        for _ in range(1, size):
            work = fl.irecv(ones(), None)
            work.wait()
            sources.add(work.source)
        assert sources == {*range(1, size)}
        time.sleep(1.0)
    else:
        time.sleep(0.8 * (rank - 1))
        fl.send(ones(), 0)
    fl.distributed_shutdown()


@on_ranks(WORLDS[2], WORLDS[0], slow=[WORLDS[1]])
def test_data_arrives_if_the_sender_closes_the_group(rank: int, size: int) -> None:
    """Each rank closes the group as soon as the wait for its own part has returned."""
    for call, expected in GIVEN * 6:
        with contextlib.closing(fl.new_group(range(size))) as group:
            work = call(group)
            result = work and work.wait()
            assert rank < size - 1 or np.all(result == expected(size))


@everywhere()
def test_messages_sent_before_a_shutdown_arrive(rank: int, size: int) -> None:
    """Rank 0 shuts down with messages in flight. A message without a receiver causes no error."""
    last, got = size - 1, np.zeros(1 << 19)
    if rank == 0:
        for _ in range(2):
            fl.isend(np.ones(got.size), last)
        fl.irecv(ones(), last, tag=7)
    if rank == last:
        fl.irecv(ones(), 0, tag=8)
        fl.isend(ones(), 0, tag=9)
        for _ in range(2):
            time.sleep(0.6)  # longer than a wait in vain would last
            assert fl.recv(got, 0)[-1] == 1
            got[:] = 0
    fl.distributed_shutdown()
