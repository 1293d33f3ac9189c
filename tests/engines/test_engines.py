"""``run`` on the real engines, one set of tests for all of them."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest

import flashlight_py as fl
from flashlight_py.errors import RankFailedError
from tests.distributed import leftovers
from tests.engines import tasks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    # Of the engines' own: sockets and files that they leave to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
ROOT = str(Path(__file__).parents[2])
SIZE = 3
Run = Callable[..., list[Any]]


@contextmanager
def dask() -> Iterator[Run]:
    distributed = pytest.importorskip("distributed", reason="needs 'flashlight-py[dask]'")
    with (
        distributed.LocalCluster(
            n_workers=SIZE, threads_per_worker=2, dashboard_address="127.0.0.1:0", host="127.0.0.1"
        ) as cluster,
        distributed.Client(cluster) as client,
    ):

        def run(*args: Any, **options: Any) -> list[Any]:
            client.wait_for_workers(SIZE, timeout=60)  # a test may have killed one
            return fl.launch.dask.run(client, *args, nprocs=SIZE, **options)

        yield run


@contextmanager
def ray() -> Iterator[Run]:
    ray = pytest.importorskip("ray", reason="needs 'flashlight-py[ray]'")
    from ray.cluster_utils import Cluster

    before = dict(os.environ)
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", PYTHONPATH=ROOT)
    node = {"num_cpus": 1, "object_store_memory": 80 << 20, "node_ip_address": "127.0.0.2"}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        for _ in range(SIZE - 1):
            cluster.add_node(**node)
        ray.init(address=cluster.address, log_to_driver=False)
        yield lambda *args, **more: fl.launch.ray.run(*args, nprocs=SIZE, **more)
    finally:
        ray.shutdown()
        cluster.shutdown()
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def spark() -> Iterator[Run]:
    sql = pytest.importorskip("pyspark.sql", reason="needs 'flashlight-py[spark]'")
    if shutil.which("java") is None:
        pytest.skip("needs Java: apt-get install default-jre-headless")
    options = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.executor.memory": "512m",
        "spark.scheduler.barrier.maxConcurrentTasksCheck.interval": "1s",
        "spark.executorEnv.PYTHONPATH": ROOT,
    }
    before = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="spark-") as folder:
        os.environ.update(SPARK_LOCAL_IP="127.0.0.1", SPARK_LOCAL_HOSTNAME="127.0.0.1")
        os.environ.update(SPARK_LOCAL_DIRS=folder, SPARK_WORKER_DIR=folder)
        builder = sql.SparkSession.builder.master(f"local-cluster[{SIZE},1,512]")
        for name, value in options.items():
            builder = builder.config(name, value)
        session = builder.getOrCreate()
        try:
            yield lambda *args, **more: fl.launch.spark.run(*args, nprocs=SIZE, **more)
        finally:
            gateway = session.sparkContext._gateway
            session.stop()
            gateway.shutdown()
            gateway.proc.stdin.close()
            gateway.proc.wait(30)
            type(session.sparkContext)._gateway = type(session.sparkContext)._jvm = None
            os.environ.clear()
            os.environ.update(before)


@pytest.fixture(scope="module", params=[dask, ray, spark], ids=lambda engine: engine.__name__)
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    with request.param() as function:
        yield function
    tracker = resource_tracker._resource_tracker._pid  # multiprocessing's, of this process
    leftovers.helpers.update({tracker} if tracker else ())
    left = leftovers.end_processes()
    assert not left, f"the engine left processes running (killed now): {left}"


def test_results_in_rank_order(run: Run) -> None:
    for _ in range(2):  # processes are ranks again
        assert run(tasks.total, (10,)) == [(rank, 33) for rank in range(SIZE)]
    offset = 5
    assert run(lambda rank: rank + offset) == [5, 6, 7]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", "rank 1 of 3 raised ValueError: a bad batch; the other ranks were ended"),
        ("compute", "rank 1 of 3 raised ValueError: a bad batch; the other ranks were ended"),
        ("kill", "rank 1 of 3 was lost: "),
    ],
)
def test_the_first_cause_is_named(run: Run, how: str, said: str) -> None:
    with pytest.raises(RankFailedError, match=said) as caught:
        run(tasks.fail, (how,))
    assert caught.value.rank == 1
    if how != "kill":
        assert "in fail" in str(caught.value)  # the traceback of the rank
    assert run(tasks.total, (10,))[0] == (0, 33)  # nothing of it runs on


def test_a_timeout_ends_the_ranks(run: Run) -> None:
    with pytest.raises(TimeoutError, match=r"rank\(s\) 0, 1, 2 of 3 had not returned"):
        run(tasks.never, timeout=3)
    assert run(tasks.total, (10,))[0] == (0, 33)


def test_a_result_that_cannot_be_pickled(run: Run) -> None:
    with pytest.raises(RankFailedError, match="the result, of type generator, cannot be pickled"):
        run(tasks.unpicklable)


def test_arguments_that_make_no_sense(run: Run) -> None:
    with pytest.raises(TypeError, match="cannot be pickled"):
        run(tasks.total, (threading.Lock(),))
    with pytest.raises(ValueError, match="leave FILE_PATH out"):
        run(tasks.total, (1,), params={"FILE_PATH": "x"})
    with pytest.raises(ValueError, match="max_restarts must be"):
        run(tasks.total, (1,), max_restarts=-1)


@pytest.mark.parametrize("seed", range(int(os.environ.get("FLASHLIGHT_TEST_KILLS", "3"))))
def test_a_killed_training_goes_on_to_the_same_bits(run: Run, tmp_path: Path, seed: int) -> None:
    """At a random step of a random rank; from the last checkpoint, on as many ranks."""
    for name in ("undisturbed", "killed"):
        (tmp_path / name).mkdir()
    draw = random.Random(seed)
    expected = fl.spawn(tasks.train_alone, (str(tmp_path / "undisturbed"),), SIZE)
    arguments = (str(tmp_path / "killed"), draw.randrange(20), draw.randrange(SIZE))
    assert run(tasks.train, arguments, max_restarts=1) == expected


def test_dask_needs_a_process_for_each_rank() -> None:
    distributed = pytest.importorskip("distributed", reason="needs 'flashlight-py[dask]'")
    options = {"dashboard_address": "127.0.0.1:0", "threads_per_worker": 1}
    with (
        distributed.LocalCluster(n_workers=2, processes=False, **options) as cluster,
        distributed.Client(cluster) as client,
    ):
        with pytest.raises(ValueError, match="threads of one process"):
            fl.launch.dask.run(client, tasks.total, (1,), nprocs=2)
        with pytest.raises(ValueError, match="5 ranks need as many workers, and the cluster has 2"):
            fl.launch.dask.run(client, tasks.total, (1,), nprocs=5)
