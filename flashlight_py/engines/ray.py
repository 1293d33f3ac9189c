"""Ranks in actors of a Ray cluster, and the workers of a trainer of Ray Train as ranks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, TypeVar

from flashlight_py.engines import run as engine
from flashlight_py.engines.rank import ENDING_SECONDS, Meeting, Start, listen
from flashlight_py.launch.calls import SpawnCall
from flashlight_py.launch.failures import Failure

T = TypeVar("T")
Resources = Mapping[str, float]


def run(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    nprocs: int | None = None,
    params: Mapping[str, Any] | None = None,
    timeout: float | None = None,
    max_restarts: int = 0,
    resources: Mapping[str, float] | None = None,
    strategy: str = "PACK",
) -> list[T]:
    """Run ``fn(rank, *args)`` in actors of Ray, as :func:`flashlight_py.spawn` does.

    Each rank is an actor, a process of its own; all are in one placement group. Without
    ``ray.init()`` before, the cluster at RAY_ADDRESS is joined, or one is started on this machine.

    Args:
        fn, args, params, timeout, max_restarts: as of ``spawn``; cloudpickle sends what an actor
            cannot import.
        nprocs: number of ranks; default as many as the cluster's resources are enough for.
        resources: of each rank, default ``{"CPU": 1}``; ``"GPU"`` and a cluster's own as well.
        strategy: of the placement group: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD.

    Raises:
        TypeError, ValueError: as of ``spawn``, or the cluster is too small.
        RankFailedError: a rank raised, or its actor died; the first cause. The others were killed.
        TimeoutError: ``timeout`` has passed, also where an actor did not start before, or others
            did not release what the ranks need within 60 seconds; the ranks have been killed.
    """
    import ray

    each = {"CPU": 1.0, **(resources or {})}
    with joined(ray):
        size = most_ranks(nodes_of(ray), each, strategy) if nprocs is None else nprocs

        def attempt(start: Start, call: SpawnCall) -> list[bytes]:
            with placed(ray, call, each, strategy, start.restarts > 0) as group:
                return engine.follow(call, RayRanks(ray, start, call, each, group))

        return engine.run("ray.run", attempt, fn, args, size, params, timeout, max_restarts)


class _Actor:
    def call(self, function: Callable[..., T], *args: Any) -> T:
        return function(*args)


class RayRanks:
    """An actor for each rank."""

    def __init__(
        self, ray: Any, start: Start, call: SpawnCall, each: Mapping[str, float], group: Any
    ) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        own = {name: count for name, count in each.items() if name not in ("CPU", "GPU")}
        needs = {"num_cpus": each["CPU"], "num_gpus": each.get("GPU", 0), "resources": own}
        places = [PlacementGroupSchedulingStrategy(group, rank) for rank in range(call.size)]
        actor = ray.remote(_Actor)
        self._ray, self._start, self._call = ray, start, call
        self._actors = [actor.options(scheduling_strategy=p, **needs).remote() for p in places]
        self._tasks: dict[Any, int] = {}

    def start(self) -> None:
        key, left = self._start.key, engine.seconds_until(self._call.ends)
        try:
            where = self._ray.get(self._actors[0].call.remote(listen_here, key), timeout=left)
        except self._ray.exceptions.GetTimeoutError:
            raise self._call.late(range(self._call.size)) from None
        except self._ray.exceptions.RayError as error:
            raise self._call.failed(0, engine.lost(error)) from error
        for rank, actor in enumerate(self._actors):
            self._tasks[actor.call.remote(self._start.serve, rank, where)] = rank

    def outcomes(self, ranks: Set[int], until: float) -> engine.Outcomes:
        """Wait until one of ``ranks`` ends, or that time; return the outcomes of all that ended."""
        tasks = [task for task, rank in self._tasks.items() if rank in ranks]
        self._ray.wait(tasks, num_returns=1, timeout=engine.seconds_until(until))
        ended, _ = self._ray.wait(tasks, num_returns=len(tasks), timeout=0)
        return {self._tasks[task]: self._outcome(task) for task in ended}

    def _outcome(self, task: Any) -> bytes | Failure:
        try:
            outcome: bytes | Failure = self._ray.get(task)
        except self._ray.exceptions.RayError as error:
            return engine.lost(error)
        return outcome

    def end(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)


# The cluster --------------------------------------------------------------------------------------


@contextmanager
def joined(ray: Any) -> Iterator[None]:
    """Join a cluster, or start one on this machine's loopback, where that was not done before."""
    if ray.is_initialized():
        yield
        return
    address = os.environ.get("RAY_ADDRESS")
    # Not 127.0.0.1, in whose place Ray takes the address of this machine's network.
    here = {"_node_ip_address": "127.0.0.2", "include_dashboard": False}
    ray.init(address=address or "local", **({} if address else here))
    try:
        yield
    finally:
        ray.shutdown()


