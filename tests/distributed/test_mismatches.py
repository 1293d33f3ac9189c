"""Calls that differ between ranks: errors name all calls and their sites, and no array changes."""

import contextlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.distributed.backend import exchange_bytes
from flashlight_py.distributed.calls import journal
from tests.distributed.conformance import (
    hosts_by_letter,
    late_message_mismatches,
    late_mismatch,
    mismatch_error,
    mismatch_now_or_later,
    on_ranks,
)
from tests.distributed.harness import run_ranks

SYNC: dict[str, Any] = {"env": lambda rank: {"FLASHLIGHT_CHECKS": "sync"}}


@pytest.mark.parametrize("count", [10, 100_000])
@on_ranks(("gloo", 2), ("shm", 2), ("mpi", 2))
def test_operations_in_parallel_with_a_mismatch_continue(rank: int, size: int, count: int) -> None:
    peer = 1 - rank
    got = np.zeros(count)
    works = [fl.irecv(got, peer, tag=1), fl.isend(np.full(count, rank + 1.0), peer, tag=1)]
    with pytest.raises(fl.errors.MismatchError, match=r"test_mismatches\.py:\d+; rank 1 called"):
        fl.all_reduce(np.zeros(3 + rank))
    other = np.full(50_000, 7.0)
    array = np.zeros(50_000, np.float32)
    exchange = [lambda: fl.send(array, 1, 2), lambda: fl.recv(other, 0, 2)]
    with pytest.raises(fl.errors.MismatchError, match=r"different calls in (a )?message"):
        exchange[rank]()
    assert np.all(other == 7.0)
    for work in works:
        work.wait()
    assert np.all(got == peer + 1)


# A file name may contain bytes that are not text, which Python escapes.
NO_TEXT = compile("fl.all_reduce(np.zeros(3 + rank))", "/home/caf\udce9/train.py", "exec")


def one(starts: bool) -> None:
    ended(fl.all_reduce(np.zeros(3), async_op=starts))


def two(starts: bool) -> None:
    ended(fl.broadcast(np.zeros(3), async_op=starts))


def ended(started: Any) -> None:
    if isinstance(started, fl.Work):
        started.wait()


@pytest.mark.parametrize("starts", [False, True])
@on_ranks(("gloo", 2), ("shm", 3), ("mpi", 2), ("hierarchical", 3))
def test_mismatch_error_names_call_sites_of_all_ranks(rank: int, size: int, starts: bool) -> None:
    lines = [f"distributed/test_mismatches.py:{line_of(fn)}" for fn in (one, two)]
    with pytest.raises(fl.errors.MismatchError) as first:
        (two if rank else one)(starts)
    late_mismatch()
    with pytest.raises(fl.errors.MismatchError, match=r" at caf\\udce9/train.py:1") as then:
        exec(NO_TEXT, {**globals(), "rank": rank})
    late_mismatch()
    message = str(first.value)
    assert "rank 0 called all_reduce(float64 (3,), op=sum, scale=1" in message
    assert all(line in message for line in lines), message
    numbers = number_of(message), number_of(str(then.value))
    assert fl.all_gather_object(numbers) == [(numbers[0], numbers[0] + 2)] * size


def number_of(message: str) -> int:
    match = re.search(r"made different calls in call (\d+) of this group", message)
    assert match, message
    return int(match[1])


def line_of(function: Any) -> int:
    line: int = function.__code__.co_firstlineno
    return line + 1


COMPOSED = {
    "broadcast_object": (lambda: fl.broadcast_object("hello"), lambda: fl.broadcast(ONE.copy())),
    "all_gather_object": (lambda: fl.all_gather_object("hello"), lambda: fl.all_gather(ONE)),
    "gather_object": (lambda: fl.gather_object("hello"), lambda: fl.all_gather(ONE)),
    "scatter_object": (lambda: fl.scatter_object(OBJECTS), lambda: fl.broadcast(np.zeros(3, int))),
    "new_group": (lambda: fl.new_group([0, 1]), lambda: fl.all_gather(ONE)),
    "split": (lambda: fl.split(0), lambda: fl.new_group([0, 1])),
    "all_to_all(": (lambda: fl.all_to_all(np.ones(3), rows=[1] * 3), lambda: fl.split(0)),
}
ONE, OBJECTS = np.ones(1, int), ["a", "b", "c"]


@pytest.mark.parametrize("odd", range(3))
@on_ranks(("gloo", 3), ("shm", 3), ("mpi", 3), ("hierarchical", 3))
def test_mismatch_error_separates_a_verb_from_its_steps(rank: int, size: int, odd: int) -> None:
    for name, pair in COMPOSED.items():
        message = mismatch_now_or_later(pair[rank == odd])
        assert f"called {name}" in message, message
        assert "test_mismatches.py:" in message
        assert fl.all_reduce(np.ones(2))[1] == size  # the ranks are in step again


@on_ranks(("gloo", 4), slow=[("shm", 4)], fresh=True, params={"TIMEOUT": 1})
def test_calls_of_different_groups_raise_mismatch_error(rank: int, size: int) -> None:
    everybody = fl.new_group(range(size), timeout=30)  # rank 0 gives up first
    with pytest.raises(fl.errors.DistributedError) as caught:
        (everybody if rank else fl).all_reduce(np.zeros(3))  # type: ignore[attr-defined]
    with contextlib.suppress(fl.errors.DistributedError):
        fl.distributed_shutdown()
    call = "called all_reduce(float64 (3,), op=sum, scale=1) as rank"
    every = "; ".join(f"rank {r} {call} {r} of a group of 4" for r in (1, 2, 3))
    why = f"of different groups: this rank {call} 0 of a group of 4; {every}. They waited 1 seconds"
    assert rank or isinstance(caught.value, fl.errors.MismatchError)
    assert rank or why in str(caught.value)


