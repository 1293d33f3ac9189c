"""Ray Train and ``ray.util.collective``, with the real Ray on nodes of this machine."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.engines import tasks
from tests.engines.engines import SIZE, ended, ray_cluster

ray = pytest.importorskip("ray", reason="needs 'flashlight-py[ray]'")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    # Of Ray's own: sockets and files that it leaves to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with ended(), ray_cluster(cpus=2):
        yield


# run ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"resources": {"CPU": 3}}, r"'CPU': 3\} each, placed by PACK, do not fit: .* room for 0"),
        ({"strategy": "STRICT_PACK"}, r"room for 2\. Its nodes have CPU 2; CPU 2; CPU 2"),
        ({"strategy": "STRICT_SPREAD", "nprocs": 4}, "4 ranks with .* room for 3"),
    ],
)
def test_what_the_nodes_can_never_hold_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        fl.launch.ray.run(tasks.total, (1,), **{"nprocs": SIZE, **options})


def test_what_others_hold_is_waited_for() -> None:
    others = ray.remote(tasks.sleep).options(num_cpus=2).remote(None)
    ray.wait([others], timeout=1)  # it begins
    with pytest.raises(TimeoutError, match=r"placed by PACK, within 2 s; .* Free are CPU [0-4]\b"):
        fl.launch.ray.run(tasks.total, (1,), nprocs=6, timeout=2)
    assert len(fl.launch.ray.run(tasks.total, (1,), nprocs=6)) == 6


def test_a_timeout_ends_an_actor_that_never_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake: no actor of Ray stays in its start by itself for sure."""
    monkeypatch.setattr(fl.launch.ray, "listen_here", tasks.sleep)
    with pytest.raises(TimeoutError, match=r"rank\(s\) 0, 1 of 2 had not returned"):
        fl.launch.ray.run(tasks.total, (1,), nprocs=2, timeout=4)


# Ray Train ----------------------------------------------------------------------------------------


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


