"""How often the right class is among the k that a model finds most likely."""

from __future__ import annotations

import numpy as np

from flashlight_py.device import Array, array_module
from flashlight_py.meter.meter import Meter, State, ratio


class TopKMeter(Meter):
    """The share, in percent, of samples whose target is among the ``k`` highest scores.

    A target counts if fewer than ``k`` classes have a higher score than it, so ties are in its
    favour and the result depends on no order. A NaN is higher than everything, and as the
    target's own score it never counts.

    Raises:
        ValueError: ``k`` < 1.
    """

    def __init__(self, k: int) -> None:
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        self._k = k
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._correct = 0
        self._total = 0

    def add(self, output: Array, target: Array) -> None:
        """Add a batch: scores of shape (batch, classes), integer targets of shape (batch,).

        Raises:
            ValueError: the shapes do not fit, there are fewer than ``k`` classes, or a target is
                no integer in [0, classes).
        """
        self._check(output, target)
        scores = array_module(output).take_along_axis(output, target[:, None], axis=1)
        higher = (~(output <= scores)).sum(axis=1)
        self._correct += int((higher < self._k).sum())
        self._total += len(target)

    def _check(self, output: Array, target: Array) -> None:
        fits = output.ndim == 2 and target.ndim == 1 and len(output) == len(target)
        if not fits or target.dtype.kind not in "iu":
            raise ValueError(
                "TopKMeter takes scores of shape (batch, classes) and integer targets of shape "
                f"(batch,); got {output.shape} and {target.dtype} {target.shape}"
            )
        classes = output.shape[1]
        if classes < self._k:
            raise ValueError(f"the top {self._k} of {classes} classes were asked for")
        if len(target) and (int(target.min()) < 0 or int(target.max()) >= classes):
            raise ValueError(
                f"targets must be in [0, {classes}), got {int(target.min())} to {int(target.max())}"
            )

    def state(self) -> State:
        """Return the number of correct samples and of all."""
        return np.array([self._correct, self._total], np.float64)

    def value_of(self, state: State) -> float:
        """Return the percentage of ``state``, two sums with shape (2,); NaN without samples."""
        correct, total = map(float, state)
        return 100 * ratio(correct, total)

    def value(self) -> float:
        """Return the percentage of correct samples; NaN without samples."""
        return self.value_of(self.state())
