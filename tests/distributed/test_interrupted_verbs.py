"""Ctrl-C inside a verb, and ranks that leave while others wait: which ranks raise, and when."""

import contextlib
import dataclasses
import functools
import gc
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.distributed import api
from flashlight_py.distributed.verbs import VERBS
from flashlight_py.parallel import functional
from tests.distributed import conformance
from tests.distributed.conformance import BACKENDS, on_ranks, slow

LIMIT = 30  # seconds that the ranks wait
PROMPT = 5.0  # seconds: far below LIMIT, far above the normal time

Group = fl.ProcessGroup
Verb = Callable[[Group], Any]

# Too many bytes for a send to return before its receiver has called.
MANY = 20_000


def ones(count: int = 12) -> Any:
    return np.ones(count)


def pair(first: Verb, last: Verb) -> Verb:
    def both(group: Group) -> Any:
        if group.rank in (0, group.size - 1):
            return (last if group.rank else first)(group)
        return None

    return both


def partner(group: Group) -> int:
    return 0 if group.rank else group.size - 1


def op(kind: Any, group: Group) -> fl.P2POp:
    return fl.P2POp(kind, ones(), partner(group))


def send_before_a_wait(group: Group) -> None:
    """Receive from rank 0, and call a failing verb before the wait that raises the reason."""
    work = group.irecv(ones(), 0)
    while not work.is_completed():
        time.sleep(0.001)
    with pytest.raises(fl.errors.DistributedError):
        group.send(ones(), 0)
    work.wait()


@dataclasses.dataclass
class PressesCtrlC:
    """An object that raises SIGINT when a tree that contains it is traversed."""

    x: int = 3

    def __getattribute__(self, name: str) -> Any:
        if name == "x":
            raise KeyboardInterrupt
        return super().__getattribute__(name)


# Calls in which rank 0 is interrupted. Other ranks make them too; the last rank is late.
ROWS: dict[str, Verb] = {
    "all_reduce": lambda g: g.all_reduce(ones()),
    "reduce": lambda g: g.reduce(ones()),
    "reduce_scatter": lambda g: g.reduce_scatter(ones()),
    "scan": lambda g: g.scan(ones(MANY)),
    "exscan": lambda g: g.exscan(ones(MANY), op="max"),
    "broadcast": lambda g: g.broadcast(ones(), g.size - 1),
    "all_gather": lambda g: g.all_gather(ones()),
    "gather": lambda g: g.gather(ones()),
    "scatter": lambda g: g.scatter(ones() if g.rank else None, g.size - 1),
    "all_to_all": lambda g: g.all_to_all(ones()),
    "barrier": lambda g: g.barrier(),
    "send": pair(lambda g: g.send(ones(MANY), partner(g)), lambda g: g.recv(ones(MANY), 0)),
    "recv": pair(lambda g: g.recv(ones(), partner(g)), lambda g: g.send(ones(), 0)),
    "sendrecv": pair(*[lambda g: g.sendrecv(ones(), partner(g), out=ones(), src=partner(g))] * 2),
    "all_reduce_multiple": lambda g: g.all_reduce_multiple([ones(), ones()]),
    "all_reduce_location": lambda g: g.all_reduce_location(ones()),
    "broadcast_object": lambda g: g.broadcast_object("x", g.size - 1),
    "all_gather_object": lambda g: g.all_gather_object("x"),
    "gather_object": lambda g: g.gather_object("x"),
    "scatter_object": lambda g: g.scatter_object(["x"] * g.size, g.size - 1),
    "send_object": pair(
        lambda g: g.send_object("x" * 8 * MANY, partner(g)), lambda g: g.recv_object(0)
    ),
    "recv_object": pair(lambda g: g.recv_object(partner(g)), lambda g: g.send_object("x", 0)),
    "new_group": lambda g: g.new_group(range(g.size)),
    "split": lambda g: g.split(0),
    "shared_empty": lambda g: g.shared_empty(3),
    "host_array": lambda g: g.host_array(ones),
}

NO_VERBS = {"P2POp", "Grid", "grid"}  # these functions send nothing

# Other names of verbs, or combinations of verbs.
FORMS: dict[str, Verb] = {
    "all_reduce of 4 MB": lambda g: g.all_reduce(np.ones(1 << 19)),
    "all_reduce behind another": lambda g: [
        g.all_reduce(ones(), async_op=async_op) for async_op in (g.rank == 0, False)
    ],
    "all_reduce of a matrix's columns": lambda g: g.all_reduce(np.ones((4, 4))[:, ::2]),
    "all_reduce_multiple in one": lambda g: g.all_reduce_multiple(
        [ones(), ones()], contiguous=True
    ),
    "reduce_scatter in parts": lambda g: g.reduce_scatter(ones(), rows=[12] + [0] * (g.size - 1)),
    "all_to_all in parts": lambda g: g.all_to_all(ones(), rows=[12] + [0] * (g.size - 1)),
    "barrier of its own limit": lambda g: g.barrier(LIMIT),
    "recv of any rank": pair(lambda g: g.recv(ones(), None), lambda g: g.send(ones(), 0)),
    "recv in part": pair(
        lambda g: g.recv(ones(), partner(g), partial=True), lambda g: g.send(ones(), 0)
    ),
    "recv, noticed by another verb": pair(lambda g: g.recv(ones(), partner(g)), send_before_a_wait),
    "synchronize": lambda g: fl.synchronize([ones(), 3], group=g),
    "synchronize between two calls": lambda g: fl.synchronize(
        [ones(), PressesCtrlC() if g.rank == 0 else 3], group=g
    ),
    "functional.all_reduce": lambda g: functional.all_reduce(fl.input(ones()), group=g),
    "functional.all_gather": lambda g: functional.all_gather(fl.input(ones()), group=g),
    "functional.recv": pair(
        lambda g: functional.recv(((12,), np.float64), partner(g), group=g),
        lambda g: functional.send(fl.input(ones()), 0, group=g),
    ),
}

