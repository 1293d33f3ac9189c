"""What ranks get wrong against each other raises on every rank, and names who and what."""

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
from tests.distributed.conformance import on_ranks, ranks_in, world_of
from tests.distributed.harness import run_outcomes, run_ranks, run_survivors
from tests.distributed.told import first_error, told_now_or_later

SHM, MPI = (pytest.param(name, marks=pytest.mark.slow) for name in ("shm", "mpi"))
ranks = ranks_in(*((b, n) for b in ("gloo", "mpi") for n in (2, 3)), slow=[("shm", 2), ("shm", 3)])
pairs = on_ranks(("gloo", 2), ("mpi", 2), slow=[("shm", 2)])


@pytest.fixture(params=["gloo", SHM])
def params(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"BACKEND": request.param}


def all_first(places: int = 1) -> list[int]:
    """Return the rows of an array of 6 that all go to the first rank, or to the first two."""
    first = [6] if places == 1 else [4, 2]
    return first + [0] * (fl.get_world_size() - places)


# What the ranks call is not the same.
CALLS: dict[str, Any] = {
    "shape": lambda rank: fl.all_reduce(np.zeros((2, 3) if rank else (3, 2))),
    "size": lambda rank: fl.all_reduce(np.zeros(1_000_000 + rank)),
    "inline and not": lambda rank: fl.all_reduce(np.zeros(10 if rank else 1_000_000)),
    "dtype": lambda rank: fl.all_reduce(np.zeros(4, np.float32 if rank else np.int32)),
    "op": lambda rank: fl.all_reduce(np.zeros(4), op="max" if rank else "min"),
    "scale": lambda rank: fl.all_reduce(np.zeros(4), scale=1.0 + rank),
    "root": lambda rank: fl.broadcast(np.zeros(4), root=min(rank, 1)),
    "verb": lambda rank: fl.barrier() if rank else fl.all_reduce(np.zeros(4)),
    "shape of a reduce": lambda rank: fl.reduce(np.zeros(4 + rank)),
    "root of a reduce": lambda rank: fl.reduce(np.zeros(4), root=min(rank, 1)),
    "op of a large reduce": lambda rank: fl.reduce(np.zeros(90_000), op="max" if rank else "min"),
    "root of a gather": lambda rank: fl.gather(np.zeros(4), root=min(rank, 1)),
    "dtype of a gather": lambda rank: fl.gather(np.zeros(4, np.float32 if rank else np.int32)),
    "root of a scatter": lambda rank: fl.scatter(np.zeros((6, 2)), root=min(rank, 1)),
    "out of a scatter": lambda rank: fl.scatter(
        np.zeros((6, 2)) if not rank else None, out=np.zeros((7, 2)) if rank else None
    ),
    "out of a large scatter": lambda rank: fl.scatter(
        np.zeros((6, 9000)) if not rank else None, out=np.zeros(3, np.int8) if rank else None
    ),
    "shape of an all_to_all": lambda rank: fl.all_to_all(np.zeros((6, 2 + min(rank, 1)))),
    "rows of an all_to_all": lambda rank: fl.all_to_all(
        np.zeros(6), rows=all_first() if rank else None
    ),
    "columns of an uneven all_to_all": lambda rank: fl.all_to_all(
        np.zeros((6, 2 + min(rank, 1))), rows=all_first()
    ),
    "rows of a reduce_scatter": lambda rank: fl.reduce_scatter(
        np.zeros((6, 3)), rows=all_first(2)[:: -1 if rank else 1]
    ),
    "rows or none in a reduce_scatter": lambda rank: fl.reduce_scatter(
        np.zeros(6), rows=None if rank else all_first()
    ),
    "rows of a scatter": lambda rank: fl.scatter(
        np.zeros((6, 3)), rows=all_first(2)[:: -1 if rank else 1]
    ),
    "op of an all_reduce_location": lambda rank: fl.all_reduce_location(
        np.zeros(3), op="max" if rank else "min"
    ),
    "bits or truth": lambda rank: fl.all_reduce(np.zeros(3, int), op="land" if rank else "or"),
    "rest of the shape": lambda rank: fl.all_gather(np.zeros((3, 2 + min(rank, 1)))),
    "shapes in a list": lambda rank: fl.all_reduce_multiple([np.zeros(3), np.zeros(4 + rank)]),
    "shapes of packed arrays": lambda rank: fl.all_reduce_multiple(
        [np.zeros(3 + rank), np.zeros(5 - rank)], contiguous=True
    ),
    "list length": lambda rank: fl.all_reduce_multiple(
        [np.zeros(3)] * 0 + [np.zeros(3) for _ in range(2 + rank)], contiguous=True
    ),
}