def nodes_of(ray: Any) -> list[Resources]:
    """Return what each living node has in all, whoever uses it."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def most_ranks(nodes: Sequence[Resources], each: Resources, strategy: str) -> int:
    """Return how many ranks that need ``each`` these nodes have room for, were nothing else there.

    By ``strategy`` they are all on one node (STRICT_PACK), no two on one (STRICT_SPREAD), or
    anywhere.
    """
    needed = {name: count for name, count in each.items() if count > 0}
    rooms = [
        min((int(node.get(name, 0) / count) for name, count in needed.items()), default=1)
        for node in nodes
    ]
    if strategy == "STRICT_PACK":
        return max(rooms, default=0)
    return sum(min(room, 1) if strategy == "STRICT_SPREAD" else room for room in rooms)


@contextmanager
def placed(
    ray: Any, call: SpawnCall, each: Resources, strategy: str, is_restart: bool
) -> Iterator[Any]:
    """Reserve room for all ranks; it is released afterwards.

    Raises:
        ValueError: the cluster can never have it, as far as its nodes are known; a restart waits,
            as a node that was lost may come back.
        TimeoutError: others did not release it within ROOM_SECONDS, or before time was up.
    """
    from ray.util import placement_group, remove_placement_group

    nodes = nodes_of(ray)
    asked = f"{call.size} ranks with {dict(each)} each, placed by {strategy}"
    most = most_ranks(nodes, each, strategy)
    if most < call.size and not is_restart:
        has = "; ".join(_text_of(node) for node in nodes)
        raise ValueError(
            f"{call.name}: {asked}, do not fit: the cluster has room for {most}. Its nodes have "
            f"{has}"
        )
    group = placement_group([dict(each)] * call.size, strategy=strategy)
    try:
        seconds = min(engine.ROOM_SECONDS, max(call.ends - time.monotonic(), 0.0))
        if not group.wait(seconds):
            free = _text_of(ray.available_resources())
            raise TimeoutError(
                f"{call.name}: the cluster had no room for {asked}, within {seconds:.0f} s; is "
                f"something else running? Free are {free}"
            )
        yield group
    finally:
        remove_placement_group(group)


def _text_of(resources: Resources) -> str:
    """Return what was asked for by name, without what Ray counts for itself."""
    shown = {
        name: n for name, n in resources.items() if "node:" not in name and "memory" not in name
    }
    return ", ".join(f"{name} {n:g}" for name, n in sorted(shown.items())) or "nothing"


def listen_here(key: str) -> Meeting:
    """Listen for rank 0, in this actor, at the address that Ray has for its node."""
    import ray

    return listen(key, ray.util.get_node_ip_address())


# Ray Train ----------------------------------------------------------------------------------------


def config(params: Mapping[str, Any] | None = None) -> Any:
    """Return the ``backend_config`` of a trainer of Ray Train (v2) whose workers form a world.

    Worker ``i`` is rank ``i``. The world is initialised before the training function is called,
    also after a failure, when Ray has started new workers, and left after it. A worker whose
    function raises ends the verbs of the others by PeerLostError.

    Args:
        params: of :func:`flashlight_py.distributed_init`, without FILE_PATH.

    Raises:
        ValueError: ``params`` has FILE_PATH: the workers meet at a port of the first.

    Example:
        >>> from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
        >>> trainer = DataParallelTrainer(
        ...     train,
        ...     backend_config=fl.launch.ray_train.config(),
        ...     scaling_config=ray.train.ScalingConfig(num_workers=4),
        ... )
        >>> trainer.fit()
    """
    from ray.train.backend import Backend, BackendConfig

    if params is not None and "FILE_PATH" in params:
        raise ValueError("ray_train.config: the workers meet at a port; leave FILE_PATH out")

    class WorldBackend(_TrainerWorld, Backend):  # type: ignore[misc]
        """The world of a group of workers."""

    class WorldConfig(_TrainerConfig, BackendConfig):  # type: ignore[misc]
        """The configuration that Ray makes the backend from, in the controlling process."""

        backend_cls = WorldBackend

    return WorldConfig(dict(params or {}))


class _TrainerConfig:
    def __init__(self, params: dict[str, Any]) -> None:
        self.params = params

    @property
    def train_func_context(self) -> Callable[[], Any]:
        import flashlight_py as fl

        return fl.abort_on_exception

    def to_dict(self) -> dict[str, Any]:
        return {name: str(value) for name, value in self.params.items()}


class _TrainerWorld:
    """The methods that Ray calls, in the process that controls the workers."""

    def on_start(self, workers: Any, backend_config: _TrainerConfig) -> None:
        """Have the workers join a world of their own."""
        import ray

        start = Start(len(workers))
        world = (workers.execute_single(0, listen_here, start.key), backend_config.params)
        joins = [workers.execute_single_async(i, start.join, i, *world) for i in range(start.size)]
        ray.get(joins)

    def on_shutdown(self, workers: Any, _: _TrainerConfig) -> None:
        """Have them leave it; Ray ends those that cannot, with their processes."""
        import ray

        tasks = workers.execute_async(_leave)
        ray.wait(tasks, num_returns=len(tasks), timeout=ENDING_SECONDS)


def _leave() -> None:
    import flashlight_py as fl

    fl.distributed_shutdown()
