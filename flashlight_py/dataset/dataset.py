"""Datasets: samples by index, from arrays, in batches, or in another order; shares of samples."""

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

    ``dataset[i]`` accepts an index in [-len, len). Iteration yields all samples in order.
    Subclasses define ``__len__`` and ``get``.
    """

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abc.abstractmethod
    def get(self, index: int) -> Sample:
        """Return the sample at ``index``, an index in [0, len) that the caller has checked."""

    def take(self, indices: Indices) -> Sample:
        """Return the samples at ``indices``, a 1-D array, as one batch of new, stacked arrays.

        Raises:
            ValueError: If samples differ in their number of fields or in the shape of a field.
        """
        samples = [self.get(int(index)) for index in indices]
        if len(counts := {len(sample) for sample in samples}) != 1:
            raise ValueError(
                f"batch: samples must have equal numbers of fields, got {sorted(counts)}"
            )
        return tuple(starmap(_stack_field, enumerate(zip(*samples, strict=True))))

    def __getitem__(self, index: SupportsIndex) -> Sample:
        """Return the sample at ``index``; a negative index counts from the end.

        Raises:
            IndexError: If ``index`` is not in [-len, len).
        """
        position = operator.index(index)
        size = len(self)
        if not -size <= position < size:
            raise IndexError(
                f"{type(self).__name__}: index must be in [-{size}, {size}), got {position}"
            )
        return self.get(position + size if position < 0 else position)

    def __iter__(self) -> Iterator[Sample]:
        """Yield all samples in order."""
        return map(self.get, range(len(self)))

    def handed_out(self, index: int) -> None:  # noqa: B027 - optional for subclasses
        """Called when an iteration returns sample ``index``. This implementation does nothing."""


def _stack_field(number: int, values: Sequence[Any]) -> Array:
    shapes = {np.shape(value) for value in values}
    if len(shapes) > 1:
        raise ValueError(
            f"batch: expected samples of equal shape in field {number}, got shapes "
            f"{sorted(shapes)}. Pass a batch function for this field, which may pad them"
        )
    return array_module(values[0]).stack(values)  # type: ignore[no-any-return]


class TensorDataset(Dataset):
    """The rows of some arrays: sample ``i`` is ``(arrays[0][i], arrays[1][i], ...)``.

    All arrays have the same first dimension, the number of samples. Nothing is copied: samples are
    views, or NumPy scalars if an array has one dimension. If arrays are stored in files (h5py,
    zarr), only the rows of a sample or batch are read.

    Raises:
        TypeError: If ``arrays`` is a single array, whose rows would count as arrays, or contains an
            object that is not an array.
        ValueError: If there is no array, an array has no dimension, or the first dimensions differ.
    """

    def __init__(self, arrays: Sequence[Array]) -> None:
        if hasattr(arrays, "shape"):
            raise TypeError(
                f"TensorDataset: expected a list of arrays, got an array of shape {arrays.shape}. "
                "Pass TensorDataset([array])"
            )
        self.arrays: tuple[Array, ...] = tuple(arrays)
        for array in self.arrays:
            if not hasattr(array, "shape"):
                raise TypeError(
                    f"TensorDataset: expected a list of arrays, got {type(array).__name__} in the "
                    "list. Pass numpy.asarray of it"
                )
        if not self.arrays:
            raise ValueError("TensorDataset: expected at least one array, got an empty list")
        shapes = [array.shape for array in self.arrays]
        if any(not shape for shape in shapes) or len({shape[0] for shape in shapes}) > 1:
            raise ValueError(
                "TensorDataset: expected arrays with the same first dimension, the number of "
                f"samples, got shapes {shapes}"
            )

    def __len__(self) -> int:
        return int(self.arrays[0].shape[0])  # zarr arrays have no len()

    def get(self, index: int) -> Sample:
        return tuple([array[index] for array in self.arrays])

    def take(self, indices: Indices) -> Sample:
        return tuple([_rows(array, indices) for array in self.arrays])

    def batches(self, batch_size: int, stop: int) -> Iterator[Sample]:
        """Return an iterator over the batches of rows [0, stop), as views. The last may be smaller.

        It runs no Python code per batch, because that would take as long as a small training step.
        """
        starts = range(0, stop, batch_size)
        stops = [*starts[1:], stop] if starts else []
        views = (map(array.__getitem__, map(slice, starts, stops)) for array in self.arrays)
        return zip(*views, strict=True)

    def __iter__(self) -> Iterator[Sample]:
        return zip(*self.arrays, strict=True)


def _rows(array: Any, indices: Indices) -> Array:
    """Return the rows at ``indices``. Repeated rows of an array in a file are read once."""
    if hasattr(array, "__array_ufunc__") or hasattr(array, "__dlpack__"):
        return array[indices]  # type: ignore[no-any-return]
    rows = np.add(indices, np.less(indices, 0) * array.shape[0])
    ascending, positions = np.unique(rows, return_inverse=True)  # h5py requires ascending indices
    return array[ascending][positions]  # type: ignore[no-any-return]


BatchPolicy: TypeAlias = Literal["include_last", "skip_last", "divisible_only"]
# Function that makes one array from a list: the values of one field in several samples.
BatchFunction: TypeAlias = Callable[[Sequence[Any]], Array]


class BatchDataset(Dataset):
    """Batches of ``batch_size`` consecutive samples of ``dataset``, in a new first dimension.

    ``policy`` selects what happens to an incomplete last batch: "include_last" keeps it,
    "skip_last" drops it, and "divisible_only" raises ValueError. ``batch_functions`` has one
    function per field, which makes an array from a list of values. Fields without a function are
    stacked. Without ``batch_functions``, batches of a ``TensorDataset`` are views of its arrays.

    Raises:
        ValueError: If ``batch_size`` < 1, ``policy`` is unknown, or ``policy`` is "divisible_only"
            and the number of samples is not a multiple of ``batch_size``.
    """

    def __init__(
        self, dataset: Dataset, batch_size: int, policy: BatchPolicy = "include_last",
        batch_functions: Sequence[BatchFunction | None] | None = None,
    ) -> None:  # fmt: skip
        if batch_size < 1:
            raise ValueError(f"BatchDataset: batch_size must be at least 1, got {batch_size}")
        if policy not in get_args(BatchPolicy):
            raise ValueError(f"policy must be one of {get_args(BatchPolicy)}, got {policy!r}")
        rest = len(dataset) % batch_size
        if rest and policy == "divisible_only":
            raise ValueError(
                f"BatchDataset: expected a multiple of {batch_size} samples, got {len(dataset)}"
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
                f"BatchDataset: expected {len(fields)} batch_functions, one per field, got "
                f"{len(functions)}. Pass None for a field to stack it"
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

    ``indices`` is a sequence of integers, or a function that returns the index for a position in
    [0, n). The constructor calls the function for each position. ``n`` can only be passed with a
    function. It is the length of ``dataset`` by default.

    Raises:
        ValueError: If an index is not in [0, len(dataset)), or ``n`` is passed with a sequence.
    """

    def __init__(
        self, dataset: Dataset, indices: Sequence[int] | Indices | Callable[[int], int],
        n: int | None = None,
    ) -> None:  # fmt: skip
        if callable(indices):
            indices = [indices(i) for i in range(len(dataset) if n is None else n)]
        elif n is not None:
            raise ValueError("ResampleDataset: n requires a function as indices, got a sequence")
        checked, size = np.array(indices), len(dataset)
        if checked.size == 0:
            checked = checked.astype(np.int64)
        if checked.ndim != 1 or not np.issubdtype(checked.dtype, np.integer):
            raise ValueError(
                "ResampleDataset: indices must be a one-dimensional sequence of integers, "
                f"got shape {checked.shape} and dtype {checked.dtype}"
            )
        wrong = checked[(checked < 0) | (checked >= size)]
        if wrong.size:
            raise ValueError(f"ResampleDataset: indices must be in [0, {size}), got {wrong[0]}")
        self._dataset = dataset
        self._indices: Indices = checked.astype(np.int64)

    def __len__(self) -> int:
        return len(self._indices)

    def get(self, index: int) -> Sample:
        return self._dataset.get(int(self._indices[index]))

    def take(self, indices: Indices) -> Sample:
        return self._dataset.take(self._indices[indices])


