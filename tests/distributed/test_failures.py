"""Calls that differ between ranks, and other mistakes: every rank raises and names the calls."""

import contextlib
import os
import re
import select
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.distributed.backend import exchange_bytes
from flashlight_py.distributed.calls import journal
from tests.distributed.conformance import (
    first_error,
    hosts_by_letter,
    late_message_mismatches,
    late_mismatch,
    mismatch_error,
    mismatch_now_or_later,
    on_ranks,
    slow,
    world_of,
)
from tests.distributed.harness import run_outcomes, run_ranks
from tests.distributed.processes import await_file


def first_rows(places: int = 1, is_reversed: int = 0) -> list[int]:
    """Return row counts for an array of 6 rows that all go to the first one or two ranks, or, if
    ``is_reversed``, to the last ranks."""
    rows = ([6] if places == 1 else [4, 2]) + [0] * (fl.get_world_size() - places)
    return rows[::-1] if is_reversed else rows


SYNC: dict[str, Any] = {"env": lambda rank: {"FLASHLIGHT_CHECKS": "sync"}}
zeros, several = np.zeros, fl.all_reduce_multiple

# Pairs of calls that do not match.
CALLS: dict[str, Any] = {
    "shape": lambda rank: fl.all_reduce(zeros((2, 3) if rank else (3, 2))),
    "size": lambda rank: fl.all_reduce(zeros(1_000_000 + rank)),
    "inline and not": lambda rank: fl.all_reduce(zeros(10 if rank else 1_000_000)),
    "dtype": lambda rank: fl.all_reduce(zeros(4, "f4" if rank else "i4")),
    "op": lambda rank: fl.all_reduce(zeros(4), op="max" if rank else "min"),
    "scale": lambda rank: fl.all_reduce(zeros(4), scale=1.0 + rank),
    "scale, slightly": lambda rank: fl.all_reduce(zeros(4), scale=1.0 + 1e-12 * rank),
    "root": lambda rank: fl.broadcast(zeros(4), root=min(rank, 1)),
    "verb": lambda rank: fl.barrier() if rank else fl.all_reduce(zeros(4)),
    "shape, reduce": lambda rank: fl.reduce(zeros(4 + rank)),
    "root, reduce": lambda rank: fl.reduce(zeros(4), root=min(rank, 1)),
    "op, large reduce": lambda rank: fl.reduce(zeros(90_000), op="max" if rank else "min"),
    "root, gather": lambda rank: fl.gather(zeros(4), root=min(rank, 1)),
    "dtype, gather": lambda rank: fl.gather(zeros(4, "f4" if rank else "i4")),
    "root, scatter": lambda rank: fl.scatter(zeros((6, 2)), root=min(rank, 1)),
    "out, scatter": lambda rank: (
        fl.scatter(None, out=zeros((7, 2))) if rank else fl.scatter(zeros((6, 2)))
    ),
    "out, large scatter": lambda rank: (
        fl.scatter(None, out=zeros(3, np.int8)) if rank else fl.scatter(zeros((6, 9000)))
    ),
    "shape, all_to_all": lambda rank: fl.all_to_all(zeros((6, 2 + min(rank, 1)))),
    "rows, all_to_all": lambda rank: fl.all_to_all(zeros(6), rows=first_rows() if rank else None),
    "columns, uneven all_to_all": lambda rank: fl.all_to_all(
        zeros((6, 2 + min(rank, 1))), rows=first_rows()
    ),
    "rows, reduce_scatter": lambda rank: fl.reduce_scatter(zeros((6, 3)), rows=first_rows(2, rank)),
    "rows or none, reduce_scatter": lambda rank: fl.reduce_scatter(
        zeros(6), rows=None if rank else first_rows()
    ),
    "rows, scatter": lambda rank: fl.scatter(zeros((6, 3)), rows=first_rows(2, rank)),
    "op, all_reduce_location": lambda rank: fl.all_reduce_location(
        zeros(3), op="max" if rank else "min"
    ),
    "bits or truth": lambda rank: fl.all_reduce(zeros(3, int), op="land" if rank else "or"),
    "rest of the shape": lambda rank: fl.all_gather(zeros((3, 2 + min(rank, 1)))),
    "shapes, list": lambda rank: several([zeros(3), zeros(4 + rank)]),
    "shapes, packed": lambda rank: several([zeros(3 + rank), zeros(5 - rank)], contiguous=True),
    "list length": lambda rank: several([*zeros((2 + rank, 3))], contiguous=True),
}


