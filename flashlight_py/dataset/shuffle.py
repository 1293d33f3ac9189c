"""A dataset in random order."""

from __future__ import annotations

import numpy as np

from flashlight_py.dataset.dataset import Dataset
from flashlight_py.dataset.resample import ResampleDataset


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
