"""Resources on Ray, and Ray Train, with real Ray nodes on this machine."""

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.engines import tasks
from tests.engines.engines import MARKS, SIZE, ended, ray_cluster
from tests.engines.killed import EXAMPLE, killing

ray = pytest.importorskip("ray", reason="needs 'flashlight-py[ray]'")
pytestmark = [*MARKS, pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with ended(), ray_cluster(cpus=2):
        yield


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resources": {"CPU": 3}}, r"'CPU': 3\} each, placed by PACK, got resources for 0 ranks"),
        ({"strategy": "STRICT_PACK"}, r"for 2 ranks\. The nodes have CPU 2; CPU 2; CPU 2"),
        ({"strategy": "STRICT_SPREAD", "nprocs": 4}, "4 ranks with .* resources for 3"),
    ],
)
def test_ray_run_rejects_ranks_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        fl.launch.ray.run(tasks.total, (1,), **{"nprocs": SIZE, **options})


def test_ray_run_waits_for_resources_in_use() -> None:
    others = ray.remote(tasks.sleep).options(num_cpus=2).remote(None)
    ray.wait([others], timeout=1)  # the task has started
    with pytest.raises(TimeoutError, match=r"placed by PACK, got CPU [0-4]\b.* after 2 s"):
        fl.launch.ray.run(tasks.total, (1,), nprocs=6, timeout=2)
    assert len(fl.launch.ray.run(tasks.total, (1,), nprocs=6)) == 6


def test_ray_run_timeout_ends_an_actor_that_never_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The start is replaced, because no real actor is certain to hang there."""
    monkeypatch.setattr(fl.launch.ray, "listen_on_node", tasks.sleep)
    with pytest.raises(TimeoutError, match=r"rank\(s\) 0, 1 of 2 did not return"):
        fl.launch.ray.run(tasks.total, (1,), nprocs=2, timeout=4)


def fit(storage: Path, train: Any, failures: int = 0, /, **config: Any) -> Any:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    return DataParallelTrainer(
        train,
        train_loop_config=config,
        backend_config=fl.launch.ray_train.config({"TIMEOUT": 60}),
        scaling_config=ScalingConfig(num_workers=SIZE),
        run_config=RunConfig(
            storage_path=str(storage), failure_config=FailureConfig(max_failures=failures)
        ),
    ).fit()


def test_ray_train_worker_that_raises_ends_the_world_of_workers(tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> None:
        rank = ray.train.get_context().get_world_rank()
        assert fl.all_reduce(np.array(10 + rank)) == 33
        assert (fl.get_world_rank(), fl.get_world_size()) == (rank, 3)
        tasks.fail(rank, "raise")

    from ray.train.v2.api.exceptions import WorkerGroupError  # also imports ray.train

    with pytest.raises(WorkerGroupError, match="a bad batch"):
        fit(tmp_path, train)


@pytest.mark.parametrize("seed", range(int(os.environ.get("FLASHLIGHT_TEST_KILLS", "1"))))
def test_ray_train_resumes_with_the_same_bits_after_a_kill(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    train_or_die = killing(EXAMPLE, 1 + draw.randrange(20), draw.randrange(SIZE))

    def train(config: dict[str, Any]) -> None:
        mark = Path(config["folder"], "started")  # and the final parameters
        os.environ["FLASHLIGHT_RESTART_COUNT"] = str(int(mark.exists()))
        fl.barrier()
        mark.touch()
        mark.write_text(train_or_die(fl.get_world_rank(), config["folder"]))

    for name in ("undisturbed", "killed", "ray"):
        (tmp_path / name).mkdir()
    expected = fl.spawn(killing(EXAMPLE, -1, -1), (str(tmp_path / "undisturbed"),), SIZE)
    fit(tmp_path / "ray", train, 1, folder=str(tmp_path / "killed"))
    assert (tmp_path / "killed" / "started").read_text() == expected[0]