@on_ranks(("gloo", 3), ("mpi", 2), ("shm", 3, SYNC), slow=[("shm", 3), ("hierarchical", 3)])
def test_mismatch_raises_on_every_rank_and_names_both_calls(rank: int, size: int) -> None:
    for name, call in CALLS.items():
        message = mismatch_now_or_later(partial(call, rank))
        assert f"rank {rank} of {size}" in message, name
        assert "rank 0 called" in message, name
        assert np.all(fl.all_reduce(np.ones(5)) == size)  # the group remains usable


@on_ranks(("gloo", 3), slow=[("shm", 3)], lost=1)
def test_sync_distributed_raises_the_error_that_closed_the_group(rank: int, size: int) -> None:
    """A receive without a sender is older than the call that names the lost rank."""
    fl.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    arrays = np.ones((2, 4, 4))
    fl.irecv(arrays[0][:, ::2], 2 - rank)
    fl.all_reduce(arrays[1][:, ::2], async_op=True)
    with pytest.raises(fl.errors.PeerLostError, match=r"lost rank 1 \("):
        fl.sync_distributed()


@on_ranks(("gloo", 4), slow=[("shm", 4)], lost=1)
def test_errors_name_the_cause_once_and_later_errors_repeat_it(rank: int, size: int) -> None:
    """Rank 1 exits. Rank 3 detects it, rank 2 is notified by rank 3, rank 0 by both; twice each."""
    fl.all_reduce(np.zeros(10))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.2 * (size - 1 - rank))
    messages = []
    for _ in range(2):
        with pytest.raises(fl.errors.DistributedError) as caught:
            fl.all_reduce(np.zeros(10))
        messages.append(str(caught.value))
    time.sleep(0.2 * rank)
    first, second = messages
    assert "lost rank 1 (" in first
    assert "cannot be used any more because of rank 1: " in second
    assert first.count(" says") + first.count("gave up") <= 1, first


def wait_for_exiting_rank(rank: int, size: int, closes: bool) -> str:
    group = fl.new_group(range(size))
    first = os.pidfd_open(group.all_gather_object(os.getpid())[1])
    group.barrier()
    if rank == 1:
        if closes:
            group.close()
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        select.select([first], [], [])
        time.sleep(0.5)  # time for the reason of a failure to arrive
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(fl.errors.PeerLostError) as caught:
        group.recv(np.zeros(1), 0)
    return str(caught.value)


@pytest.mark.parametrize("closes", [False, *slow(True)])
def test_peer_lost_error_names_the_first_lost_rank(closes: bool) -> None:
    """Other ranks close their connections because of the loss, also if no reason arrives from them.

    A rank that has closed the group does not count as lost.
    """
    outcomes = run_outcomes(wait_for_exiting_rank, 3, closes, params={"BACKEND": "gloo"})
    assert outcomes[2].ok, outcomes[2].report()
    assert f"lost rank {0 if closes else 1} (" in outcomes[2].value


def skip_the_call(rank: int, size: int, seconds: float) -> str:
    fl.barrier()  # start of the timeouts of all ranks
    if rank == 1:
        time.sleep(seconds)  # like a stuck rank
        with pytest.raises(fl.errors.PeerLostError, match="gave up waiting for this rank"):
            fl.all_reduce(np.zeros(3))
        return "stayed away"
    with pytest.raises(fl.errors.CollectiveTimeoutError) as caught:
        fl.all_reduce(np.zeros(3))
    assert isinstance(caught.value, TimeoutError)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", "shm", "mpi"])
def test_timeout_error_names_a_rank_that_does_not_call(backend: str) -> None:
    outcomes = run_outcomes(skip_the_call, 3, 3.0, **world_of(backend, TIMEOUT=1))
    for rank in (0, 2):
        assert f"rank {rank} of 3: rank 1 did not join within 1 seconds" in outcomes[rank].value
    # In shared memory a late rank finds all calls and is in time.
    assert outcomes[1].value == "stayed away" or backend == "shm"


def stop_in_the_middle(rank: int, size: int, meeting: str) -> str:
    pids = fl.all_gather_object(os.getpid())
    fl.broadcast(np.zeros(7), root=1)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        fl.all_reduce(np.zeros(3))
    except fl.errors.CollectiveTimeoutError as error:
        return f"timeout: {error}"
    except fl.errors.PeerLostError as error:
        return f"lost: {error}"
    finally:
        if rank != 1:
            with open(meeting, "w" if rank else "r"):  # opens when both ranks know of the failure
                os.kill(pids[1], signal.SIGCONT)
        with contextlib.suppress(fl.errors.DistributedError):
            fl.distributed_shutdown()
    return "no error"


