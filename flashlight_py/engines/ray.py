"""Ranks in actors of a Ray cluster, and workers of a Ray Train trainer as ranks."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, TypeVar

from flashlight_py.engines import run as engine
from flashlight_py.engines.rank import ENDING_SECONDS, RendezvousAddress, Start, listen_for_ranks
from flashlight_py.launch.calls import SpawnCall
from flashlight_py.launch.failures import Failure

T = TypeVar("T")
Resources = Mapping[str, float]


def run(
    fn: Callable[..., T], args: Sequence[Any] = (), nprocs: int | None = None,
    params: Mapping[str, Any] | None = None, timeout: float | None = None, max_restarts: int = 0,
    resources: Mapping[str, float] | None = None, strategy: str = "PACK",
) -> list[T]:  # fmt: skip
    """Run ``fn(rank, *args)`` in actors of Ray, like :func:`flashlight_py.spawn`.

    Each rank is an actor in a separate process; all actors are in one placement group. If Ray is
    not initialised, the call joins the cluster at RAY_ADDRESS. If RAY_ADDRESS is not set, it starts
    a cluster on this machine.

    Args:
        fn, args, params, timeout, max_restarts: As in ``spawn``. cloudpickle sends objects that an
            actor cannot import.
        nprocs: Number of ranks. Default: the largest number that the cluster has resources for.
        resources: Resources of each rank: ``"CPU"``, ``"GPU"``, or custom. Default ``{"CPU": 1}``.
        strategy: Strategy of the placement group: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD.

    Raises:
        TypeError: As in ``spawn``.
        ValueError: As in ``spawn``, or if the cluster is too small.
        RankFailedError: If a rank raises or its actor dies. The other ranks are killed.
        TimeoutError: If ``timeout`` passes, or if the resources are not free after 60 seconds. All
            ranks are killed.
    """
    import ray

    needs = {"CPU": 1.0, **(resources or {})}
    with ray_cluster(ray):
        size = most_ranks(nodes_of(ray), needs, strategy) if nprocs is None else nprocs

        def attempt(start: Start, call: SpawnCall) -> list[bytes]:
            with reserved_resources(ray, call, needs, strategy, start.restarts > 0) as group:
                return engine.follow(call, RayRanks(ray, start, call, needs, group))

        return engine.run("ray.run", attempt, fn, args, size, params, timeout, max_restarts)


class _Actor:
    def call(self, function: Callable[..., T], *args: Any) -> T:
        return function(*args)


class RayRanks:
    def __init__(
        self, ray: Any, start: Start, call: SpawnCall, needs: Mapping[str, float], group: Any
    ) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        custom = {name: count for name, count in needs.items() if name not in ("CPU", "GPU")}
        options = {"num_cpus": needs["CPU"], "num_gpus": needs.get("GPU", 0), "resources": custom}
        slots = [PlacementGroupSchedulingStrategy(group, rank) for rank in range(call.size)]
        actor = ray.remote(_Actor)
        self._ray, self._start, self._call = ray, start, call
        self._actors = [actor.options(scheduling_strategy=s, **options).remote() for s in slots]
        self._tasks: dict[Any, int] = {}

    def start(self) -> None:
        key, seconds = self._start.key, engine.seconds_until(self._call.ends)
        try:
            listening = self._actors[0].call.remote(listen_on_node, key)
            rendezvous = self._ray.get(listening, timeout=seconds)
        except self._ray.exceptions.GetTimeoutError:
            raise self._call.late(range(self._call.size)) from None
        except self._ray.exceptions.RayError as error:
            raise self._call.failed(0, engine.lost_rank(error)) from error
        for rank, actor in enumerate(self._actors):
            self._tasks[actor.call.remote(self._start.serve, rank, rendezvous)] = rank

    def outcomes(self, ranks: Set[int], until: float) -> engine.Outcomes:
        tasks = [task for task, rank in self._tasks.items() if rank in ranks]
        self._ray.wait(tasks, num_returns=1, timeout=engine.seconds_until(until))
        ended, _ = self._ray.wait(tasks, num_returns=len(tasks), timeout=0)
        return {self._tasks[task]: self._outcome(task) for task in ended}

    def _outcome(self, task: Any) -> bytes | Failure:
        try:
            outcome: bytes | Failure = self._ray.get(task)
        except self._ray.exceptions.RayError as error:
            return engine.lost_rank(error)
        return outcome

    def end(self) -> None:
        for actor in self._actors:
            self._ray.kill(actor)


@contextmanager
def ray_cluster(ray: Any) -> Iterator[None]:
    """If Ray is not initialised, join or start a cluster as ``run`` does, and leave it on exit."""
    if ray.is_initialized():
        yield
        return
    address = os.environ.get("RAY_ADDRESS")
    # Not 127.0.0.1, which Ray replaces by the network address of this machine.
    local_options = {"_node_ip_address": "127.0.0.2", "include_dashboard": False}
    ray.init(address=address or "local", **({} if address else local_options))
    try:
        yield
    finally:
        ray.shutdown()


def nodes_of(ray: Any) -> list[Resources]:
    """Return the total resources of each living node, including resources in use."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def most_ranks(nodes: Sequence[Resources], needs: Resources, strategy: str) -> int:
    """Return the number of ranks that fit on the nodes if no other job uses them.

    Each rank needs the resources ``needs``. With STRICT_PACK all ranks are on one node, and with
    STRICT_SPREAD each rank is on a different node.
    """
    positive = {name: count for name, count in needs.items() if count > 0}
    capacities = [
        min((int(node.get(name, 0) / count) for name, count in positive.items()), default=1)
        for node in nodes
    ]
    if strategy == "STRICT_PACK":
        return max(capacities, default=0)
    return sum(min(ranks, 1) if strategy == "STRICT_SPREAD" else ranks for ranks in capacities)


