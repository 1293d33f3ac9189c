"""``run`` on the real engines: the same tests for all of them."""

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest

import flashlight_py as fl
from flashlight_py.engines import rank as engine_rank
from flashlight_py.errors import RankFailedError
from tests.engines import tasks
from tests.engines.engines import MARKS, SIZE, Run, dask, dask_client, ended, ray, spark

pytestmark = MARKS


@pytest.fixture(scope="module", params=[dask, ray, spark], ids=lambda engine: engine.__name__)
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    with ended(), request.param() as function:
        yield function


def test_run_returns_results_in_rank_order(run: Run) -> None:
    for _ in range(2):  # processes become ranks again
        assert run(tasks.total, (10,)) == [(rank, 33) for rank in range(SIZE)]
    offset = 5
    assert run(lambda rank: rank + offset) == [5, 6, 7]


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        ("compute", "rank 1 of 3 raised ValueError: a bad batch; the other ranks were ended"),
        ("kill", "rank 1 of 3 was lost: "),
    ],
)
def test_run_names_the_first_cause(run: Run, failure: str, message: str) -> None:
    with pytest.raises(RankFailedError, match=message) as caught:
        run(tasks.fail, (failure,))
    assert caught.value.rank == 1
    if failure != "kill":
        assert "in fail" in str(caught.value)  # the traceback of the rank
    assert run(tasks.total, (10,))[0] == (0, 33)  # no part of the attempt still runs


def test_run_timeout_ends_ranks(run: Run) -> None:
    with pytest.raises(TimeoutError, match=r"rank\(s\) 0, 1, 2 of 3 did not return"):
        run(tasks.never, timeout=3)
    assert run(tasks.total, (10,))[0] == (0, 33)


@pytest.mark.parametrize("run", [spark], indirect=True)
def test_run_timeout_ends_a_stage_before_its_start(run: Run) -> None:
    with pytest.raises(TimeoutError, match=r"rank\(s\) 0, 1, 2 of 3 did not return"):
        run(tasks.never, timeout=1e-6)


def test_run_rejects_invalid_arguments_and_results(run: Run) -> None:
    with pytest.raises(RankFailedError, match="the result, of type generator, cannot be pickled"):
        run(tasks.unpicklable)
    with pytest.raises(TypeError, match="cannot be pickled"):
        run(tasks.total, (threading.Lock(),))
    with pytest.raises(ValueError, match="must not contain FILE_PATH"):
        run(tasks.total, (1,), params={"FILE_PATH": "x"})
    with pytest.raises(ValueError, match="max_restarts must be"):
        run(tasks.total, (1,), max_restarts=-1)


def test_dask_run_raises_value_error_if_processes_are_too_few() -> None:
    with dask_client(2, processes=False, host=None) as client:  # threads have no host
        with pytest.raises(ValueError, match=r"got 1\. Start more workers with proc"):
            fl.launch.dask.run(client, tasks.total, (1,), nprocs=2)
        with pytest.raises(ValueError, match="expected at least 5 worker processes"):
            fl.launch.dask.run(client, tasks.total, (1,), nprocs=5)


@pytest.mark.parametrize("run", [spark], indirect=True)
def test_spark_run_raises_timeout_error_if_slots_are_too_few(run: Run) -> None:
    pattern = r"expected at least 5 slots, one per rank, got 3 after \d+ s\. Raise spark.executor"
    with pytest.raises(TimeoutError, match=pattern):
        fl.launch.spark.run(tasks.total, (1,), nprocs=5)


def _listeners() -> list[str]:
    return list(engine_rank._listeners)


def test_dask_run_leaves_nothing_if_a_rank_never_starts() -> None:
    """The worker of rank 0 is busy with other tasks, and rank 1 waits until it is killed."""
    with dask_client(2) as client:
        first = min(client.nthreads())
        other = client.submit(time.sleep, 10, workers=[first])
        with pytest.raises(TimeoutError, match=r"rank\(s\) 0, 1 of 2 did not return"):
            fl.launch.dask.run(client, tasks.total, (1,), nprocs=2, timeout=1)
        assert client.run(_listeners, workers=[first]) == {first: []}
        assert not other.done()
        client.wait_for_workers(2, timeout=60)
        other.result()
        assert fl.launch.dask.run(client, tasks.total, (1,), nprocs=2) == [(0, 3), (1, 3)]


def test_dask_run_does_not_wait_for_a_suspended_worker() -> None:
    with dask_client(2) as client:
        pids = client.run(os.getpid)
        last = pids[max(pids)]
        began = time.monotonic()
        try:
            with pytest.raises(TimeoutError, match="did not return before the timeout"):
                fl.launch.dask.run(client, tasks.stop, timeout=3)
            assert time.monotonic() - began < 20  # 3 s, and the time to end ranks
        finally:
            os.kill(last, signal.SIGCONT)
        client.wait_for_workers(2, timeout=60)
        assert fl.launch.dask.run(client, tasks.total, (1,)) == [(0, 3), (1, 3)]