# Operations that rank 0 started. Ctrl-C interrupts its wait, and the operations continue.
GOES_ON: dict[str, Verb] = {
    "isend": pair(lambda g: g.isend(ones(MANY), partner(g)), lambda g: g.irecv(ones(MANY), 0)),
    "irecv": pair(lambda g: g.irecv(ones(), partner(g)), lambda g: g.isend(ones(), 0)),
    "batch_isend_irecv": pair(*[lambda g: g.batch_isend_irecv([op("send", g), op("recv", g)])] * 2),
    "sync_distributed": lambda g: g.all_reduce(ones(), async_op=True),
}


def verb_caller(name: str, group: Group) -> Callable[[], Any]:
    """Return a function that calls the verb, or waits for a started operation."""
    if name not in GOES_ON:
        return functools.partial((ROWS | FORMS)[name], group)
    work = GOES_ON[name](group)
    return group.synchronize if name == "sync_distributed" or work is None else work.wait


def test_table_of_interrupted_verbs_is_complete() -> None:
    assert {*ROWS, *GOES_ON} == {*(verb.name for verb in VERBS), *api.__all__} - NO_VERBS
    assert {f"functional.{name}" for name in functional.__all__} - set(FORMS) == {
        # the same function with another verb
        *(f"functional.{name}" for name in ("reduce_scatter", "broadcast", "all_to_all", "send"))
    }


def interrupt(call: Callable[[], Any], group: Group, is_wait: bool) -> None:
    calls, done = group.journal.header, threading.Event()
    before = calls[1]

    def press() -> None:
        while not is_wait and calls[1] == before and not done.is_set():
            time.sleep(0.001)
        time.sleep(0.02)  # usually waits by now; the result is the same
        if not done.is_set():
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            call()
    finally:
        done.set()
        thread.join()


def try_interrupts(rank: int, size: int, names: list[str], goes_on: bool) -> list[str]:
    wrong, ends = [], fl.new_group([0, size - 1])
    for name in names:
        group = fl.new_group(range(size))
        try:
            _try_interrupt(name, group, ends, goes_on)
        except (AssertionError, pytest.fail.Exception, fl.errors.DistributedError) as error:
            wrong.append(f"{name} on rank {rank}: {type(error).__name__}: {error}")
        group.close()
        fl.barrier()
    return wrong


def _try_interrupt(name: str, group: Group, ends: Group, goes_on: bool) -> None:
    """Interrupt rank 0. Other ranks wait in the same verb, and the last rank calls it later."""
    rank = group.rank
    # Only connected ranks receive a reason. Others only detect that rank 0 has exited.
    group.barrier()
    ROWS["send"](group)
    gc.collect()  # frees the previous thread, which runs Python code
    if rank == 0:
        interrupt(verb_caller(name, group), group, name in GOES_ON)
    if ends.is_member:
        ends.barrier()
    began = time.monotonic()
    if goes_on:
        if rank:
            verb_caller(name, group)()
        group.barrier()
    else:
        kind = fl.errors.PeerLostError if rank else fl.errors.GroupClosedError
        with pytest.raises(kind) as caught:
            _call_again(name if rank else "barrier", group)
        message = str(caught.value)
        names_it = ("lost rank 0", "rank 0 gave up", "because of rank 0: it gave up")
        assert rank == 0 or any(words in message for words in names_it), message
        assert rank == 0 or "interrupt" in message.lower(), message
    assert time.monotonic() - began < PROMPT


def _call_again(name: str, group: Group) -> None:
    """A rank that finished its part before raises in the next call."""
    verb_caller(name, group)()
    group.barrier()


def world_of(backend: str) -> tuple[int, dict[str, Any]]:
    return BACKENDS[backend][0][-1], conformance.world_of(backend, TIMEOUT=LIMIT)


SETS = {"verbs": ROWS, "forms": FORMS, "goes on": GOES_ON}
FAST = [("shm", "verbs"), ("shm", "forms"), ("gloo", "goes on")]
OTHERS = {*itertools.product(("shm", "gloo", "hierarchical", "mpi"), SETS)} - {*FAST}


@pytest.mark.parametrize(("backend", "which"), [*FAST, *slow(*sorted(OTHERS))])
def test_ctrl_c_in_a_verb_ends_the_group(backend: str, which: str, pool: Any) -> None:
    size, options = world_of(backend)
    # MPI makes progress only in a wait.
    goes_on = which == "goes on" and backend != "mpi"
    wrong = pool(size, **options).run(try_interrupts, [*SETS[which]], goes_on)
    assert [*itertools.chain(*wrong)] == []


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
    site = r"distributed_shutdown\(\) at \S*test_interrupted_verbs.py:\d+"
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
