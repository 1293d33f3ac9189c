"""Datasets: samples by index, from arrays, in batches, or in another order."""

import abc
import operator
from collections.abc import Callable, Iterator, Sequence
from itertools import starmap
from typing import Any, Literal, SupportsIndex, TypeAlias, get_args

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
        """Return one batch, the samples at ``indices`` (batch,): each field stacked, copied."""
        return stack([self.get(int(index)) for index in indices])

    def __getitem__(self, index: SupportsIndex) -> Sample:
        """Return the sample at ``index``; a negative one counts from the end.

        Raises:
            IndexError: ``index`` is not in [-len, len).
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
        """Be notified that an iteration hands out sample ``index`` now; most ignore it."""


def stack(samples: Sequence[Sample]) -> Sample:
    """Return one batch of ``samples``: each field stacked along a new first dimension.

    Raises ValueError if samples differ in their number of fields, or in the shape of one.
    """
    counts = {len(sample) for sample in samples}
    if len(counts) != 1:
        raise ValueError(f"cannot batch samples with different numbers of fields: {sorted(counts)}")
    return tuple(starmap(_stack_field, enumerate(zip(*samples, strict=True))))


def _stack_field(number: int, values: Sequence[Any]) -> Array:
    shapes = {np.shape(value) for value in values}
    if len(shapes) > 1:
        raise ValueError(
            f"cannot batch field {number}: the samples have shapes {sorted(shapes)}; pass a batch "
            "function for it, which may pad them"
        )
    return array_module(values[0]).stack(values)  # type: ignore[no-any-return]


class TensorDataset(Dataset):
    """The rows of some arrays: sample ``i`` is ``(arrays[0][i], arrays[1][i], ...)``.

    All arrays have the same first dimension, the number of samples. Samples are views, or NumPy
    scalars of an array with one dimension; nothing is copied. Of arrays in files (h5py, zarr), only
    the rows of a sample or batch are read.

    Raises:
        TypeError: ``arrays`` is a single array, whose rows would be taken for the arrays, or holds
            something that is none.
        ValueError: there is no array, one has no dimension, or the first dimensions differ.
    """

    def __init__(self, arrays: Sequence[Array]) -> None:
        if hasattr(arrays, "shape"):
            raise TypeError(
                f"a TensorDataset takes a list of arrays, got one of shape {arrays.shape}, whose "
                "rows would become arrays of their own; write TensorDataset([array])"
            )
        self.arrays: tuple[Array, ...] = tuple(arrays)
        for array in self.arrays:
            if not hasattr(array, "shape"):
                raise TypeError(
                    f"a TensorDataset takes arrays, got {type(array).__name__} among them; "
                    "make one by numpy.asarray"
                )
        if not self.arrays:
            raise ValueError("a TensorDataset needs at least one array")
        shapes = [array.shape for array in self.arrays]
        if any(not shape for shape in shapes) or len({shape[0] for shape in shapes}) > 1:
            raise ValueError(
                "the arrays of a TensorDataset need the same first dimension, the number of "
                f"samples; got the shapes {shapes}"
            )

    def __len__(self) -> int:
        return int(self.arrays[0].shape[0])  # arrays of zarr have no len

    def get(self, index: int) -> Sample:
        return tuple([array[index] for array in self.arrays])

    def take(self, indices: Indices) -> Sample:
        return tuple([_rows(array, indices) for array in self.arrays])

    def batches(self, batch_size: int, stop: int) -> Iterator[Sample]:
        """Iterate over views of ``batch_size`` rows each, up to row ``stop``; the last is shorter.

        No line of Python runs for a batch, which would take as long as a training step.
        """
        starts = range(0, stop, batch_size)
        stops = [*starts[1:], stop] if starts else []
        views = (map(array.__getitem__, map(slice, starts, stops)) for array in self.arrays)
        return zip(*views, strict=True)

    def __iter__(self) -> Iterator[Sample]:
        return zip(*self.arrays, strict=True)


def _rows(array: Any, indices: Indices) -> Array:
    """Return the rows at ``indices``; of an array that is not in memory, each is read once."""
    if hasattr(array, "__array_ufunc__") or hasattr(array, "__dlpack__"):
        return array[indices]  # type: ignore[no-any-return]
    rows = np.add(indices, np.less(indices, 0) * array.shape[0])
    ascending, places = np.unique(rows, return_inverse=True)  # h5py takes no other order
    return array[ascending][places]  # type: ignore[no-any-return]


BatchPolicy: TypeAlias = Literal["include_last", "skip_last", "divisible_only"]
# Makes one array of the samples' values of one field.
BatchFunction: TypeAlias = Callable[[Sequence[Any]], Array]


class BatchDataset(Dataset):
    """Groups ``batch_size`` successive samples of ``dataset``; each field gains a first dimension.

    ``policy`` says what becomes of a last batch that is not full: "include_last" keeps it, short;
    "skip_last" drops it; "divisible_only" refuses a dataset that has one. ``batch_functions`` has
    one function per field, which makes an array of a list of values; None (also in place of one
    function) stacks them. Batches of a ``TensorDataset`` without functions are views of its arrays.

    Raises:
        ValueError: ``batch_size`` < 1, an unknown ``policy``, or the number of samples is no
            multiple of ``batch_size`` if the policy demands it.
    """

    def __init__(
        self, dataset: Dataset, batch_size: int, policy: BatchPolicy = "include_last",
        batch_functions: Sequence[BatchFunction | None] | None = None,
    ) -> None:  # fmt: skip
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if policy not in get_args(BatchPolicy):
            raise ValueError(f"policy must be one of {get_args(BatchPolicy)}, got {policy!r}")
        rest = len(dataset) % batch_size
        if rest and policy == "divisible_only":
            raise ValueError(
                f"{len(dataset)} samples do not divide into batches of {batch_size}: {rest} remain"
            )
        self._dataset, self._batch_size, self._functions = dataset, batch_size, batch_functions
        self._stop = len(dataset) - (rest if policy == "skip_last" else 0)

    def __len__(self) -> int:
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
            _stack_field(number, values) if function is None else function(values)
            for number, (function, values) in enumerate(zip(functions, fields, strict=True))
        )

    def __iter__(self) -> Iterator[Sample]:
        if self._functions is None and isinstance(self._dataset, TensorDataset):
            return self._dataset.batches(self._batch_size, self._stop)
        return super().__iter__()


class ResampleDataset(Dataset):
    """The samples of ``dataset`` at ``indices``, in that order; an index may be repeated.

    ``indices`` is a sequence of integers, or a function from [0, n) to an index of ``dataset``,
    asked once for each; ``n`` goes with a function and defaults to the length of ``dataset``.

    Raises:
        ValueError: an index is not in [0, len(dataset)), or ``n`` is passed with a sequence.
    """

    def __init__(
        self, dataset: Dataset, indices: Sequence[int] | Indices | Callable[[int], int],
        n: int | None = None,
    ) -> None:  # fmt: skip
        if callable(indices):
            indices = [indices(i) for i in range(len(dataset) if n is None else n)]
        elif n is not None:
            raise ValueError("n goes with a function; a sequence of indices has its own length")
        checked, size = np.array(indices), len(dataset)
        if checked.size == 0:
            checked = checked.astype(np.int64)
        if checked.ndim != 1 or not np.issubdtype(checked.dtype, np.integer):
            raise ValueError(
                "indices must be a flat sequence of integers; "
                f"got shape {checked.shape} and dtype {checked.dtype}"
            )
        wrong = checked[(checked < 0) | (checked >= size)]
        if wrong.size:
            raise ValueError(
                f"indices must be in [0, {size}), the dataset's length; got {wrong[0]}"
            )
        self._dataset = dataset
        self._indices: Indices = checked.astype(np.int64)

    def __len__(self) -> int:
        return len(self._indices)

    def get(self, index: int) -> Sample:
        return self._dataset.get(int(self._indices[index]))

    def take(self, indices: Indices) -> Sample:
        return self._dataset.take(self._indices[indices])


class ShuffleDataset(ResampleDataset):
    """All samples of ``dataset`` once each, in an order that ``seed`` decides.

    The same seed gives the same order in every process; ``resample`` draws the next one.
    """

    def __init__(self, dataset: Dataset, seed: int = 0) -> None:
        super().__init__(dataset, [])
        self._random = np.random.default_rng(seed)
        self.resample()

    def resample(self) -> None:
        """Draw a new order, such as before each epoch; the n-th one is the same for equal seeds."""
        self._indices = self._random.permutation(len(self._dataset))

    def set_seed(self, seed: int) -> None:
        """Let the next ``resample`` start anew from ``seed``."""
        self._random = np.random.default_rng(seed)
