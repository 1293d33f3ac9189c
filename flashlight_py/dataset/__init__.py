"""Datasets: samples by index, in batches, in another order, ahead of time, or shared out."""

from importlib import import_module

# Where each public name is imported from; `scripts/stubs` tells type checkers the same.
_HOMES = {
    "dataset": [
        *("Dataset", "TensorDataset", "BatchDataset", "BatchFunction", "BatchPolicy"),
        *("ShuffleDataset", "ResampleDataset"),
    ],
    "prefetch": ["PrefetchDataset"],
    "shares": ["partition_by_round_robin"],
}
for _home, _names in _HOMES.items():
    _module = import_module(f"{__name__}.{_home}")
    globals().update({name: getattr(_module, name) for name in _names})

__all__ = [name for names in _HOMES.values() for name in names]
