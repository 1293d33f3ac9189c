"""Ranks in actors of a Ray cluster."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, TypeVar

from flashlight_py.launch import engine
from flashlight_py.launch.failures import Failure

T = TypeVar("T")

# How long is waited for resources that others use just now, in seconds, before that is an error.
_ROOM_SECONDS = 60.0


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

    Blocks until every rank has returned. Each rank is an actor, a process of its own; all are in
    one placement group. What they print goes where Ray writes it. Without ``ray.init()`` before,
    the cluster at RAY_ADDRESS is joined, or one is started on this machine for the call.

    Args:
        fn: function; cloudpickle sends what an actor cannot import.
        args: further arguments of ``fn``, the same for every rank, sent by pickle.
        nprocs: number of ranks; default as many as the cluster's resources are enough for.
        params: of :func:`flashlight_py.distributed_init`, without FILE_PATH.
        timeout: seconds for all attempts together; default no limit.
        max_restarts: how often all ranks are started again when one has failed;
            FLASHLIGHT_RESTART_COUNT counts.
        resources: of each rank, default ``{"CPU": 1}``; ``"GPU"`` and a cluster's own as well.
        strategy: of the placement group: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD.

    Raises:
        TypeError: ``fn`` cannot be called, or it or ``args`` cannot be pickled.
        ValueError: arguments make no sense, or the cluster is too small. No rank was started.
        RankFailedError: a rank raised, or its actor died; the first cause. The others were killed.
        TimeoutError: ``timeout`` has passed, or others did not release what the ranks need within
            60 seconds; the ranks have been killed.
    """
    import ray

    each = {"CPU": 1.0, **(resources or {})}
    with _initialised(ray):
        size = _most(ray, each) if nprocs is None else nprocs

        def attempt(start: engine.Start, ends: float) -> list[bytes]:
            with _placed(ray, start, each, strategy, ends) as group:
                ranks = _Ranks(ray, start, each, group)
                try:
                    ranks.start(start)
                    return engine.collect(range(start.size), ranks.outcomes, ends)
                finally:
                    ranks.end()

        return engine.run("ray.run", attempt, fn, args, size, params, timeout, max_restarts)


@contextmanager
def _initialised(ray: Any) -> Iterator[None]:
    """Join a cluster, or start one on this machine's loopback, where that was not done before."""
    if ray.is_initialized():
        yield
        return
    address = os.environ.get("RAY_ADDRESS")
    here = {"_node_ip_address": "127.0.0.1", "include_dashboard": False}
    ray.init(address=address or "local", **({} if address else here))
    try:
        yield
    finally:
        ray.shutdown()


def _most(ray: Any, each: Mapping[str, float]) -> int:
    """Return how many ranks the nodes have room for, were nothing else there."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    needed = {name: count for name, count in each.items() if count > 0}
    rooms = (min(int(node.get(k, 0) / v) for k, v in needed.items()) for node in nodes)
    return sum(rooms) if needed else len(nodes)


@contextmanager
def _placed(
    ray: Any, start: engine.Start, each: Mapping[str, float], strategy: str, ends: float
) -> Iterator[Any]:
    """Return a placement group that is ready; it is removed afterwards."""
    from ray.util import placement_group, remove_placement_group

    if (most := _most(ray, each)) < start.size and not start.restarts:
        raise ValueError(
            f"{start.name}: {start.size} ranks with {dict(each)} each do not fit: the cluster has "
            f"room for {most}"
        )
    group = placement_group([dict(each)] * start.size, strategy=strategy)
    try:
        seconds = min(_ROOM_SECONDS, max(ends - time.monotonic(), 0.0))
        if not group.wait(seconds):
            raise TimeoutError(
                f"{start.name}: the cluster had no room for {start.size} ranks with {dict(each)} "
                f"each, placed by {strategy}, within {seconds:g} s; is something else running?"
            )
        yield group
    finally:
        remove_placement_group(group)


class _Rank:
    """The actor."""

    def listen(self) -> tuple[str, int]:
        import ray

        host = ray.util.get_node_ip_address()
        return host, engine.listen(host)

    def serve(self, start: engine.Start, rank: int, host: str, port: int) -> bytes | Failure:
        return start.serve(rank, host, port)


class _Ranks:
    """An actor for each rank."""

    def __init__(
        self, ray: Any, start: engine.Start, each: Mapping[str, float], group: Any
    ) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        own = {name: count for name, count in each.items() if name not in ("CPU", "GPU")}
        needs = {"num_cpus": each["CPU"], "num_gpus": each.get("GPU", 0), "resources": own}
        actor = ray.remote(_Rank)
        self._ray = ray
        self._actors = [
            actor.options(
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, rank), **needs
            ).remote()
            for rank in range(start.size)
        ]
        self._tasks: dict[int, Any] = {}

    def start(self, start: engine.Start) -> None:
        try:
            host, port = self._ray.get(self._actors[0].listen.remote())
        except self._ray.exceptions.RayError as error:
            raise engine.RankFailure(0, _lost(error)) from error
        for rank, actor in enumerate(self._actors):
            self._tasks[rank] = actor.serve.remote(start, rank, host, port)

    def outcomes(self, ranks: Set[int], until: float) -> engine.Outcomes:
        """Wait for the end of one of ``ranks``, until that time; return how those did that have."""
        tasks = {self._tasks[rank]: rank for rank in ranks}
        seconds = max(until - time.monotonic(), 0.0)
        limit = None if seconds == float("inf") else seconds
        self._ray.wait([*tasks], num_returns=1, timeout=limit)
        ended, _ = self._ray.wait([*tasks], num_returns=len(tasks), timeout=0)
        return {tasks[task]: self._outcome(task) for task in ended}

    def _outcome(self, task: Any) -> bytes | Failure:
        try:
            outcome: bytes | Failure = self._ray.get(task)
        except self._ray.exceptions.RayError as error:
            return _lost(error)
        return outcome

    def end(self) -> None:
        """Kill the actors."""
        for actor in self._actors:
            self._ray.kill(actor)


def _lost(error: Exception) -> Failure:
    reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return Failure(f"was lost: {reason}", time.monotonic())
