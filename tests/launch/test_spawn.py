"""``spawn`` on real processes: what comes back, and what is sent there."""

from __future__ import annotations

import atexit
import importlib.util
import io
import multiprocessing
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.launch import calls, spawning

HAS_CLOUDPICKLE = importlib.util.find_spec("cloudpickle") is not None
NEEDS_CLOUDPICKLE = pytest.mark.skipif(
    not HAS_CLOUDPICKLE, reason="needs cloudpickle: pip install 'flashlight-py[notebook]'"
)


def places(rank: int, *args: Any) -> tuple[Any, ...]:
    return rank, fl.get_world_rank(), fl.get_world_size(), fl.get_local_rank(), args


def total(rank: int, start: int) -> Any:
    return fl.all_reduce(np.array([start + rank]))


def test_results_are_in_rank_order() -> None:
    found = fl.spawn(places, args=("a", {"b": 1}), nprocs=3)
    assert found == [(rank, rank, 3, rank, ("a", {"b": 1})) for rank in range(3)]


def test_one_process_is_a_world_too() -> None:
    assert fl.spawn(is_initialised, nprocs=np.int64(1)) == [True]  # type: ignore[arg-type]
    assert not fl.is_distributed_init()


def is_initialised(rank: int) -> bool:
    return fl.is_distributed_init()


def test_default_is_one_process_for_each_usable_core(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "usable_cores", lambda: 2)
    assert len(fl.spawn(places)) == 2


def test_params_are_those_of_distributed_init() -> None:
    assert "Gloo" in fl.spawn(describe, nprocs=2, params={"BACKEND": "gloo"})[0]
    with pytest.raises(fl.errors.RankFailedError, match="ValueError: params has an unknown key"):
        fl.spawn(describe, nprocs=2, params={"BAKEND": "gloo"})


def describe(rank: int) -> str:
    return fl.distributed.describe()


def environment(rank: int) -> dict[str, str]:
    return dict(os.environ)


