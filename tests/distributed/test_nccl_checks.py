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
from tests import cupy_stand_in
from tests.distributed import nccl_stand_in
from tests.distributed.conformance import on_ranks


class Stuck(nccl_stand_in.StandInNccl):
    """An NCCL that starts everything, and whose communicator can be aborted."""

    def _do(self, name: str, *arguments: Any) -> int:
        return 0


def gpus(group: Any) -> Any:
    """Connect the stand-ins of GPUs, and return a module that creates arrays on them."""
    nccl = nccl_stand_in.install(group.backend())
    nccl.__class__ = Stuck
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
        with pytest.raises(fl.errors.MismatchError) as caught:
            finish(group, call, group, cp, rank)
        assert time.monotonic() - started < 5, name
        message = str(caught.value)
        assert f"rank {rank} of 2: the ranks made different calls in call 2 of" in message
        assert "rank 0 called " in message
        assert "rank 1 called " in message
        assert message.count("test_nccl_checks.py:") == 2
        with pytest.raises(fl.errors.GroupClosedError, match="made different calls"):
            group.all_reduce(cp.zeros(3))


@on_ranks(("hierarchical", 3), fresh=True)
def test_mismatch_between_hosts_raises_on_every_rank(rank: int, size: int) -> None:
    world = current_world().group
    cp = gpus(world)
    with pytest.raises(fl.errors.MismatchError) as caught:
        finish(world, fl.all_reduce, cp.zeros(3 if rank < 2 else 4))
    message = str(caught.value)
    assert "call 1 of this group: ranks 0, 1 called all_reduce(cupy float64 (3,)" in message
    assert "rank 2 called all_reduce(cupy float64 (4,)" in message


@on_ranks(("shm", 2), fresh=True)
def test_barrier_during_a_reduction_is_reported_once(rank: int, size: int) -> None:
    """The shutdown does not raise an error that was raised before."""
    world = current_world().group
    cp = gpus(world)
    call = (fl.barrier,) if rank == 0 else (fl.all_reduce, cp.zeros(3))
    with pytest.raises(fl.errors.MismatchError) as caught:
        finish(world, *call)
    fl.distributed_shutdown()
    assert "rank 0 called barrier()" in str(caught.value)
    assert "rank 1 called all_reduce(cupy float64 (3,)" in str(caught.value)


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
    with pytest.raises(fl.errors.PeerLostError) as caught:
        finish(world, call)
    assert time.monotonic() - started < 2
    text = str(caught.value)
    assert ("lost rank 1 (its process has ended)" if has_called else "lost rank 1 (") in text
    assert ", which is process " in text


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
    kind = fl.errors.GroupClosedError if rank == size - 1 else fl.errors.PeerLostError
    with pytest.raises(kind) as caught:
        world.gpus.synchronize()
    assert time.monotonic() - started < 2
    if rank < size - 1:
        assert f"lost rank {size - 1}, which is process " in str(caught.value)
        assert "ZeroDivisionError: of its own" in str(caught.value)
        assert "in test_exception_of_another_rank" in str(caught.value)


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
        kind = fl.errors.MismatchError if elsewhere else fl.errors.CollectiveTimeoutError
        with pytest.raises(kind) as caught:
            finish(group, group.all_reduce, cp.zeros(3))
        output = (
            "rank 1 did not join within 0.5 seconds",
            "Call 1 of this group is all_reduce(cupy float64 (3,)",
        )
        if elsewhere:
            output = (
                "the ranks called verbs of different groups: this rank called all_reduce(cupy",
                "rank 1 called all_reduce(float64 (1,)",
            )
        assert all(words in str(caught.value) for words in output)
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
        with pytest.raises(fl.errors.DistributedError, match="Every rank answered over") as caught:
            world.gpus.synchronize()
        assert type(caught.value) is fl.errors.DistributedError
        assert str(caught.value).startswith("[all_reduce] rank 0 of 2: NCCL ")
        assert "over shared memory, so no rank is lost" in str(caught.value)
    else:
        why = r"rank 0 called nothing more, because NCCL failed: \[all_reduce\] rank 0"
        with pytest.raises(fl.errors.MismatchError, match=why):
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
        with pytest.raises((TypeError, ValueError, fl.errors.MismatchError)) as caught:
            calls[rank == 0]()
        messages.append(f"{type(caught.value).__name__}: {caught.value}")
    # The communicator of the rank with invalid arguments has ended as well.
    with pytest.raises(fl.errors.MismatchError if rank else fl.errors.GroupClosedError):
        finish(group, group.all_reduce, x)
    kinds = [text.partition(":")[0] for text in messages]
    if rank:
        assert kinds == ["ValueError", "ValueError", "TypeError", "ValueError"]
        return
    assert kinds == ["MismatchError"] * 4
    for text, verb in zip(
        messages, ("all_gather", "all_to_all", "send", "all_reduce"), strict=True
    ):
        assert f"rank 1 called {verb}, and rejected its arguments (" in text
