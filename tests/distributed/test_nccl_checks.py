"""Mismatches and lost ranks with NCCL, on real processes with a stand-in for a GPU.

The stand-in's device never completes a collective, like a real device that waits for other ranks.
"""

import os
import signal
import time
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.distributed.start.world import current_world
from flashlight_py.errors import MismatchError, PeerLostError
from tests import cupy_stand_in
from tests.distributed import nccl_stand_in
from tests.distributed.conformance import on_ranks, raises


class Stuck(nccl_stand_in.StandInNccl):
    """An NCCL that starts everything, and whose communicator can be aborted."""

    def _do(self, name: str, *arguments: Any) -> int:
        return 0


def gpus(group: Any) -> Any:
    """Connect the stand-ins of GPUs, and return a module that creates arrays on them."""
    nccl_stand_in.install(group.backend()).__class__ = Stuck
    cupy_stand_in.Event.ends_at_once = False
    group.join_gpus()
    import cupy

    return cupy


def finish(group: Any, verb: Any, *args: Any) -> None:
    """Call and wait: otherwise the host does not wait."""
    verb(*args)
    group.synchronize()


CALLS: dict[str, Any] = {
    "dtype": lambda g, cp, rank: g.all_reduce(cp.zeros(3, "float32" if rank else "float64")),
    "shape": lambda g, cp, rank: g.all_reduce(cp.zeros((2, 3) if rank else (3, 2))),
    "op": lambda g, cp, rank: g.all_reduce(cp.zeros(3), op="max" if rank else "min"),
    "root": lambda g, cp, rank: g.broadcast(cp.zeros(3), root=min(rank, 1)),
    "verb": lambda g, cp, rank: (g.reduce if rank else g.all_reduce)(cp.zeros(3)),
    "a verb of the CPU": lambda g, cp, rank: (g.all_gather if rank else g.all_reduce)(cp.zeros(3)),
}


@on_ranks(("shm", 2), fresh=True)
def test_mismatch_aborts_nccl_and_raises_on_every_rank(rank: int, size: int) -> None:
    for name, call in CALLS.items():
        group = fl.new_group(range(size))
        cp = gpus(group)
        group.all_reduce(cp.zeros(7), async_op=True)  # equal on all ranks
        started = time.monotonic()
        which = f"rank {rank} of 2: the ranks made different calls in call 2 of"
        with raises(MismatchError, which, "rank 0 called ", "rank 1 called ") as caught:
            finish(group, call, group, cp, rank)
        assert time.monotonic() - started < 5, name
        assert str(caught.value).count("test_nccl_checks.py:") == 2
        with pytest.raises(fl.errors.GroupClosedError, match="made different calls"):
            group.all_reduce(cp.zeros(3))


@on_ranks(("hierarchical", 3), fresh=True)
def test_mismatch_between_hosts_raises_on_every_rank(rank: int, size: int) -> None:
    world = current_world().group
    cp = gpus(world)
    calls = "ranks 0, 1 called all_reduce(cupy float64 (3,)", "rank 2 called all_reduce(cupy flo"
    with raises(MismatchError, f"call 1 of this group: {calls[0]}", calls[1]):
        finish(world, fl.all_reduce, cp.zeros(3 if rank < 2 else 4))


@on_ranks(("shm", 2), fresh=True)
def test_barrier_during_a_reduction_is_reported_once(rank: int, size: int) -> None:
    """The shutdown does not raise an error that was raised before."""
    world = current_world().group
    cp = gpus(world)
    call = (fl.barrier,) if rank == 0 else (fl.all_reduce, cp.zeros(3))
    calls = "rank 0 called barrier()", "rank 1 called all_reduce(cupy float64 (3,)"
    with raises(MismatchError, *calls):
        finish(world, *call)
    fl.distributed_shutdown()


@pytest.mark.parametrize(
    ("ranks", "has_called"), [(("shm", 2), True), (("gloo", 2), False)], indirect=["ranks"]
)
@on_ranks(lost=1)
def test_dead_rank_raises_peer_lost_error_soon(rank: int, size: int, has_called: bool) -> None:
    """Rank 1 is killed before or after its call. No operation on the CPU waits for it."""
    world = current_world().group
    cp = gpus(world)
    if has_called:
        world.all_reduce(cp.zeros(3), async_op=True)
        fl.all_reduce(np.ones(1))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    call = world.gpus.synchronize if has_called else lambda: fl.all_reduce(cp.zeros(3))
    why = "its process has ended)" if has_called else ""
    with raises(PeerLostError, f"lost rank 1 ({why}", ", which is process "):
        finish(world, call)
    assert time.monotonic() - started < 2


@on_ranks(("shm", 2), slow=[("gloo", 2), ("hierarchical", 3)], fresh=True)
def test_exception_of_another_rank_ends_pending_collectives(rank: int, size: int) -> None:
    """The last rank raises after all ranks have called, and its process continues."""
    world = current_world().group
    cp = gpus(world)
    world.all_reduce(cp.zeros(3), async_op=True)
    fl.all_reduce(np.ones(1))
    started = time.monotonic()
    if rank == size - 1:
        with pytest.raises(ZeroDivisionError), fl.abort_on_exception():
            raise ZeroDivisionError("of its own")
    words = f"lost rank {size - 1}, which is process ", "ZeroDivisionError: of its own"
    with (
        raises(fl.errors.GroupClosedError)
        if rank == size - 1
        else raises(PeerLostError, *words, "in test_exception_of_another_rank")
    ):
        world.gpus.synchronize()
    assert time.monotonic() - started < 2