def test_each_rank_gets_its_share_of_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MKL_NUM_THREADS", "7")
    share = str(max(1, len(os.sched_getaffinity(0)) // 2))
    for found in fl.spawn(environment, nprocs=2):
        assert found["OMP_NUM_THREADS"] == found["OPENBLAS_NUM_THREADS"] == share
        assert found["MKL_NUM_THREADS"] == "7"
    assert "OMP_NUM_THREADS" not in os.environ


def test_ranks_print_whole_lines_to_our_output(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", sys.__stdout__)  # which pytest has replaced
    monkeypatch.setattr(sys, "stderr", sys.__stderr__)
    print("before")
    fl.spawn(chatter, nprocs=2)
    output, errors = capfd.readouterr()
    assert output.startswith("before\n")
    assert sorted(output.splitlines()[1:]) == [f"rank {rank}" for rank in (0, 1) for _ in range(20)]
    assert sorted(errors.splitlines()) == ["error of 0", "error of 1"]


def test_a_replaced_output_shows_whose_lines_they_are() -> None:
    with redirect_stdout(io.StringIO()) as output, redirect_stderr(io.StringIO()) as errors:
        fl.spawn(flood, nprocs=2)
    lines = [line for line in output.getvalue().splitlines() if "late" not in line]
    assert sorted(lines) == [f"[{rank}] {'x' * 999}" for rank in (0, 1) for _ in range(200)]
    assert sorted(output.getvalue().splitlines())[0] == "[0] late"
    assert sorted(errors.getvalue().splitlines()) == ["[0] no end", "[1] no end"]


def flood(rank: int) -> None:
    """More than a pipe holds, also after the result."""
    for _ in range(100):
        print("x" * 999)
    atexit.register(print, "no end", end="", file=sys.stderr)
    atexit.register(print, "\n".join(["x" * 999] * 100 + ["late"]))


def chatter(rank: int) -> None:
    for _ in range(20):
        print("rank", rank)
    print(f"error of {rank}", file=sys.stderr)


def test_large_results_and_arguments_pass() -> None:
    sent = np.arange(1_000_000.0)
    for rank, came in enumerate(fl.spawn(scaled, (sent,), nprocs=2)):
        np.testing.assert_array_equal(came, sent * rank)


def scaled(rank: int, array: Any) -> Any:
    return array * rank


def test_functions_may_meet_anew_after_a_shutdown() -> None:
    assert fl.spawn(begin_anew, nprocs=2) == [2, 2]


def begin_anew(rank: int) -> int:
    fl.distributed_shutdown()
    fl.distributed_init()
    return int(fl.all_reduce(np.array(1)))


def test_ranks_may_leave_operations_unfinished_and_return_at_different_times() -> None:
    assert fl.spawn(leave_early, nprocs=2) == [0, 1]


def leave_early(rank: int) -> int:
    fl.all_reduce(np.ones(100_000), async_op=True)
    if rank == 1:
        np.linalg.svd(np.random.default_rng(0).random((200, 200)))
    return rank


def test_spawn_inside_a_world_makes_one_of_its_own(pool: Any) -> None:
    """Two ranks of a world start two ranks each, and go on as before."""
    assert pool(2).run(spawn_two) == [[[10, 10], 1], [[12, 12], 1]]


def spawn_two(rank: int, size: int) -> list[Any]:
    inner = [int(sums[0]) for sums in fl.spawn(total_of_pair, (rank,), nprocs=2)]
    return [inner, int(fl.all_reduce(np.array([rank]))[0])]


def total_of_pair(rank: int, outer: int) -> Any:
    return fl.all_reduce(np.array([5 + outer]))


def test_spawn_inside_a_spawned_rank() -> None:
    assert fl.spawn(nest, nprocs=1) == [[[1], [1]]]


def nest(rank: int) -> list[Any]:
    return [sums.tolist() for sums in fl.spawn(total, (0,), nprocs=2)]


def test_a_managers_queue_reaches_the_ranks() -> None:
    """Its server wants the key of multiprocessing, which each rank is given."""
    with multiprocessing.Manager() as manager:
        queue = manager.Queue()
        fl.spawn(put, (queue,), nprocs=2)
        assert sorted([queue.get(), queue.get()]) == [0, 1]


def put(rank: int, queue: Any) -> None:
    queue.put(rank)


# What can be sent -----------------------------------------------------------------------------


@NEEDS_CLOUDPICKLE
def test_lambdas_and_closures_are_sent_by_cloudpickle() -> None:
    factor = 3
    assert fl.spawn(lambda rank: rank * factor, nprocs=2) == [0, 3]


@NEEDS_CLOUDPICKLE
def test_a_result_that_pickle_cannot_send() -> None:
    assert fl.spawn(make_adder, nprocs=1)[0](2) == 3


def make_adder(rank: int) -> Any:
    return lambda x: x + 1


@pytest.fixture
def _no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(spawning.SpawnedWorld, "start", fail)


@pytest.mark.usefixtures("_no_process")
def test_what_cannot_be_pickled_is_refused_before_a_process_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lock = multiprocessing.Lock()
    with pytest.raises(TypeError, match="spawn of put: the function or its arguments cannot be"):
        fl.spawn(put, (lock,), nprocs=2)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(TypeError, match=r"lambda.*cannot be pickled.*flashlight-py\[notebook\]"):
        fl.spawn(lambda rank: lock, nprocs=2)


@pytest.mark.usefixtures("_no_process")
@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"fn": 3}, TypeError, "must be a function"),
        ({"args": "text"}, TypeError, "args must be a tuple, got str"),
        ({"nprocs": 0}, ValueError, "from 1 to 131072, got 0"),
        ({"nprocs": True}, ValueError, "from 1 to 131072, got True"),
        ({"nprocs": 2.0}, ValueError, r"got 2\.0"),
        ({"timeout": 0}, ValueError, "positive number of seconds"),
        ({"timeout": 1e7}, ValueError, "at most 1000000"),
        ({"max_restarts": -1}, ValueError, "max_restarts must be an integer of at least 0, got -1"),
        (
            {"max_restarts": None},
            ValueError,
            "max_restarts must be an integer of at least 0, got None",
        ),
        ({"params": {"FILE_PATH": "/x"}}, ValueError, "must not contain FILE_PATH"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        fl.spawn(**{"fn": places, **arguments})


def test_multiprocessing_is_not_imported_before_it_is_needed() -> None:
    program = "import sys, flashlight_py; print('multiprocessing' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == b"False\n"
