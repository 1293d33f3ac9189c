"""Samples from arrays in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flashlight_py.dataset.dataset import Dataset, Indices, Sample
from flashlight_py.device import Array


class TensorDataset(Dataset):
    """The rows of some arrays: sample ``i`` is ``(arrays[0][i], arrays[1][i], ...)``.

    All arrays have the same first dimension, the number of samples. Samples are views (NumPy
    scalars where an array has one dimension only); nothing is copied.

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
        """Return the number of samples."""
        return len(self.arrays[0])

    def get(self, index: int) -> Sample:
        """Return views of row ``index`` of every array."""
        return tuple([array[index] for array in self.arrays])

    def take(self, indices: Indices) -> Sample:
        """Return the rows at ``indices`` of every array, as new arrays of shape (batch, ...)."""
        return tuple([array[indices] for array in self.arrays])

    def batches(self, batch_size: int, stop: int) -> Iterator[Sample]:
        """Iterate over views of ``batch_size`` rows each, up to row ``stop``; the last is shorter.

        No line of Python runs per batch: a training step may take no longer than one would.
        """
        starts = range(0, stop, batch_size)
        stops = [*starts[1:], stop] if starts else []
        views = (map(array.__getitem__, map(slice, starts, stops)) for array in self.arrays)
        return zip(*views, strict=True)

    def __iter__(self) -> Iterator[Sample]:
        """Go through all samples in order."""
        return zip(*self.arrays, strict=True)