@pytest.mark.parametrize("backend", ["hierarchical", *slow("gloo", "shm", "mpi")])
def test_timeout_error_names_a_stopped_rank_and_its_last_call(backend: str, tmp_path: Path) -> None:
    os.mkfifo(meeting := str(tmp_path / "meeting"))
    texts = run_ranks(stop_in_the_middle, 3, meeting, **world_of(backend, TIMEOUT=1))
    late = [text for text in texts if text.startswith("timeout: ")]
    assert late, texts  # the second one receives the error of the first
    for text in late:
        assert "rank 1 did not join within 1 seconds" in text
        assert re.search("which is process .* timeout ", text, re.S)  # as torch needs it
    assert "broadcast(float64 (7,), root=1)" in late[0]
    assert re.search(r", [1-9]\d*\.\d s ago", late[0])


@on_ranks(("gloo", 2), slow=[("shm", 2), ("mpi", 2)], fresh=True)
def test_barrier_uses_its_own_timeout(rank: int, size: int, tmp_path: Path) -> None:
    fl.barrier()  # start of the timeouts of all ranks
    if rank == 1:
        await_file(tmp_path / "raised")
        # In shared memory the first rank is in time.
        assert "lost rank 0" in first_error(fl.barrier, fl.barrier)
    else:
        late = "rank 1 did not join within 0.2 seconds"
        with pytest.raises(fl.errors.CollectiveTimeoutError, match=late):
            fl.barrier(timeout=0.2)
        (tmp_path / "raised").touch()


@on_ranks(("gloo", 2), slow=[("shm", 2), ("mpi", 2)], fresh=True)
def test_wait_reacts_to_ctrl_c(rank: int, size: int, tmp_path: Path) -> None:
    fl.barrier()  # start of the timeouts of all ranks
    if rank == 1:
        await_file(tmp_path / "raised")
        # With Gloo the interrupted operation continues. In shared memory it ran on the interrupted
        # thread and cannot continue.
        with contextlib.suppress(fl.errors.PeerLostError):
            fl.all_reduce(np.zeros(3))
            fl.barrier()
        return
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        fl.all_reduce(np.zeros(3))
    (tmp_path / "raised").touch()
    with contextlib.suppress(fl.errors.GroupClosedError):
        fl.barrier()


@on_ranks(("gloo", 2), ("mpi", 2), slow=[("shm", 2)])
def test_wait_can_be_repeated_after_its_timeout_and_releases_the_gil(rank: int, size: int) -> None:
    x, ticks = np.full(3, 1.0), 0
    done = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not done.wait(0.01):
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    if rank == 1:
        time.sleep(0.5)
    work = fl.all_reduce(x, async_op=True)
    if rank == 0:
        with pytest.raises(fl.errors.CollectiveTimeoutError, match="still running"):
            work.wait(timeout=0.1)
        with pytest.raises(RuntimeError, match="before the operation ended"):
            work.result()
    ticks = 0
    fl.all_reduce(np.zeros(3))
    done.set()
    thread.join()
    assert work.wait() is x
    assert np.all(x == size)
    assert rank != 0 or ticks > 10


@pytest.mark.slow
@on_ranks(("gloo", 3), fresh=True, params={"TIMEOUT": 1})
def test_timeout_error_does_not_name_a_rank_that_reported_its_end(rank: int, size: int) -> None:
    """Regression: rank 1, which waited for rank 0 first, named both ranks."""
    if rank == 2:
        with pytest.raises(ZeroDivisionError), fl.abort_on_exception():
            raise ZeroDivisionError("on purpose")
        return
    if rank == 0:
        time.sleep(2.5)
    with pytest.raises(fl.errors.DistributedError) as caught:
        fl.barrier()
    if rank == 1:
        assert "lost rank 2" in str(caught.value)
        assert "on purpose" in str(caught.value)


@pytest.mark.parametrize("count", [10, 100_000])
@on_ranks(("gloo", 2), ("shm", 2), ("mpi", 2))
def test_operations_in_parallel_with_a_mismatch_continue(rank: int, size: int, count: int) -> None:
    peer = 1 - rank
    got = np.zeros(count)
    works = [fl.irecv(got, peer, tag=1), fl.isend(np.full(count, rank + 1.0), peer, tag=1)]
    with pytest.raises(fl.errors.MismatchError, match=r"test_failures\.py:\d+; rank 1 called"):
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
    lines = [f"distributed/test_failures.py:{line_of(fn)}" for fn in (one, two)]
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
        assert "test_failures.py:" in message
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


COUNTED = {
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
        for name, call in COUNTED.items():
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