@on_ranks(("shm", 2), fresh=True)
def test_numpy_and_cupy_arrays_in_one_call_raise_mismatch_error(rank: int, size: int) -> None:
    world = current_world().group
    cp, messages = gpus(world), []
    calls: list[Any] = [lambda: fl.all_reduce(np.zeros(3)), lambda: fl.all_reduce(cp.zeros(3))]
    started = time.monotonic()
    for call in (calls[rank], calls[1]):
        with pytest.raises(fl.errors.DistributedError) as caught:
            finish(world, call)
        messages.append(f"{type(caught.value).__name__}: {caught.value}")
    assert time.monotonic() - started < 5
    first, then = messages
    assert first.startswith("MismatchError")
    assert "rank 0 called all_reduce(float64 (3,)" in first
    assert "rank 1 called all_reduce(cupy float64 (3,)" in first
    # Rank 0 had started no NCCL call, and raises in the next call.
    assert then.startswith(("MismatchError", "GroupClosedError")[rank])
    assert "the ranks made different calls" in then


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", [False, True])
@on_ranks(("shm", 2), fresh=True)
def test_timeout_error_names_the_missing_rank(rank: int, size: int, elsewhere: bool) -> None:
    """Rank 1 calls nothing, or a verb of another group, until rank 0 has given up."""
    group = fl.new_group(range(size), timeout=0.5)
    cp, world = gpus(group), current_world().group
    world.all_reduce(np.ones(1))
    if rank == 1:
        work = world.all_reduce(np.ones(1), async_op=True) if elsewhere else None
        while group.backend().lost("waiting") is None:
            time.sleep(0.01)
    else:
        words: tuple[Any, ...] = (
            *(fl.errors.CollectiveTimeoutError, "rank 1 did not join within 0.5 seconds"),
            "Call 1 of this group is all_reduce(cupy float64 (3,)",
        )
        if elsewhere:
            first = "the ranks called verbs of different groups: this rank called all_reduce(cupy"
            words = MismatchError, first, "rank 1 called all_reduce(float64 (1,)"
        with raises(*words):
            finish(group, group.all_reduce, cp.zeros(3))
        work = world.all_reduce(np.ones(1), async_op=True) if elsewhere else None
    if work is not None:
        work.wait()


@on_ranks(("shm", 2), fresh=True)
def test_nccl_failure_on_one_rank_is_reported_to_the_other_ranks(rank: int, size: int) -> None:
    """NCCL fails on rank 0 only, after all ranks have called. Rank 0 asks for missing ranks."""
    world = current_world().group
    cp = gpus(world)
    world.all_reduce(cp.zeros(3), async_op=True)
    fl.all_reduce(np.ones(1))
    if rank == 0:
        world.gpus.communicator.lib.ncclCommGetAsyncError = lambda comm, state: 2
        words = "Every rank answered over", "over shared memory, so no rank is lost"
        with raises(fl.errors.DistributedError, *words) as caught:
            world.gpus.synchronize()
        assert type(caught.value) is fl.errors.DistributedError
        assert str(caught.value).startswith("[all_reduce] rank 0 of 2: NCCL ")
    else:
        why = r"rank 0 called nothing more, because NCCL failed: \[all_reduce\] rank 0"
        with pytest.raises(MismatchError, match=why):
            finish(world, world.all_reduce, cp.zeros(3))


@on_ranks(("shm", 2), ("gloo", 2), fresh=True)
def test_rank_that_leaves_after_its_calls_is_not_lost(rank: int, size: int) -> None:
    """Pending collectives end normally."""
    group = fl.new_group(range(size))
    cp = gpus(group)
    group.all_reduce(cp.zeros(3), async_op=True)
    group.all_reduce(np.ones(1))
    event = group.gpus._flights.newest().event
    if rank == 1:
        event.done = True
        group.close()
        fl.barrier()
        return
    fl.barrier()
    with group.gpus.communicator.lock:
        group.gpus._comparisons.find_lost("a test")
    event.done = True
    group.gpus.synchronize()


@on_ranks(("shm", 2), fresh=True)
def test_rejected_arguments_raise_on_every_rank(rank: int, size: int) -> None:
    """One rank passes invalid arguments. The other ranks raise instead of waiting."""
    group, messages = fl.new_group(range(size)), []
    cp = gpus(group)
    peer, x, locked = 1 - rank, cp.zeros(3), cp.zeros((4, 4))
    compared: list[tuple[Any, Any]] = [  # before data moves
        (lambda: group.all_gather(x, out=locked), lambda: group.all_gather(x)),
        (lambda: group.all_to_all(x, rows=[1]), lambda: group.all_to_all(x, rows=[2, 1])),
        (lambda: group.send(x.astype("S1"), peer), lambda: group.recv(x, peer)),
    ]
    begun: tuple[Any, Any] = (
        lambda: group.all_reduce(x, op="median"),
        lambda: finish(group, group.all_reduce, x),
    )
    for calls in (*compared, begun):
        with pytest.raises((TypeError, ValueError, MismatchError)) as caught:
            calls[rank == 0]()
        messages.append(f"{type(caught.value).__name__}: {caught.value}")
    # The communicator of the rank with invalid arguments has ended as well.
    with pytest.raises(MismatchError if rank else fl.errors.GroupClosedError):
        finish(group, group.all_reduce, x)
    kinds = (
        ["ValueError", "ValueError", "TypeError", "ValueError"] if rank else ["MismatchError"] * 4
    )
    assert [text.partition(":")[0] for text in messages] == kinds
    for text, verb in zip(
        messages, ("all_gather", "all_to_all", "send", "all_reduce"), strict=True
    ):
        assert rank or f"rank 1 called {verb}, and rejected its arguments (" in text