@contextmanager
def reserved_resources(
    ray: Any, call: SpawnCall, needs: Resources, strategy: str, is_restart: bool
) -> Iterator[Any]:
    """Reserve resources for all ranks, and release them on exit.

    Raises:
        ValueError: If the living nodes have too few resources, unless ``is_restart`` is True: a
            lost node may return.
        TimeoutError: If the resources are not free after SLOT_SECONDS or the timeout of ``call``.
    """
    from ray.util import placement_group, remove_placement_group

    nodes = nodes_of(ray)
    request = f"{call.size} ranks with {dict(needs)} each, placed by {strategy}"
    capacity = most_ranks(nodes, needs, strategy)
    if capacity < call.size and not is_restart:
        descriptions = "; ".join(_format_resources(node) for node in nodes)
        raise ValueError(
            f"{call.name}: expected resources for {request}, got resources for {capacity} ranks. "
            f"The nodes have {descriptions}. Add nodes or lower nprocs or resources"
        )
    group = placement_group([dict(needs)] * call.size, strategy=strategy)
    try:
        seconds = min(engine.SLOT_SECONDS, max(call.ends - time.monotonic(), 0.0))
        if not group.wait(seconds):
            free = _format_resources(ray.available_resources())
            raise TimeoutError(
                f"{call.name}: expected free resources for {request}, got {free} after "
                f"{seconds:.0f} s. Stop other jobs or lower nprocs"
            )
        yield group
    finally:
        remove_placement_group(group)


def _format_resources(resources: Resources) -> str:
    """Return the resources as text, without Ray's internal entries for nodes and memory."""
    shown = {
        name: n for name, n in resources.items() if "node:" not in name and "memory" not in name
    }
    return ", ".join(f"{name} {n:g}" for name, n in sorted(shown.items())) or "nothing"


def listen_on_node(key: str) -> RendezvousAddress:
    """Open the listener to which the ranks connect, at the address of this node in Ray."""
    import ray

    return listen_for_ranks(key, ray.util.get_node_ip_address())


def config(params: Mapping[str, Any] | None = None) -> Any:
    """Return the ``backend_config`` of a Ray Train (v2) trainer. Its workers form a world.

    Worker ``i`` is rank ``i``. The world is initialised before each call of the training function,
    also if Ray has replaced workers after a failure. The workers leave the world after the
    call. If the function of one worker raises, communication on the other workers raises
    PeerLostError.

    Args:
        params: Parameters of :func:`flashlight_py.distributed_init`, without FILE_PATH.

    Raises:
        ValueError: If ``params`` contains FILE_PATH. The workers connect to a port of worker 0.

    Example:
        >>> from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
        >>> trainer = DataParallelTrainer(
        ...     train_loop,  # your function, which each worker calls
        ...     backend_config=fl.launch.ray_train.config(),
        ...     scaling_config=ray.train.ScalingConfig(num_workers=4),
        ... )
        >>> trainer.fit()
    """
    import ray
    from ray.train.backend import Backend, BackendConfig

    if params is not None and "FILE_PATH" in params:
        raise ValueError("ray_train.config: params must not contain FILE_PATH. Remove FILE_PATH")

    class WorldBackend(Backend):  # type: ignore[misc]
        """Functions that Ray calls in the process that controls the workers."""

        def on_start(self, workers: Any, backend_config: "WorldConfig") -> None:
            start = Start(len(workers))
            world = workers.execute_single(0, listen_on_node, start.key), backend_config.params
            joining = [
                workers.execute_single_async(i, start.join, i, *world) for i in range(start.size)
            ]
            ray.get(joining)

        def on_shutdown(self, workers: Any, _: "WorldConfig") -> None:
            """Make the workers leave the world. After 5 seconds, Ray kills the others."""
            tasks = workers.execute_async(_leave)
            ray.wait(tasks, num_returns=len(tasks), timeout=ENDING_SECONDS)

    class WorldConfig(BackendConfig):  # type: ignore[misc]
        backend_cls = WorldBackend

        def __init__(self) -> None:
            self.params = dict(params or {})

        @property
        def train_func_context(self) -> Callable[[], Any]:
            import flashlight_py as fl

            return fl.abort_on_exception

        def to_dict(self) -> dict[str, Any]:
            return {name: str(value) for name, value in self.params.items()}

    return WorldConfig()


def _leave() -> None:
    import flashlight_py as fl

    fl.distributed_shutdown()