MANY = [(1,) * 8 + (2, 3), (1,) * 8 + (3, 2), (1,) * 7 + (2, 1, 3)]


@on_ranks(*(("gloo", 2), ("shm", 3), ("hierarchical", 3), ("mpi", 2)), ("shm", 3, SYNC))
def test_different_ninth_dimensions_raise_mismatch_error(rank: int, size: int) -> None:
    for shape in MANY[1:]:
        for call in (fl.all_reduce, fl.broadcast, fl.all_gather, one_message):
            if call is one_message and rank > 1:
                continue
            x = np.full(shape if rank == 1 else MANY[0], rank + 1.0)
            now = mismatch_error(lambda call=call, x=x: call(x))
            assert not now or np.all(x == rank + 1)
            later = late_message_mismatches(1 - rank) if call is one_message else late_mismatch()
            assert now or later
            assert "ranks 0, 1 " not in now + later  # as if both had made the same call
    x = np.ones(MANY[0])
    assert np.all(fl.all_reduce(x) == size)
    assert fl.all_gather(x).shape == (size, *MANY[0][1:])


def one_message(x: Any) -> None:
    peer = 1 - fl.get_world_rank()
    fl.sendrecv(x, peer, out=x.copy(), src=peer)


def only_first_checks(rank: int) -> dict[str, str]:
    return {"FLASHLIGHT_CHECKS": "1" if rank == 0 else "0"}


@on_ranks(("shm", 2), fresh=True, env=only_first_checks, init=None)
def test_init_raises_if_flashlight_checks_differs(rank: int, size: int, tmp_path: Path) -> None:
    why = "FLASHLIGHT_CHECKS is 0 on rank 1 only"
    params = {"FILE_PATH": str(tmp_path / "meet")}
    with pytest.raises(fl.errors.BackendUnavailableError, match=why):
        fl.distributed_init(fl.DistributedInit.FILE_SYSTEM, rank, size, params)


def differ_unchecked(rank: int, size: int, count: int) -> str:
    assert np.all(fl.all_reduce(np.ones(4)) == size)
    with pytest.raises(fl.errors.DistributedError) as caught:
        fl.all_reduce(np.zeros(count if rank < 2 else count + 1))
    return type(caught.value).__name__


@pytest.mark.parametrize("count", [4, 200_000])  # compared by all ranks; by one rank of each host
def test_unchecked_mismatch_between_hosts_ends_the_group(count: int) -> None:
    env = hosts_by_letter("aabb", FLASHLIGHT_CHECKS="0")
    names = run_ranks(differ_unchecked, 4, count, env=env)
    assert set(names) <= {"MismatchError", "PeerLostError", "GroupClosedError"}
    assert "MismatchError" in names


CALLS = {
    "shared_empty": lambda group: group.shared_empty(3),
    "host_array": lambda group: group.host_array(lambda: np.ones(3)),
    "a short object": lambda group: group.all_gather_object("x"),
    "a long object": lambda group: group.all_gather_object("x" * 5000),
    "a long object of one": lambda group: group.broadcast_object("x" * 5000),
    "objects": lambda group: group.scatter_object(["x" * 5000] * group.size),
    "unequal parts": lambda group: group.all_to_all(np.ones(group.size), rows=[1] * group.size),
    "a group": lambda group: group.new_group(range(group.size)).close(),
    "a split": lambda group: group.split(0).close(),
    "several": lambda group: group.all_reduce_multiple([np.ones(2), np.ones(3)]),
    "what runs natively": lambda group: group.all_reduce(np.ones(2)),
    "what no user has called": lambda group: exchange_bytes(group.backend(), b"x" * 5000),
    "a message": lambda group: group.sendrecv(
        np.ones(1), (group.rank + 1) % group.size, out=np.ones(1), src=(group.rank - 1) % group.size
    ),
}


@on_ranks(("gloo", 3), ("shm", 3), ("hierarchical", 3), slow=[("mpi", 3)])
def test_errors_and_flight_records_count_calls_alike(rank: int, size: int) -> None:
    world = fl.new_group(range(size))  # has its own count
    for group in (world, world.new_group([1, 0])):
        if not group.is_member:
            continue
        for name, call in CALLS.items():
            call(group)
            differ(group, name)
        late = group.all_reduce(np.ones(2 + group.rank), async_op=True)
        due = calls_of(group)
        group.all_gather_object("x" * 5000)  # later calls do not count
        with pytest.raises(fl.errors.MismatchError, match=f" in call {due} of this group"):
            late.wait()
    world.close()


def differ(group: Any, name: str) -> None:
    """Fail in a plain call, and in the first step of composed calls."""
    for call in (
        lambda: group.all_reduce(np.ones(2 + group.rank)),
        lambda: group.all_gather_object("x") if group.rank else group.barrier(),
        lambda: group.all_reduce(None if group.rank else np.ones(2)),
    ):
        with pytest.raises((TypeError, fl.errors.MismatchError)) as caught:
            call()
        if not isinstance(caught.value, TypeError):
            assert number_of(str(caught.value)) == calls_of(group), (name, str(caught.value))


def calls_of(group: Any) -> int:
    return int(journal.groups()[group.journal.name]["calls"])
