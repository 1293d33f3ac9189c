"""A dataset in another order, or a part of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from flashlight_py.dataset.dataset import Dataset, Indices, Sample


class ResampleDataset(Dataset):
    """The samples of ``dataset`` at ``indices``, in that order; an index may be repeated.

    ``indices`` is a sequence of integers, or a function from [0, n) to an index of ``dataset``,
    asked once for each; ``n`` goes with a function and defaults to the length of ``dataset``.

    Raises:
        ValueError: an index is not in [0, len(dataset)), or ``n`` is passed with a sequence.
    """

    def __init__(
        self,
        dataset: Dataset,
        indices: Sequence[int] | Indices | Callable[[int], int],
        n: int | None = None,
    ) -> None:
        if callable(indices):
            indices = [indices(i) for i in range(len(dataset) if n is None else n)]
        elif n is not None:
            raise ValueError("n goes with a function; a sequence of indices has its own length")
        self._dataset = dataset
        self._indices = _checked(indices, len(dataset))

    def __len__(self) -> int:
        """Return the number of indices."""
        return len(self._indices)

    def get(self, index: int) -> Sample:
        """Return the sample that the ``index``-th index points to."""
        return self._dataset.get(int(self._indices[index]))

    def take(self, indices: Indices) -> Sample:
        """Return one batch, as the underlying dataset makes it."""
        return self._dataset.take(self._indices[indices])

    def _replace_indices(self, indices: Indices) -> None:
        self._indices = indices


def _checked(indices: Sequence[int] | Indices, size: int) -> Indices:
    checked = np.array(indices)
    if checked.size == 0:
        checked = checked.astype(np.int64)
    if checked.ndim != 1 or not np.issubdtype(checked.dtype, np.integer):
        raise ValueError(
            "indices must be a flat sequence of integers; "
            f"got shape {checked.shape} and dtype {checked.dtype}"
        )
    wrong = checked[(checked < 0) | (checked >= size)]
    if wrong.size:
        raise ValueError(f"indices must be in [0, {size}), the dataset's length; got {wrong[0]}")
    return checked.astype(np.int64)


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
        self._replace_indices(self._random.permutation(len(self._dataset)))

    def set_seed(self, seed: int) -> None:
        """Let the next ``resample`` start anew from ``seed``."""
        self._random = np.random.default_rng(seed)