@on_ranks()
def test_a_mismatch_raises_on_every_rank_and_names_both_calls(rank: int, size: int) -> None:
    for name, call in CALLS.items():
        message = told_now_or_later(partial(call, rank))
        assert f"rank {rank} of {size}" in message, name
        assert "rank 0 called" in message, name
        assert np.all(fl.all_reduce(np.ones(5)) == size)  # the group lives on


def reduce_forever(count: int) -> None:
    while True:
        fl.all_reduce(np.zeros(count))


def die_in_the_middle(rank: int, size: int, count: int, victim: int) -> None:
    fl.all_reduce(np.zeros(count))
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    why = rf"(?s)lost rank {victim}\b.*, which is process "
    with pytest.raises(fl.errors.PeerLostError, match=why):
        reduce_forever(count)
    assert time.monotonic() - started < 10, "the others noticed late"
    with pytest.raises(fl.errors.GroupClosedError):
        fl.barrier()


@pytest.mark.parametrize("count", [10, 2_000_000])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_ends_the_others_and_is_named(params: Any, count: int, victim: int) -> None:
    run_survivors(die_in_the_middle, 3, victim, count, victim, params=params)


@on_ranks(("gloo", 3), slow=[("shm", 3)], lost=1)
def test_sync_distributed_raises_the_cause_of_the_end_of_a_group(rank: int, size: int) -> None:
    """A receive that no rank sends to is older than the call that names the lost rank."""
    fl.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    arrays = np.ones((2, 4, 4))
    fl.irecv(arrays[0][:, ::2], 2 - rank)
    fl.all_reduce(arrays[1][:, ::2], async_op=True)
    with pytest.raises(fl.errors.PeerLostError, match=r"lost rank 1 \("):
        fl.sync_distributed()


@on_ranks(("gloo", 4), ("shm", 4), lost=1)
def test_the_cause_is_named_once_whoever_has_told_it_and_again_in_later_errors(
    rank: int, size: int
) -> None:
    """Rank 1 goes. Rank 3 notices, rank 2 hears of it there, and rank 0 from both; twice each."""
    fl.all_reduce(np.zeros(10))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.4 * (size - 1 - rank))
    said = []
    for _ in range(2):
        with pytest.raises(fl.errors.DistributedError) as caught:
            fl.all_reduce(np.zeros(10))
        said.append(str(caught.value))
    time.sleep(0.4 * rank)
    first, second = said
    assert "lost rank 1 (" in first
    assert "cannot be used any more because of rank 1: " in second
    assert first.count(" says") + first.count("gave up") <= 1, first


def wait_for_one_that_goes(rank: int, size: int, closes: bool) -> str:
    """Rank 1 goes, and then rank 0, for which rank 2 waits."""
    group = fl.new_group(range(size))
    pids = group.all_gather_object(os.getpid())
    first = os.pidfd_open(pids[1])
    group.barrier()
    if rank == 1:
        if closes:
            group.close()
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        select.select([first], [], [])
        time.sleep(0.5)  # as long as a reason for giving up may take to come through
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(fl.errors.PeerLostError) as caught:
        group.recv(np.zeros(1), 0)
    return str(caught.value)


@pytest.mark.parametrize("closes", [False, True])
def test_the_first_rank_that_was_lost_is_named(closes: bool) -> None:
    """Others close their connections because of it, also where nothing comes through from them.

    One that has closed the group was not lost.
    """
    outcomes = run_outcomes(wait_for_one_that_goes, 3, closes, params={"BACKEND": "gloo"})
    assert outcomes[2].ok, outcomes[2].report()
    assert f"lost rank {0 if closes else 1} (" in outcomes[2].value


@on_ranks(("gloo", 3), fresh=True)
def test_a_rank_that_has_left_is_named_where_nobody_else_has_gone(rank: int, size: int) -> None:
    group = fl.new_group(range(size))
    group.barrier()
    if rank == 1:
        group.close()
    fl.barrier()
    if rank != 1:
        with pytest.raises(fl.errors.PeerLostError, match=r"lost rank 1 \("):
            group.all_to_all(np.ones(size))


def stay_away(rank: int, size: int, seconds: float) -> str:
    fl.barrier()  # all begin to count now, whoever has started late
    if rank == 1:
        time.sleep(seconds)  # what a stuck rank does: nothing
        with pytest.raises(fl.errors.PeerLostError, match="gave up waiting for this rank"):
            fl.all_reduce(np.zeros(3))
        return "stayed away"
    with pytest.raises(fl.errors.CollectiveTimeoutError) as caught:
        fl.all_reduce(np.zeros(3))
    assert isinstance(caught.value, TimeoutError)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", SHM, MPI])
