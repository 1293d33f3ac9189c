"""Training of modules on several ranks: gradient reduction, sharding and shares of the data."""

from typing import TYPE_CHECKING, Any

from flashlight_py.parallel import functional
from flashlight_py.parallel.data import DistributedDataContainer, DistributedSampler, ShardedDataset
from flashlight_py.parallel.data_parallel import (
    all_reduce_gradients,
    distribute_module_grads,
    no_sync,
)
from flashlight_py.parallel.fully_sharded import fully_shard
from flashlight_py.parallel.gradcheck import gradcheck_over_ranks
from flashlight_py.parallel.join import Joined, join
from flashlight_py.parallel.leaf_sync import leaves
from flashlight_py.parallel.optimizer import DistributedOptimizer
from flashlight_py.parallel.shard_linear import shard_linear
from flashlight_py.parallel.synchronize import (
    PeriodicAveraging,
    all_reduce_parameters,
    broadcast_parameters,
    sync_meter,
    synchronize,
)

if TYPE_CHECKING:
    from flashlight_py.parallel.workers import DataParallel

__all__ = [
    "functional",
    "gradcheck_over_ranks",
    "all_reduce_gradients",
    "all_reduce_parameters",
    "broadcast_parameters",
    "distribute_module_grads",
    "leaves",
    "fully_shard",
    "no_sync",
    "join",
    "Joined",
    "synchronize",
    "DataParallel",
    "DistributedOptimizer",
    "PeriodicAveraging",
    "sync_meter",
    "DistributedDataContainer",
    "DistributedSampler",
    "ShardedDataset",
    "shard_linear",
]


def __getattr__(name: str) -> Any:
    """Import ``DataParallel`` on first use: ranks do not need the code that starts processes."""
    if name != "DataParallel":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from flashlight_py.parallel.workers import DataParallel

    return DataParallel
