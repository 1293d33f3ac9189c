"""Datasets: samples by index, batched, reordered, prefetched, or divided among ranks."""

from importlib import import_module

# Public names by module. `scripts/stubs` copies this table to a stub for type checkers.
_HOMES = {
    "dataset": [
        *("Dataset", "TensorDataset", "BatchDataset", "BatchFunction", "BatchPolicy"),
        *("ShuffleDataset", "ResampleDataset"),
    ],
    "prefetch": ["PrefetchDataset"],
    "shares": ["partition_by_round_robin"],
}
for _module_name, _names in _HOMES.items():
    _module = import_module(f"{__name__}.{_module_name}")
    globals().update({name: getattr(_module, name) for name in _names})

__all__ = [name for names in _HOMES.values() for name in names]
