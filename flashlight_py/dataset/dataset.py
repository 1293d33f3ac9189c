"""The contract of a dataset: a length, and a sample for each index."""

from __future__ import annotations

import abc
import operator
from collections.abc import Iterator, Sequence
from typing import Any, SupportsIndex, TypeAlias

import numpy as np
from numpy.typing import NDArray

from flashlight_py.device import Array, array_module

# One array or scalar per field, such as (input, target).
Sample: TypeAlias = tuple[Any, ...]
Indices: TypeAlias = NDArray[np.int64]


class Dataset(abc.ABC):
    """A finite sequence of samples; a sample is a tuple with one array per field.

    ``dataset[i]`` takes an index in [-len, len), iteration goes through all in order. A dataset
    of your own defines ``__len__`` and ``get``.
    """

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abc.abstractmethod
    def get(self, index: int) -> Sample:
        """Return the sample at ``index``, which is in [0, len): the caller has checked it."""

    def take(self, indices: Indices) -> Sample:
        """Return one batch: the samples at ``indices``, each field stacked along a new first dim.

        The arrays are new. ``indices`` are in [0, len), with shape (batch,).
        """
        return stack([self.get(int(index)) for index in indices])

    def __getitem__(self, index: SupportsIndex) -> Sample:
        """Return the sample at ``index``; a negative one counts from the end.

        Raises:
            IndexError: ``index`` is not in [-len, len).
            TypeError: ``index`` is no integer.
        """
        position = operator.index(index)
        size = len(self)
        if not -size <= position < size:
            raise IndexError(
                f"{type(self).__name__} holds {size} sample(s); index {position} is out of range"
            )
        return self.get(position + size if position < 0 else position)

    def __iter__(self) -> Iterator[Sample]:
        """Go through all samples in order."""
        return map(self.get, range(len(self)))

    def handed_out(self, index: int) -> None:  # noqa: B027 - most datasets need not know
        """Be notified that an iteration, or a PrefetchDataset's, hands out sample ``index`` now.

        A dataset that counts what was used overrides it; by itself it does nothing.
        """


def stack(samples: Sequence[Sample]) -> Sample:
    """Return one batch of ``samples``: each field stacked along a new first dimension.

    Raises:
        ValueError: samples differ in their number of fields, or in the shape of one.
    """
    counts = {len(sample) for sample in samples}
    if len(counts) != 1:
        raise ValueError(f"cannot batch samples with different numbers of fields: {sorted(counts)}")
    return tuple(
        _stack_field(number, values) for number, values in enumerate(zip(*samples, strict=True))
    )


def _stack_field(number: int, values: Sequence[Any]) -> Array:
    shapes = {np.shape(value) for value in values}
    if len(shapes) > 1:
        raise ValueError(
            f"cannot batch field {number}: the samples have shapes {sorted(shapes)}; pass a batch "
            "function for it, which may pad them"
        )
    stacked: Array = array_module(values[0]).stack(values)
    return stacked
