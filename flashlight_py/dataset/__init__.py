"""Datasets: samples by index, batched, reordered, prefetched, or divided among ranks."""

from flashlight_py.names import export

# Public names by module. `scripts/stubs` copies this table to a stub for type checkers.
_HOMES = {
    "dataset": [
        *("Dataset", "TensorDataset", "BatchDataset", "BatchFunction", "BatchPolicy"),
        *("ShuffleDataset", "ResampleDataset", "partition_by_round_robin"),
    ],
    "prefetch": ["PrefetchDataset"],
}
export(globals(), _HOMES)
