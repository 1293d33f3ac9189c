"""``spawn`` with real processes: arguments, results and output."""

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


def state(rank: int, array: Any, *args: Any) -> dict[str, Any]:
    return {
        "numbers": (rank, fl.get_world_rank(), fl.get_world_size(), fl.get_local_rank()),
        "array": array * rank,
        "args": args,
        "world": fl.distributed.describe(),
        "environment": dict(os.environ),
    }


def test_spawn_returns_results_of_all_ranks_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The array exceeds the capacity of a pipe. The number of ranks is the number of cores."""
    monkeypatch.setattr(calls, "usable_cores", lambda: 2)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MKL_NUM_THREADS", "7")
    share = str(max(1, len(os.sched_getaffinity(0)) // 2))
    threads = {"OMP_NUM_THREADS": share, "OPENBLAS_NUM_THREADS": share, "MKL_NUM_THREADS": "7"}
    sent = np.arange(1_000_000.0)
    results = fl.spawn(state, (sent, "a", {"b": 1}), params={"BACKEND": "gloo"})
    assert [result["numbers"] for result in results] == [(rank, rank, 2, rank) for rank in (0, 1)]
    for rank, result in enumerate(results):
        np.testing.assert_array_equal(result["array"], sent * rank)
        assert result["args"] == ("a", {"b": 1})
        assert "Gloo" in result["world"]
        assert threads.items() <= result["environment"].items()
    assert "OMP_NUM_THREADS" not in os.environ


@pytest.mark.slow
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


def test_spawned_ranks_may_initialise_again_and_leave_operations_unfinished() -> None:
    """Also use a queue: the manager requires multiprocessing's key, which each rank receives."""
    with multiprocessing.Manager() as manager:
        queue = manager.Queue()
        assert fl.spawn(leave_early, (queue,), nprocs=2) == [2, 2]
        assert sorted([queue.get(), queue.get()]) == [0, 1]


def leave_early(rank: int, queue: Any) -> int:
    queue.put(rank)
    fl.distributed_shutdown()
    fl.distributed_init()
    size = int(fl.all_reduce(np.array(1)))
    fl.all_reduce(np.ones(100_000), async_op=True)
    if rank == 1:
        np.linalg.svd(np.random.default_rng(0).random((200, 200)))
    return size


def total(rank: int, number: int) -> int:
    return int(fl.all_reduce(np.array([number]))[0])


@pytest.mark.slow
def test_spawn_works_in_a_spawned_rank() -> None:
    assert fl.spawn(nest, nprocs=np.int64(1)) == [(True, [2, 2])]  # type: ignore[arg-type]
    assert not fl.is_distributed_init()


def nest(rank: int) -> tuple[bool, Any]:
    return fl.is_distributed_init(), fl.spawn(total, (1,), nprocs=2)


# Serialisation --------------------------------------------------------------------------------


@NEEDS_CLOUDPICKLE
def test_spawn_sends_and_returns_closures_by_cloudpickle() -> None:
    factor = 3
    (adder,) = fl.spawn(lambda rank: lambda x: x + factor, nprocs=1)
    assert adder(2) == 5


@pytest.fixture
def _no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(spawning.SpawnedWorld, "start", fail)


@pytest.mark.usefixtures("_no_process")
def test_spawn_raises_type_error_if_fn_is_not_picklable(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = multiprocessing.Lock()
    with pytest.raises(TypeError, match="spawn of total: the function or its arguments cannot be"):
        fl.spawn(total, (lock,), nprocs=2)
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
        fl.spawn(**{"fn": state, **arguments})


def test_spawn_imports_multiprocessing_at_first_use() -> None:
    program = "import sys, flashlight_py; print('multiprocessing' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == b"False\n"