class ShuffleDataset(ResampleDataset):
    """All samples of ``dataset``, each once, in a random order that depends on ``seed``.

    The same seed gives the same order in every process. ``resample`` draws the next order.
    """

    def __init__(self, dataset: Dataset, seed: int = 0) -> None:
        super().__init__(dataset, [])
        self._random = np.random.default_rng(seed)
        self.resample()

    def resample(self) -> None:
        """Draw the next order, for example before each epoch. The seed determines all orders."""
        self._indices = self._random.permutation(len(self._dataset))

    def set_seed(self, seed: int) -> None:
        """Restart the random numbers from ``seed``. The order changes at the next ``resample``."""
        self._random = np.random.default_rng(seed)


# Shares and orders of samples. Each process computes them without communication.
def contiguous_share(n: int, share: int, shares: int) -> range:
    """Return the positions of part ``share`` if [0, n) is divided into ``shares`` contiguous parts.

    Sizes differ by at most one, and the longer parts come first.

    Example:
        >>> [list(contiguous_share(5, share, 3)) for share in range(3)]
        [[0, 1], [2, 3], [4]]
    """
    size, longer = divmod(n, shares)
    start = size * share + min(share, longer)
    return range(start, start + size + (share < longer))


def partition_by_round_robin(
    n: int, partition: int, partitions: int, batch_size: int = 1, allow_empty: bool = False
) -> Indices:
    """Return the indices, in [0, n), of the samples that belong to partition ``partition``.

    Batches of ``batch_size`` consecutive samples are assigned to the partitions in turn. Remaining
    samples, too few for one more batch per partition, are divided evenly. If less than one sample
    per partition remains, these samples are dropped, so that all partitions have equally many
    batches. With ``allow_empty`` they are kept, and some partitions may have one batch fewer. The
    rule is flashlight's ``partitionByRoundRobin``. The result is a new ascending int64 array.

    Raises:
        ValueError: If ``n`` < 0, ``batch_size`` < 1, or ``partition`` is not in [0, partitions).
    """
    if n < 0 or batch_size < 1 or not 0 <= partition < partitions:
        raise ValueError(
            "expected n >= 0, batch_size >= 1 and partition in [0, partitions), got "
            f"n={n}, partition={partition}, partitions={partitions}, batch_size={batch_size}"
        )
    rounds, rest = divmod(n, partitions * batch_size)
    full_rounds = np.arange(n - rest).reshape(rounds, partitions, batch_size)[:, partition].ravel()
    if rest < partitions and not allow_empty:
        return full_rounds
    share = contiguous_share(rest, partition, partitions)
    return np.concatenate([full_rounds, np.arange(n - rest + share.start, n - rest + share.stop)])


def epoch_order(n: int, seed: int, epoch: int) -> Indices:
    """Return an int64 permutation of ``n`` samples that depends only on seed and epoch.

    Each sample gets a random key of 64 bits, with the sample's number in the lowest bits. The
    sorted keys give the order. The random bits are from PCG64 (O'Neill, 2014). NumPy guarantees
    them for a given seed, so the permutation is equal on every platform and with every NumPy
    version, unlike ``Generator.permutation``.

    Example:
        >>> epoch_order(5, seed=0, epoch=0).tolist()
        [3, 1, 4, 2, 0]
    """
    # With a spawn key, each epoch has its own random bits. With [seed, epoch] as entropy, a large
    # seed could give the bits of another seed and epoch.
    keys = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(epoch,))).random_raw(n)
    bits = n.bit_length()
    keys >>= bits
    keys <<= bits
    keys |= np.arange(n, dtype=np.uint64)
    keys.sort()  # four times as fast as argsort
    keys &= (1 << bits) - 1
    return keys.view(np.int64)