def test_a_rank_that_stays_away_is_named_after_the_timeout(backend: str) -> None:
    outcomes = run_outcomes(stay_away, 3, 4.0, **world_of(backend, TIMEOUT=1))
    for rank in (0, 2):
        assert f"rank {rank} of 3: rank 1 did not join within 1 seconds" in outcomes[rank].value
    # In shared memory who comes late finds all calls there, and is in time.
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
            with open(meeting, "w" if rank else "r"):  # opens when both know of the failure
                os.kill(pids[1], signal.SIGCONT)
        with contextlib.suppress(fl.errors.DistributedError):
            fl.distributed_shutdown()
    return "no error"


@pytest.mark.parametrize(
    "backend", ["hierarchical", pytest.param("gloo", marks=pytest.mark.slow), SHM, MPI]
)
def test_a_stopped_rank_is_named_with_what_it_joined_last(backend: str, tmp_path: Path) -> None:
    os.mkfifo(meeting := str(tmp_path / "meeting"))
    texts = run_ranks(stop_in_the_middle, 3, meeting, **world_of(backend, TIMEOUT=1))
    late = [text for text in texts if text.startswith("timeout: ")]
    assert late, texts  # the second receives the failure of the first
    for text in late:
        assert "rank 1 did not join within 1 seconds" in text
        assert "which is process " in text
    assert "broadcast(float64 (7,), root=1)" in late[0]
    assert re.search(r", [1-9]\d*\.\d s ago", late[0])


@on_ranks(("gloo", 2), slow=[("shm", 2), ("mpi", 2)], fresh=True)
def test_a_barrier_has_a_timeout_of_its_own(rank: int, size: int) -> None:
    fl.barrier()  # all begin to count now, whoever has started late
    if rank == 1:
        time.sleep(3.0 if fl.distributed_backend() is fl.DistributedBackend.MPI else 1.5)
        # In shared memory the first one is in time.
        assert "lost rank 0" in first_error(fl.barrier, fl.barrier)
    else:
        late = "rank 1 did not join within 0.5 seconds"
        with pytest.raises(fl.errors.CollectiveTimeoutError, match=late):
            fl.barrier(timeout=0.5)


@pairs
def test_a_wait_that_times_out_can_be_repeated(rank: int, size: int) -> None:
    x = np.full(3, 1.0)
    if rank == 1:
        time.sleep(0.5)
    work = fl.all_reduce(x, async_op=True)
    if rank == 0:
        with pytest.raises(fl.errors.CollectiveTimeoutError, match="still running"):
            work.wait(timeout=0.1)
        with pytest.raises(RuntimeError, match="before the operation ended"):
            work.result()
    assert work.wait() is x
    assert np.all(x == size)


@on_ranks(("gloo", 2), slow=[("shm", 2), ("mpi", 2)], fresh=True)
def test_waiting_answers_ctrl_c(rank: int, size: int) -> None:
    fl.barrier()  # all begin to count now, whoever has started late
    if rank == 1:
        time.sleep(1.5)
        # Through Gloo the interrupted operation goes on by itself; in shared memory, where it ran
        # on the interrupted thread, it cannot.
        with contextlib.suppress(fl.errors.PeerLostError):
            fl.all_reduce(np.zeros(3))
            fl.barrier()
        return
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        fl.all_reduce(np.zeros(3))
    assert time.monotonic() - started < 1.2
    with contextlib.suppress(fl.errors.GroupClosedError):
        fl.barrier()


@pairs
def test_waiting_releases_the_gil(rank: int, size: int) -> None:
    ticks = 0
    done = threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not done.wait(0.01):
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    if rank == 1:
        time.sleep(0.5)
    fl.all_reduce(np.zeros(3))
    done.set()
    thread.join()
    assert rank != 0 or ticks > 20


def init_many_times(rank: int, size: int, path: str, params: Any) -> int:
    for _ in range(10):
        fl.distributed_init(
            fl.DistributedInit.FILE_SYSTEM, rank, size, {"FILE_PATH": path, **params}
        )
        assert np.all(fl.all_reduce(np.ones(1000)) == size)
        fl.distributed_shutdown()
        assert (fl.get_world_rank(), fl.get_world_size()) == (0, 1)
        assert not fl.is_distributed_init()
        assert np.all(fl.all_reduce(np.ones(2)) == 1)
    return threading.active_count()


def test_after_a_shutdown_the_world_is_this_process_and_init_can_be_repeated(
    tmp_path: Any, params: Any
) -> None:
    counts = run_ranks(init_many_times, 2, str(tmp_path / "meet"), params, init=None)
    assert list(tmp_path.iterdir()) == []
    assert max(counts) < 4


@pytest.mark.slow
@on_ranks(("gloo", 3), fresh=True, params={"TIMEOUT": 1})
def test_a_rank_that_has_said_why_it_ended_is_not_called_late(rank: int, size: int) -> None:
    """Rank 1, whose wait was for rank 0 first, named both."""
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
