"""The workers of a trainer of Ray Train as the ranks of a world."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Callable, Mapping
from typing import Any

from flashlight_py.launch.engine_rank import ENDING_SECONDS, join
from flashlight_py.launch.ray_cluster import listen_here


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

    class WorldBackend(_World, Backend):  # type: ignore[misc]
        """The world of a group of workers."""

    class WorldConfig(_Config, BackendConfig):  # type: ignore[misc]
        """What Ray makes the backend from, where it controls the workers."""

        backend_cls = WorldBackend

    return WorldConfig(dict(params or {}))


class _Config:
    def __init__(self, params: dict[str, Any]) -> None:
        self.params = params

    @property
    def train_func_context(self) -> Callable[[], Any]:
        import flashlight_py as fl

        return fl.abort_on_exception

    def to_dict(self) -> dict[str, Any]:
        """Return what Ray shows of it."""
        return {name: str(value) for name, value in self.params.items()}


class _World:
    """What Ray calls, in the process that controls the workers."""

    def on_start(self, workers: Any, backend_config: _Config) -> None:
        """Have the workers join a world of their own."""
        import ray

        size, key, secret = len(workers), uuid.uuid4().hex, secrets.token_hex(32)
        world = (size, workers.execute_single(0, listen_here, key), secret, backend_config.params)
        ray.get([workers.execute_single_async(i, join, key, i, *world) for i in range(size)])

    def on_shutdown(self, workers: Any, _: _Config) -> None:
        """Have them leave it; what cannot is ended by Ray, with its process."""
        import ray

        tasks = workers.execute_async(_leave)
        ray.wait(tasks, num_returns=len(tasks), timeout=ENDING_SECONDS)


def _leave() -> None:
    import flashlight_py as fl

    fl.distributed_shutdown()
