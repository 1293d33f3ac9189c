"""Several samples as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias, get_args

import numpy as np

from flashlight_py.dataset.dataset import Dataset, Sample, stack
from flashlight_py.dataset.tensor import TensorDataset
from flashlight_py.device import Array

BatchPolicy: TypeAlias = Literal["include_last", "skip_last", "divisible_only"]
# Makes one array of the samples' values of one field.
BatchFunction: TypeAlias = Callable[[Sequence[Any]], Array]


class BatchDataset(Dataset):
    """Groups ``batch_size`` successive samples of ``dataset``; each field gains a first dimension.

    ``policy`` says what becomes of a last batch that is not full: "include_last" keeps it, short;
    "skip_last" drops it; "divisible_only" refuses a dataset that has one. ``batch_functions``
    has one function per field, which makes an array of a list of values; None (also in place of
    one function) stacks them.

    Batches of a ``TensorDataset`` without functions are views of its arrays, not copies.

    Raises:
        ValueError: ``batch_size`` < 1, an unknown ``policy``, or the number of samples is no
            multiple of ``batch_size`` where the policy demands it.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        policy: BatchPolicy = "include_last",
        batch_functions: Sequence[BatchFunction | None] | None = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if policy not in get_args(BatchPolicy):
            raise ValueError(f"policy must be one of {get_args(BatchPolicy)}, got {policy!r}")
        rest = len(dataset) % batch_size
        if rest and policy == "divisible_only":
            raise ValueError(
                f"{len(dataset)} samples do not divide into batches of {batch_size}: {rest} remain"
            )
        self._dataset = dataset
        self._batch_size = batch_size
        self._functions = batch_functions
        self._stop = len(dataset) - (rest if policy == "skip_last" else 0)

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(range(0, self._stop, self._batch_size))

    def get(self, index: int) -> Sample:
        """Return batch ``index``: for each field an array of shape (batch, ...)."""
        start = index * self._batch_size
        stop = min(start + self._batch_size, self._stop)
        if self._functions is not None:
            return self._apply([self._dataset.get(i) for i in range(start, stop)], self._functions)
        if isinstance(self._dataset, TensorDataset):
            return tuple([array[start:stop] for array in self._dataset.arrays])
        return self._dataset.take(np.arange(start, stop))

    def _apply(self, samples: list[Sample], functions: Sequence[BatchFunction | None]) -> Sample:
        fields = list(zip(*samples, strict=True))
        if len(functions) != len(fields):
            raise ValueError(
                f"batch_functions has {len(functions)} entries, the samples have {len(fields)} "
                "fields; pass one per field, None to stack"
            )
        return tuple(
            stack([(value,) for value in values])[0] if function is None else function(values)
            for function, values in zip(functions, fields, strict=True)
        )

    def __iter__(self) -> Iterator[Sample]:
        """Go through all batches in order."""
        if self._functions is None and isinstance(self._dataset, TensorDataset):
            return self._dataset.batches(self._batch_size, self._stop)
        return super().__iter__()
