"""Ranks that call different things through NCCL, on real processes with the stand-in for a GPU.

The stand-in's device never ends what it is given, as a real one that waits for the others.
"""

from __future__ import annotations

import mmap
import os
import signal
import time
from typing import Any

import pytest

import flashlight_py as fl
from flashlight_py.distributed.backends.nccl.ring import Ring, bytes_of_rings, first_difference
from flashlight_py.distributed.world import current_world
from tests.distributed import conformance, cuda_stand_in
from tests.distributed.harness import run_outcomes, run_ranks


class Stuck(cuda_stand_in.StandInNccl):
    """NCCL that begins everything, and whose communicator can be aborted."""

    def _do(self, name: str, *arguments: Any) -> int:
        return 0

    def ncclCommAbort(self, comm: Any) -> int:
        return 0


def never_done(event: Any, block: bool = False, disable_timing: bool = False) -> None:
    event.number, event.done = next(cuda_stand_in.Event._numbers), False


def gpus(group: Any) -> Any:
    """Join the stand-ins of GPUs, and return what makes arrays on them."""
    nccl = cuda_stand_in.install(group.backend())
    nccl.__class__ = Stuck
    cuda_stand_in.Event.__init__ = never_done  # type: ignore[method-assign]
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


def differ(rank: int, size: int) -> dict[str, tuple[str, str, float]]:
    """Differ in each way, in a group of its own: it breaks."""
    told = {}
    for name, call in CALLS.items():
        group = fl.new_group(range(size))
        cp = gpus(group)
        group.all_reduce(cp.zeros(7), async_op=True)  # the same on all
        started = time.monotonic()
        with pytest.raises(fl.errors.MismatchError) as caught:
            finish(group, call, group, cp, rank)
        took = time.monotonic() - started
        with pytest.raises(fl.errors.GroupClosedError) as after:
            group.all_reduce(cp.zeros(3))
        told[name] = str(caught.value), str(after.value), took
    return told


def test_a_mismatch_aborts_and_raises_on_every_rank() -> None:
    for rank, told in enumerate(run_ranks(differ, 2)):
        for message, after, took in told.values():
            assert f"rank {rank} of 2: the ranks called different things in call 2 of" in message
            assert "rank 0 called " in message
            assert "rank 1 called " in message
            assert message.count("test_nccl_checks.py:") == 2
            assert "called different things" in after
            assert took < 5


def test_a_mismatch_between_hosts_reaches_every_rank() -> None:
    outcomes = run_outcomes(differ_between_hosts, 3, env=conformance.two_hosts)
    for outcome in outcomes:
        assert outcome.ok, outcome.report()
        assert (
            "in call 1 of this group: the host of rank 0 called all_reduce(cupy float64 (3,)"
            in (outcome.value)
        )
        assert "the host of rank 2 called all_reduce(cupy float64 (4,)" in outcome.value


def differ_between_hosts(rank: int, size: int) -> str:
    world = current_world().group
    cp = gpus(world)
    with pytest.raises(fl.errors.MismatchError) as caught:
        finish(world, fl.all_reduce, cp.zeros(3 if rank < 2 else 4))
    return str(caught.value)


def one_in_a_barrier(rank: int, size: int) -> str:
    """What has been reported once is not raised again by the shutdown."""
    world = current_world().group
    cp = gpus(world)
    call = (fl.barrier,) if rank == 0 else (fl.all_reduce, cp.zeros(3))
    with pytest.raises(fl.errors.MismatchError) as caught:
        finish(world, *call)
    fl.distributed_shutdown()
    return str(caught.value)


def test_a_barrier_beside_a_reduction_is_reported_once() -> None:
    for message in run_ranks(one_in_a_barrier, 2):
        assert "rank 0 called barrier()" in message
        assert "rank 1 called all_reduce(cupy float64 (3,)" in message


def die(rank: int, size: int) -> str:
    world = current_world().group
    cp = gpus(world)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(fl.errors.PeerLostError) as caught:
        finish(world, fl.all_reduce, cp.zeros(3))
    assert time.monotonic() - started < 2
    return str(caught.value)


def test_a_rank_that_dies_is_lost_within_two_seconds() -> None:
    outcomes = run_outcomes(die, 2)
    assert outcomes[0].ok, outcomes[0].report()
    assert "lost rank 1 (its process has ended), which is process " in outcomes[0].value


# The rings ----------------------------------------------------------------------------------


@pytest.fixture
def rings() -> list[Ring]:
    memory = mmap.mmap(-1, bytes_of_rings(2))
    return [Ring(memory, rank) for rank in range(2)]


def test_ranks_that_post_the_same_agree_however_far_apart(rings: list[Ring]) -> None:
    assert first_difference(rings, 0) == (0, [])
    for number in range(3000):
        rings[0].post(f"call {number}", "same")
    assert first_difference(rings, 0) == (0, [])
    for _ in range(2500):
        rings[1].post("a call", "same")
    assert first_difference(rings, 0) == (2500, [])


def test_the_first_call_that_differs_is_found(rings: list[Ring]) -> None:
    for rank, ring in enumerate(rings):
        for number in range(100):
            ring.post(f"call {number} of rank {rank}", "odd" if number == 60 and rank else "same")
    agreed, calls = first_difference(rings, 0)
    assert agreed == 60
    assert [call.call for call in calls if call] == [
        "call 60 of rank 0",
        "call 60 of rank 1",
    ]
    assert all(call.site.startswith("distributed/test_nccl_checks.py:") for call in calls if call)


def test_a_difference_that_is_overwritten_is_still_one(rings: list[Ring]) -> None:
    for rank, ring in enumerate(rings):
        ring.post("a call", f"rank {rank}")
        for _ in range(1500):
            ring.post("a call", "same")
    agreed, calls = first_difference(rings, 0)
    assert calls
    assert agreed >= 1501 - 1024 - 1


def test_an_entry_that_is_being_written_is_not_taken(rings: list[Ring]) -> None:
    for ring in rings:
        ring.post("a call", "same")
    at = rings[1]._place(1) + 24
    rings[1]._memory[at : at + 1] = b"?"
    assert rings[1].read(1) is None
    assert first_difference(rings, 0) == (0, [])


def test_the_first_word_counts(rings: list[Ring]) -> None:
    assert rings[0].word() is None
    rings[0].say(1, "this")
    rings[0].say(2, "that")
    assert rings[0].word() == (1, "this")


def refuse(rank: int, size: int) -> list[str]:
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
    return told


def test_a_refusal_is_told_to_all_ranks() -> None:
    others, own = run_ranks(refuse, 2)
    assert [text.partition(":")[0] for text in own] == [
        *["ValueError"] * 2,
        "TypeError",
        "ValueError",
    ]
    for text, verb in zip(others, ("all_gather", "all_to_all", "send", "all_reduce"), strict=True):
        assert text.startswith("MismatchError"), text
        assert f"rank 1 called {verb}, and refused its arguments (" in text
