"""Training of modules on several ranks: gradient reduction, sharding and shares of the data."""

from flashlight_py.names import export

# Public names by module. `scripts/stubs` copies this table to a stub for type checkers.
_HOMES = {
    "data": ["DistributedDataContainer", "DistributedSampler", "ShardedDataset"],
    "data_parallel": [
        "Joined",
        "all_reduce_gradients",
        "distribute_module_grads",
        "join",
        "no_sync",
    ],
    "fully_sharded": ["fully_shard"],
    "functional": ["gradcheck_over_ranks"],
    "layers": ["shard_linear"],
    "leaf_sync": ["leaves"],
    "optimizer": ["DistributedOptimizer"],
    "synchronize": [
        *("PeriodicAveraging", "all_reduce_parameters", "broadcast_parameters", "sync_meter"),
        "synchronize",
    ],
    "workers": ["DataParallel"],
}
__all__ = ["functional"]
export(globals(), _HOMES, later=["workers"])  # ranks do not need code that starts processes
