"""Datasets: samples by index, in batches, in another order, ahead of time, or shared out."""

from __future__ import annotations

from flashlight_py.dataset.batch import BatchDataset, BatchFunction, BatchPolicy
from flashlight_py.dataset.dataset import Dataset
from flashlight_py.dataset.prefetch import PrefetchDataset
from flashlight_py.dataset.resample import ResampleDataset, ShuffleDataset
from flashlight_py.dataset.shares import partition_by_round_robin
from flashlight_py.dataset.tensor import TensorDataset

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
