"""Fixtures that start the real engines on the loopback of this machine."""

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import pytest

import flashlight_py as fl
from tests.distributed import leftovers

ROOT = str(Path(__file__).parents[2])
SIZE = 3
Run = Callable[..., list[Any]]
MARKS = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    # Sockets and files that the engines leave to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@contextmanager
def dask_client(workers: int, threads: int = 1, **options: Any) -> Iterator[Any]:
    """Client of a new Dask cluster on this machine."""
    distributed = pytest.importorskip("distributed", reason="needs 'flashlight-py[dask]'")
    import dask

    where = {"dashboard_address": "127.0.0.1:0", "host": "127.0.0.1", "threads_per_worker": threads}
    with (
        # Time until a LocalCluster gives up a lost worker. The default is 15 s, and a later test
        # may kill the worker again before that.
        dask.config.set({"distributed.deploy.lost-worker-timeout": "1 hour"}),
        distributed.LocalCluster(n_workers=workers, **{**where, **options}) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client


@contextmanager
def dask() -> Iterator[Run]:
    with dask_client(SIZE, threads=2) as client:

        def run(*args: Any, **options: Any) -> list[Any]:
            client.wait_for_workers(SIZE, timeout=60)  # a test may have killed a worker
            return fl.launch.dask.run(client, *args, **{"nprocs": SIZE, **options})

        yield run


@contextmanager
def ray() -> Iterator[Run]:
    with ray_cluster():
        yield lambda *args, **more: fl.launch.ray.run(*args, **{"nprocs": SIZE, **more})


@contextmanager
def ray_cluster(cpus: int = 1) -> Iterator[None]:
    """``SIZE`` Ray nodes with ``cpus`` each on this machine; this process is connected."""
    ray = pytest.importorskip("ray", reason="needs 'flashlight-py[ray]'")
    from ray.cluster_utils import Cluster

    before = dict(os.environ)
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", PYTHONPATH=ROOT)
    # Ray replaces 127.0.0.1 by the network address of this machine.
    node = {"num_cpus": cpus, "object_store_memory": 80 << 20, "node_ip_address": "127.0.0.2"}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        for _ in range(SIZE - 1):
            cluster.add_node(**node)
        ray.init(address=cluster.address, log_to_driver=False)
        yield
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
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "10s",
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
            yield lambda *args, **more: fl.launch.spark.run(*args, **{"nprocs": SIZE, **more})
        finally:
            gateway = session.sparkContext._gateway
            session.stop()
            gateway.shutdown()
            gateway.proc.stdin.close()
            gateway.proc.wait(30)
            type(session.sparkContext)._gateway = type(session.sparkContext)._jvm = None
            os.environ.clear()
            os.environ.update(before)


@contextmanager
def ended() -> Iterator[None]:
    """Check afterwards that no engine process is left; restore the SIGINT handler."""
    answer = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, answer)
    tracker = resource_tracker._resource_tracker._pid  # multiprocessing's resource tracker
    leftovers.helpers.update({tracker} if tracker else ())
    left = leftovers.end_processes()
    assert not left, f"the engine left processes running (killed now): {left}"
