"""``spawn`` with real processes: arguments, results and output."""

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


def test_spawn_returns_results_in_rank_order() -> None:
    results = fl.spawn(places, args=("a", {"b": 1}), nprocs=3)
    assert results == [(rank, rank, 3, rank, ("a", {"b": 1})) for rank in range(3)]


def test_spawn_initialises_a_world_of_one_process() -> None:
    assert fl.spawn(is_initialised, nprocs=np.int64(1)) == [True]  # type: ignore[arg-type]
    assert not fl.is_distributed_init()


def is_initialised(rank: int) -> bool:
    return fl.is_distributed_init()


def test_spawn_uses_all_cores_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "usable_cores", lambda: 2)
    assert len(fl.spawn(places)) == 2


def test_spawn_passes_params_to_distributed_init() -> None:
    assert "Gloo" in fl.spawn(describe, nprocs=2, params={"BACKEND": "gloo"})[0]
    with pytest.raises(fl.errors.RankFailedError, match="keys of params must be among"):
        fl.spawn(describe, nprocs=2, params={"BAKEND": "gloo"})


def describe(rank: int) -> str:
    return fl.distributed.describe()


def environment(rank: int) -> dict[str, str]:
    return dict(os.environ)


def test_spawn_divides_threads_between_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MKL_NUM_THREADS", "7")
    share = str(max(1, len(os.sched_getaffinity(0)) // 2))
    for result in fl.spawn(environment, nprocs=2):
        assert result["OMP_NUM_THREADS"] == result["OPENBLAS_NUM_THREADS"] == share
        assert result["MKL_NUM_THREADS"] == "7"
    assert "OMP_NUM_THREADS" not in os.environ


def test_spawned_ranks_print_complete_lines_to_inherited_output(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", sys.__stdout__)  # replaced by pytest
    monkeypatch.setattr(sys, "stderr", sys.__stderr__)
    print("before")
    fl.spawn(chatter, nprocs=2)
    output, errors = capfd.readouterr()
    assert output.startswith("before\n")
    assert sorted(output.splitlines()[1:]) == [f"rank {rank}" for rank in (0, 1) for _ in range(20)]
    assert sorted(errors.splitlines()) == ["error of 0", "error of 1"]


def test_spawn_prefixes_lines_in_a_replaced_stdout() -> None:
    with redirect_stdout(io.StringIO()) as output, redirect_stderr(io.StringIO()) as errors:
        fl.spawn(flood, nprocs=2)
    lines = [line for line in output.getvalue().splitlines() if "late" not in line]
    assert sorted(lines) == [f"[{rank}] {'x' * 999}" for rank in (0, 1) for _ in range(200)]
    assert sorted(output.getvalue().splitlines())[0] == "[0] late"
    assert sorted(errors.getvalue().splitlines()) == ["[0] no end", "[1] no end"]


def flood(rank: int) -> None:
    """Print more than a pipe holds, also after the result."""
    for _ in range(100):
        print("x" * 999)
    atexit.register(print, "no end", end="", file=sys.stderr)
    atexit.register(print, "\n".join(["x" * 999] * 100 + ["late"]))


def chatter(rank: int) -> None:
    for _ in range(20):
        print("rank", rank)
    print(f"error of {rank}", file=sys.stderr)


def test_spawn_sends_large_arguments_and_results() -> None:
    sent = np.arange(1_000_000.0)
    for rank, came in enumerate(fl.spawn(scaled, (sent,), nprocs=2)):
        np.testing.assert_array_equal(came, sent * rank)


def scaled(rank: int, array: Any) -> Any:
    return array * rank


def test_spawned_ranks_can_initialise_again_after_a_shutdown() -> None:
    assert fl.spawn(begin_anew, nprocs=2) == [2, 2]


def begin_anew(rank: int) -> int:
    fl.distributed_shutdown()
    fl.distributed_init()
    return int(fl.all_reduce(np.array(1)))


def test_spawn_returns_if_ranks_leave_operations_unfinished() -> None:
    assert fl.spawn(leave_early, nprocs=2) == [0, 1]


def leave_early(rank: int) -> int:
    fl.all_reduce(np.ones(100_000), async_op=True)
    if rank == 1:
        np.linalg.svd(np.random.default_rng(0).random((200, 200)))
    return rank


def test_spawn_in_a_rank_creates_a_separate_world(pool: Any) -> None:
    assert pool(2).run(spawn_two) == [[[10, 10], 1], [[12, 12], 1]]


def spawn_two(rank: int, size: int) -> list[Any]:
    inner = [int(sums[0]) for sums in fl.spawn(total_of_pair, (rank,), nprocs=2)]
    return [inner, int(fl.all_reduce(np.array([rank]))[0])]


def total_of_pair(rank: int, outer: int) -> Any:
    return fl.all_reduce(np.array([5 + outer]))


def test_spawn_works_in_a_spawned_rank() -> None:
    assert fl.spawn(nest, nprocs=1) == [[[1], [1]]]


def nest(rank: int) -> list[Any]:
    return [sums.tolist() for sums in fl.spawn(total, (0,), nprocs=2)]


def test_spawn_passes_a_queue_of_a_manager() -> None:
    """The server of the manager requires multiprocessing's key, which each rank receives."""
    with multiprocessing.Manager() as manager:
        queue = manager.Queue()
        fl.spawn(put, (queue,), nprocs=2)
        assert sorted([queue.get(), queue.get()]) == [0, 1]


def put(rank: int, queue: Any) -> None:
    queue.put(rank)


# Serialisation --------------------------------------------------------------------------------


@NEEDS_CLOUDPICKLE
def test_spawn_sends_lambdas_and_closures_by_cloudpickle() -> None:
    factor = 3
    assert fl.spawn(lambda rank: rank * factor, nprocs=2) == [0, 3]


@NEEDS_CLOUDPICKLE
def test_spawn_returns_a_closure_by_cloudpickle() -> None:
    assert fl.spawn(make_adder, nprocs=1)[0](2) == 3


def make_adder(rank: int) -> Any:
    return lambda x: x + 1


@pytest.fixture
def _no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(spawning.SpawnedWorld, "start", fail)


@pytest.mark.usefixtures("_no_process")
def test_spawn_raises_type_error_if_fn_is_not_picklable(monkeypatch: pytest.MonkeyPatch) -> None:
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
        ({"max_restarts": -1}, ValueError, "max_restarts must be .* at least 0, got -1"),
        ({"max_restarts": None}, ValueError, "max_restarts must be .* at least 0, got None"),
        ({"params": {"FILE_PATH": "/x"}}, ValueError, "must not contain FILE_PATH"),
    ],
)
def test_spawn_rejects_invalid_arguments_before_a_start(
    arguments: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        fl.spawn(**{"fn": places, **arguments})


def test_spawn_imports_multiprocessing_at_first_use() -> None:
    program = "import sys, flashlight_py; print('multiprocessing' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == b"False\n"