def test_workers_of_a_trainer_are_a_world(tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> None:
        rank = ray.train.get_context().get_world_rank()
        total = int(fl.all_reduce(np.array(10 + rank)))
        found = f"{fl.get_world_rank()} of {fl.get_world_size()}: {total}"
        Path(config["folder"], str(rank)).write_text(found)

    (tmp_path / "found").mkdir()
    fit(tmp_path, train, folder=str(tmp_path / "found"))
    found = [(tmp_path / "found" / str(rank)).read_text() for rank in range(SIZE)]
    assert found == [f"{rank} of 3: 33" for rank in range(SIZE)]


def test_a_worker_that_raises_ends_the_others(tmp_path: Path) -> None:
    def train(config: dict[str, Any]) -> None:
        tasks.fail(fl.get_world_rank(), "raise")

    with pytest.raises(ray.train.v2.api.exceptions.WorkerGroupError, match="a bad batch"):
        fit(tmp_path, train)


@pytest.mark.parametrize("seed", range(int(os.environ.get("FLASHLIGHT_TEST_KILLS", "2"))))
def test_a_killed_trainer_goes_on_to_the_same_bits(tmp_path: Path, seed: int) -> None:
    def train(config: dict[str, Any]) -> None:
        mark = Path(config["folder"], "started")  # and what a rank ends with
        os.environ["FLASHLIGHT_RESTART_COUNT"] = str(int(mark.exists()))
        fl.barrier()
        mark.touch()
        bits = tasks.train(fl.get_world_rank(), *config.values())
        mark.write_bytes(bits)

    for name in ("undisturbed", "killed", "ray"):
        (tmp_path / name).mkdir()
    draw = random.Random(seed)
    expected = fl.spawn(tasks.train_alone, (str(tmp_path / "undisturbed"),), SIZE)
    at, victim = draw.randrange(20), draw.randrange(SIZE)
    folder = str(tmp_path / "killed")
    fit(tmp_path / "ray", train, 1, folder=folder, kill_at=at, victim=victim)
    assert (tmp_path / "killed" / "started").read_bytes() == expected[0]


# ray.util.collective ------------------------------------------------------------------------------


class Actor:
    """A member of groups."""

    def __init__(self) -> None:
        fl.launch.ray_collective.register()

    def enter(self, size: int, rank: int, name: str) -> None:
        from ray.util import collective

        collective.init_collective_group(size, rank, "FLASHLIGHT", name)

    def verbs(self, name: str) -> dict[str, Any]:
        """What each verb leaves behind on this rank."""
        from ray.util import collective
        from ray.util.collective.types import ReduceOp

        collective.barrier(name)  # enters a group that the driver has declared
        rank = collective.get_rank(name)
        size = collective.get_collective_group_size(name)
        found = {each: np.array([rank + 1.0, 2.0]) for each in ("sum", "prod", "reduce", "bcast")}
        collective.allreduce(found["sum"], name)
        collective.allreduce(found["prod"], name, ReduceOp.PRODUCT)
        collective.reduce(found["reduce"], 1, name, ReduceOp.MAX)
        collective.broadcast(found["bcast"], 2, name)
        parts = [np.zeros(2) for _ in range(size)]
        collective.allgather(parts, np.array([rank, 7.0]), name)
        found["gathered"] = np.stack(parts)
        found["scattered"] = np.zeros(2)
        terms = [np.array([rank, part]) * 1.0 for part in range(size)]
        collective.reducescatter(found["scattered"], terms, name)
        found["received"] = np.array([rank * 1.0])
        if rank == 0:
            collective.send(found["received"], 1, name)
        if rank == 1:
            collective.recv(found["received"], 0, name)
        collective.barrier(name)
        return found

    def leave(self, name: str) -> bool:
        from ray.util import collective

        collective.destroy_collective_group(name)
        return fl.is_distributed_init()


@pytest.fixture
def actors() -> Iterator[list[Any]]:
    made = [ray.remote(Actor).options(num_cpus=1).remote() for _ in range(SIZE)]
    yield made
    for actor in made:
        ray.kill(actor)


def each(actors: list[Any], method: str, *args: Any) -> list[Any]:
    return ray.get([getattr(actor, method).remote(*args) for actor in actors], timeout=120)  # type: ignore[no-any-return]


def enter(actors: list[Any], name: str) -> None:
    tasks_ = [actor.enter.remote(len(actors), rank, name) for rank, actor in enumerate(actors)]
    ray.get(tasks_, timeout=120)


def check(found: list[dict[str, Any]]) -> None:
    for rank, of in enumerate(found):
        assert of["sum"].tolist() == [6, 6]
        assert of["prod"].tolist() == [6, 8]
        assert of["reduce"].tolist() == [3 if rank == 1 else rank + 1, 2]
        assert of["bcast"].tolist() == [3, 2]
        assert of["gathered"].tolist() == [[0, 7], [1, 7], [2, 7]]
        assert of["scattered"].tolist() == [3, 3 * rank]
        assert of["received"].tolist() == [0 if rank < 2 else 2]


def test_every_verb_of_a_collective_group(actors: list[Any]) -> None:
    enter(actors, "a")
    check(each(actors, "verbs", "a"))
    enter(actors[::-1], "b")  # the same actors, in another order
    check(each(actors[::-1], "verbs", "b"))
    assert each(actors, "leave", "a") == [True] * SIZE
    check(each(actors[::-1], "verbs", "b"))
    assert each(actors, "leave", "b") == [False] * SIZE
    enter(actors, "a")
    check(each(actors, "verbs", "a"))


def test_a_group_that_the_driver_declares(actors: list[Any]) -> None:
    from ray.util import collective

    fl.launch.ray_collective.register()
    ranks = list(range(SIZE))
    collective.create_collective_group(actors, SIZE, ranks, "FLASHLIGHT", "declared")
    check(each(actors, "verbs", "declared"))


def in_a_group(rank: int) -> tuple[list[float], bool]:
    fl.launch.ray_collective.register()
    from ray.util import collective

    collective.init_collective_group(fl.get_world_size(), rank, "FLASHLIGHT", "of ranks")
    collective.allreduce(total := np.ones(1), "of ranks")
    collective.destroy_collective_group("of ranks")
    return total.tolist(), fl.is_distributed_init()


def test_the_ranks_of_run_are_members_of_groups() -> None:
    assert fl.launch.ray.run(in_a_group, nprocs=2) == [([2.0], True)] * 2


def test_an_actor_is_in_one_world(actors: list[Any]) -> None:
    enter(actors[:2], "first")
    with pytest.raises(RuntimeError, match="'second': some of its actors are ranks of another"):
        enter(actors, "second")
    with pytest.raises(RuntimeError, match="'second': some of its actors are ranks of another"):
        enter(actors[1:], "second")
    enter(actors[1::-1], "second")
