"""Ranks in actors of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, TypeVar

from flashlight_py.launch import engine
from flashlight_py.launch.calls import Call
from flashlight_py.launch.engine_rank import Start
from flashlight_py.launch.failures import Failure
from flashlight_py.launch.ray_cluster import joined, listen_here, most_ranks, nodes_of, placed

T = TypeVar("T")


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

        def attempt(start: Start, call: Call) -> list[bytes]:
            with placed(ray, call, each, strategy, start.restarts > 0) as group:
                return engine.follow(call, _Ranks(ray, start, call, each, group))

        return engine.run("ray.run", attempt, fn, args, size, params, timeout, max_restarts)


class _Rank:
    """The actor."""

    def call(self, function: Callable[..., T], *args: Any) -> T:
        return function(*args)


class _Ranks:
    """An actor for each rank."""

    def __init__(
        self, ray: Any, start: Start, call: Call, each: Mapping[str, float], group: Any
    ) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        own = {name: count for name, count in each.items() if name not in ("CPU", "GPU")}
        needs = {"num_cpus": each["CPU"], "num_gpus": each.get("GPU", 0), "resources": own}
        places = [PlacementGroupSchedulingStrategy(group, rank) for rank in range(call.size)]
        actor = ray.remote(_Rank)
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
        """Wait for the end of one of ``ranks``, until that time; return how those did that have."""
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
        """Kill the actors."""
        for actor in self._actors:
            self._ray.kill(actor)
