"""Two threads of a rank in one group, and verbs, shutdown and close in signal handlers."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.distributed.conformance import on_ranks, ranks_in, slow
from tests.distributed.test_interrupted_verbs import ROWS, Verb

# More seconds than any test needs. The timeout of the group is 300 s.
SOON = 20.0

ranks = ranks_in(("shm", 2), ("hierarchical", 3), slow=[("gloo", 2)])


def in_thread(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run ``call`` in a thread; the list receives its result or exception."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(call())
        except fl.errors.DistributedError as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, results


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + SOON
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


@on_ranks(("shm", 2), ("gloo", 2))
def test_all_reduce_multiple_works_while_another_thread_calls(rank: int, size: int) -> None:
    """Native code leaves the rest of a list to Python if a call of the thread is pending."""
    lists = [[np.ones(3) for _ in range(20)] for _ in range(100)]
    begin = [lambda: fl.all_reduce(np.ones(3), async_op=True)] * 300
    thread, works = in_thread(lambda: [call() for call in begin])
    for xs in lists:
        fl.all_reduce_multiple(xs)
    thread.join(SOON)
    for work in works[0]:
        work.wait()
    assert all(np.all(x == size) for xs in lists for x in xs)


@on_ranks(("shm", 2), ("gloo", 2))
def test_barrier_and_reduction_of_two_threads_keep_their_order(rank: int, size: int) -> None:
    """Rank 0 has started both, in this order, before the other ranks begin the first."""
    x = np.full(8, rank + 1.0)
    if rank == 0:
        thread, raised = in_thread(fl.barrier)
        for peer in range(1, size):
            fl.recv(np.zeros(1), peer)
        fl.all_reduce(x)
        thread.join(SOON)
        assert raised == [None]
    else:
        group = fl.distributed.start.world.current_world().group
        until(lambda: group.backend().call_ahead(0))
        fl.send(np.zeros(1), 0)
        time.sleep(0.1)
        fl.barrier()
        fl.all_reduce(x)
    assert x[0] == 3.0


@on_ranks(("shm", 2), ("gloo", 2), ("hierarchical", 3))
def test_verbs_raise_if_another_thread_closes_the_group(rank: int, size: int) -> None:
    """Threads wait for a collective, for their turn, and for a message."""
    group = fl.new_group(range(size))
    if rank == 0:
        works: list[Callable[[], Any]] = [
            lambda: group.all_reduce(np.ones(8)),
            lambda: group.all_reduce(np.ones(8), async_op=True).wait(),
            group.barrier,
            lambda: group.recv(np.ones(8), 1),
        ]
        waiting = [in_thread(work) for work in works]
        time.sleep(0.2)  # they wait by now; otherwise they raise the same error
        group.close()
        for thread, _ in waiting:
            thread.join(SOON)
        assert [type(end[0]) for _, end in waiting] == [fl.errors.GroupClosedError] * 4
    else:
        with pytest.raises(fl.errors.PeerLostError):
            group.send(np.ones(20_000), 0, tag=1)
    fl.barrier()


@contextlib.contextmanager
def handling(handler: Callable[[], Any]) -> Iterator[None]:
    before = signal.signal(signal.SIGTERM, lambda number, frame: handler())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def save_and_leave(folder: str) -> None:
    """Save and shut down, like a program before preemption."""
    fl.save(folder, extra={"reached": np.arange(3)})
    fl.distributed_shutdown()


@on_ranks(("shm", 2), slow=[("gloo", 2), ("hierarchical", 3)], fresh=True)
def test_handler_between_verbs_can_save_and_leave(rank: int, size: int, tmp_path: Path) -> None:
    with handling(lambda: save_and_leave(str(tmp_path))):
        fl.all_reduce(np.ones(3))
        os.kill(os.getpid(), signal.SIGTERM)
    assert not fl.is_distributed_init()
    assert fl.load(tmp_path).extra["reached"].tolist() == [0, 1, 2]


# Messages are between the first rank and the last.
BLOCKING: dict[str, Verb] = {
    "all_reduce": ROWS["all_reduce"],
    "all_gather_object": ROWS["all_gather_object"],
    "message": ROWS["recv"],
    "exchange": ROWS["sendrecv"],
}


def carry_on(folder: str) -> None:
    with pytest.raises(fl.errors.DistributedError, match="a signal handler cannot call"):
        fl.barrier()
    with pytest.raises(fl.errors.DistributedError, match="a signal handler cannot call"):
        fl.save(folder, extra=1)


HANDLERS = {
    "saves and leaves": save_and_leave,
    "leaves": lambda folder: fl.distributed_shutdown(),
    "carries on": carry_on,
}


def preempt(rank: int, size: int, verb: str, handler: str, folder: str) -> None:
    """Send the signal to rank 0 while it waits for the last rank."""
    pid = fl.broadcast_object(os.getpid())
    world = fl.distributed.start.world.current_world().group
    journal = world.journal
    before = journal.count[0]
    handled = Path(f"{folder}-{verb}")

    def handle() -> None:
        try:
            HANDLERS[handler](folder)
        finally:
            handled.touch()

    with handling(handle):
        if rank == size - 1:
            time.sleep(0.1)
            os.kill(pid, signal.SIGTERM)
            until(handled.exists)
        BLOCKING[verb](world)
    assert fl.all_reduce(np.ones(3))[0] == size
    # A rejected call does not count.
    assert len(set(fl.all_gather_object(journal.count[0] - before))) == 1


@on_ranks()
def test_handler_inside_a_verb_raises_without_harm(rank: int, size: int, tmp_path: Path) -> None:
    # Without shared memory or Gloo alone, an exchange waits for started messages. In such a wait, a
    # handler may start a verb.
    waits = size > 2 or fl.distributed_backend() is fl.DistributedBackend.PORTABLE
    for verb in [verb for verb in BLOCKING if not waits or verb != "exchange"]:
        preempt(rank, size, verb, "carries on", str(tmp_path))


@on_ranks()
def test_signals_at_any_time_do_not_change_results(rank: int, size: int) -> None:
    """A handler tries another verb at any time."""
    group = fl.distributed.start.world.current_world().group
    refused = 0

    def handler(number: int, frame: Any) -> None:
        nonlocal refused
        if group.is_calling():
            with pytest.raises(fl.errors.DistributedError, match="a signal handler cannot call"):
                fl.all_reduce(np.ones(3))
            refused += 1

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.003, 0.003)
    try:
        rounds = 0
        while rounds < 20 or not fl.all_reduce(np.array(refused)):  # the same number on every rank
            rounds += 1
            for count in (8, 30_000):
                x = fl.all_reduce(np.full(count, rank + 1.0))
                assert np.all(x == size * (size + 1) / 2)
            assert fl.all_gather_object(rank) == list(range(size))
            got = np.empty(3000)
            fl.sendrecv(
                np.full(3000, float(rank)), (rank + 1) % size, out=got, src=(rank - 1) % size
            )
            assert np.all(got == (rank - 1) % size)
            fl.barrier()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert fl.all_reduce(refused) > 0


@on_ranks()
def test_signal_handler_inside_a_wait_can_make_the_next_call(rank: int, size: int) -> None:
    """The interrupted operation runs on its own. A verb of the handler comes after it."""
    pid = fl.broadcast_object(os.getpid())
    x = np.full(300_000, rank + 1.0)
    with handling(fl.barrier):
        if rank == size - 1:
            time.sleep(0.1)
            os.kill(pid, signal.SIGTERM)
            time.sleep(0.15)  # handled by now
        fl.all_reduce(x, async_op=True).wait()
        if rank != 0:
            fl.barrier()
    assert fl.all_reduce(x, op="max")[-1] == size * (size + 1) / 2


@pytest.mark.parametrize(
    ("ranks", "verb", "handler"),
    [
        (("shm", 2), "all_reduce", "saves and leaves"),
        (("shm", 2), "exchange", "leaves"),
        (("gloo", 2), "message", "leaves"),
        *slow(
            (("gloo", 2), "all_gather_object", "saves and leaves"),
            (("hierarchical", 3), "all_reduce", "leaves"),
        ),
    ],
    indirect=["ranks"],
)
@on_ranks(fresh=True)
def test_signal_handler_inside_a_verb_can_leave(
    rank: int, size: int, verb: str, handler: str, tmp_path: Path
) -> None:
    """A save in the handler raises, which ends the verb. Other ranks raise at once."""
    started = time.monotonic()
    error_class = fl.errors.GroupClosedError if handler == "leaves" else fl.errors.DistributedError
    with pytest.raises(fl.errors.PeerLostError if rank else error_class) as caught:
        preempt(rank, size, verb, handler, str(tmp_path))
    assert rank or type(caught.value) is error_class
    assert time.monotonic() - started < 5, "it did not end at once"
    assert fl.is_distributed_init() == (rank != 0 or handler != "leaves")
