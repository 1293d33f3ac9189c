"""Datasets: samples by index, in batches, in another order, ahead of time, or shared out."""

from __future__ import annotations

from flashlight_py.dataset.dataset import (
    BatchDataset,
    BatchFunction,
    BatchPolicy,
    Dataset,
    PrefetchDataset,
    ResampleDataset,
    ShuffleDataset,
    TensorDataset,
)
from flashlight_py.dataset.shares import partition_by_round_robin

__all__ = [
    "Dataset",
    "TensorDataset",
    "BatchDataset",
    "BatchFunction",
    "BatchPolicy",
    "ShuffleDataset",
    "ResampleDataset",
    "PrefetchDataset",
    "partition_by_round_robin",
]
