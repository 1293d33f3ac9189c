"""Ranks that call different things through NCCL, on real processes with the stand-in for a GPU.

The stand-in's device never ends what it is given, as a real one that waits for the others.
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
    """NCCL that begins everything, and whose communicator can be aborted."""

    def _do(self, name: str, *arguments: Any) -> int:
        return 0


def gpus(group: Any) -> Any:
    """Join the stand-ins of GPUs, and return what makes arrays on them."""
    nccl = nccl_stand_in.install(group.backend())
    nccl.__class__ = Stuck
    cupy_stand_in.Event.ends_at_once = False
    group.join_gpus()
    import cupy

    return cupy


def finish(group: Any, verb: Any, *args: Any) -> None:
    """Call, and wait: the host itself waits for nothing."""
    verb(*args)
    group.synchronize()


CALLS: dict[str, Any] = {
    "dtype": lambda g, cp, rank: g.all_reduce(cp.zeros(3, "float32" if rank else "float64")),
    "shape": lambda g, cp, rank: g.all_reduce(cp.zeros((2, 3) if rank else (3, 2))),
    "op": lambda g, cp, rank: g.all_reduce(cp.zeros(3), op="max" if rank else "min"),
    "scale": lambda g, cp, rank: g.all_reduce(cp.zeros(3), scale=1.0 + rank),
    "root": lambda g, cp, rank: g.broadcast(cp.zeros(3), root=min(rank, 1)),
    "verb": lambda g, cp, rank: (g.reduce if rank else g.all_reduce)(cp.zeros(3)),
    "a verb of the CPU": lambda g, cp, rank: (g.all_gather if rank else g.all_reduce)(cp.zeros(3)),
}


@on_ranks(("shm", 2), fresh=True)
def test_a_mismatch_aborts_and_raises_on_every_rank(rank: int, size: int) -> None:
    for name, call in CALLS.items():
        group = fl.new_group(range(size))
        cp = gpus(group)
        group.all_reduce(cp.zeros(7), async_op=True)  # the same on all
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
def test_a_mismatch_between_hosts_reaches_every_rank(rank: int, size: int) -> None:
    world = current_world().group
    cp = gpus(world)
    with pytest.raises(fl.errors.MismatchError) as caught:
        finish(world, fl.all_reduce, cp.zeros(3 if rank < 2 else 4))
    message = str(caught.value)
    assert "call 1 of this group: ranks 0, 1 called all_reduce(cupy float64 (3,)" in message
    assert "rank 2 called all_reduce(cupy float64 (4,)" in message


@on_ranks(("shm", 2), fresh=True)
def test_a_barrier_beside_a_reduction_is_reported_once(rank: int, size: int) -> None:
    """What has been reported once is not raised again by the shutdown."""
    world = current_world().group
    cp = gpus(world)
    call = (fl.barrier,) if rank == 0 else (fl.all_reduce, cp.zeros(3))
    with pytest.raises(fl.errors.MismatchError) as caught:
        finish(world, *call)
    fl.distributed_shutdown()
    assert "rank 0 called barrier()" in str(caught.value)
    assert "rank 1 called all_reduce(cupy float64 (3,)" in str(caught.value)


@pytest.mark.parametrize("has_called", [False, True])
@on_ranks(("shm", 2), ("gloo", 2), lost=1)
def test_a_rank_that_dies_is_lost_within_two_seconds(
    rank: int, size: int, has_called: bool
) -> None:
    """Rank 1 is killed before or after its call, which nothing on the CPU waits for any more."""
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


@on_ranks(("shm", 2), ("gloo", 2), ("hierarchical", 3), fresh=True)
def test_an_exception_of_another_rank_ends_what_is_on_its_way(rank: int, size: int) -> None:
    """The last rank raises when all have called, and goes on: its process does not end."""
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
        assert "in test_an_exception_of_another_rank" in str(caught.value)


@on_ranks(("shm", 2), fresh=True)
def test_a_call_with_an_array_of_the_other_kind_is_a_mismatch(rank: int, size: int) -> None:
    """One calls with a NumPy array, the other with a CuPy array: what then, and after that."""
    world = current_world().group
    cp, told = gpus(world), []
    calls: list[Any] = [lambda: fl.all_reduce(np.zeros(3)), lambda: fl.all_reduce(cp.zeros(3))]
    started = time.monotonic()
    for call in (calls[rank], calls[1]):
        with pytest.raises(fl.errors.DistributedError) as caught:
            finish(world, call)
        told.append(f"{type(caught.value).__name__}: {caught.value}")
    assert time.monotonic() - started < 5
    first, then = told
    assert first.startswith("MismatchError")
    assert "rank 0 called all_reduce(float64 (3,)" in first
    assert "rank 1 called all_reduce(cupy float64 (3,)" in first
    # Rank 0 had not begun anything with NCCL, and finds out by the next call.
    assert then.startswith(("MismatchError", "GroupClosedError")[rank])
    assert "the ranks made different calls" in then


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", [False, True])
@on_ranks(("shm", 2), fresh=True)
def test_a_rank_that_does_not_call_is_named_after_the_timeout(
    rank: int, size: int, elsewhere: bool
) -> None:
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
        said = (
            "rank 1 did not join within 0.5 seconds",
            "Call 1 of this group is all_reduce(cupy float64 (3,)",
        )
        if elsewhere:
            said = (
                "the ranks called verbs of different groups: this rank called all_reduce(cupy",
                "rank 1 called all_reduce(float64 (1,)",
            )
        assert all(words in str(caught.value) for words in said)
        work = world.all_reduce(np.ones(1), async_op=True) if elsewhere else None
    if work is not None:
        work.wait()


@on_ranks(("shm", 2), fresh=True)
def test_a_failure_of_nccl_on_one_rank_is_reported_to_the_others(rank: int, size: int) -> None:
    """NCCL fails on rank 0 alone, when all have called: it asks who is there."""
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
def test_a_rank_that_leaves_when_it_has_done_its_part_is_not_lost(rank: int, size: int) -> None:
    """A rank that has done its part, and leaves, is not lost: what is on its way ends well."""
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
def test_a_refusal_is_told_to_all_ranks(rank: int, size: int) -> None:
    """One rank refuses its arguments: the others hear of it where they would wait."""
    group, told = fl.new_group(range(size)), []
    cp = gpus(group)
    peer, x, locked = 1 - rank, cp.zeros(3), cp.zeros((4, 4))
    compared: list[tuple[Any, Any]] = [  # before anything moves
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
        told.append(f"{type(caught.value).__name__}: {caught.value}")
    # The communicator of the rank that has refused has ended as well.
    with pytest.raises(fl.errors.MismatchError if rank else fl.errors.GroupClosedError):
        finish(group, group.all_reduce, x)
    kinds = [text.partition(":")[0] for text in told]
    if rank:
        assert kinds == ["ValueError", "ValueError", "TypeError", "ValueError"]
        return
    assert kinds == ["MismatchError"] * 4
    for text, verb in zip(told, ("all_gather", "all_to_all", "send", "all_reduce"), strict=True):
        assert f"rank 1 called {verb}, and rejected its arguments (" in text
