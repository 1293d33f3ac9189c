"""Losses: modules around the functions of ``autograd.functions.losses``.

Their inputs, and the errors of a call, are those of the function of the same name. ``reduction`` is
``"mean"``, ``"sum"`` or ``"none"``; another one is a ValueError.
"""

from __future__ import annotations

from typing import Any

from flashlight_py.autograd import Variable
from flashlight_py.autograd import functions as F
from flashlight_py.autograd.functions.losses import check_reduction, check_smoothing
from flashlight_py.nn.layers import Plain


class _Reduced(Plain):
    def __init__(self, reduction: str = "mean") -> None:
        check_reduction(reduction)
        self.reduction = reduction


class MeanSquaredError(Plain):
    """The mean of the squared differences over all elements."""

    def forward(self, prediction: Variable, target: Variable) -> Variable:
        return F.mean_squared_error(prediction, target)


class MeanAbsoluteError(_Reduced):
    """The mean (``reduction``: or ``"sum"``, ``"none"``) of ``abs(prediction - target)``."""

    def forward(self, prediction: Variable, target: Variable) -> Variable:
        return F.mean_absolute_error(prediction, target, self.reduction)


class BinaryCrossEntropy(_Reduced):
    """The mean of ``-target * log(p) - (1 - target) * log(1 - p)`` of probabilities p.

    ``reduction`` may be ``"sum"`` or ``"none"`` instead.
    """

    def forward(self, probabilities: Variable, target: Variable) -> Variable:
        return F.binary_cross_entropy(probabilities, target, self.reduction)


class CategoricalCrossEntropy(_Reduced):
    """The negative log probability of the right classes, given log probabilities.

    Arguments are those of ``functions.categorical_cross_entropy``.

    Raises:
        ValueError: an unknown reduction, or ``label_smoothing`` outside of 0 to 1.
    """

    def __init__(
        self, reduction: str = "mean", ignore_index: int = -1, label_smoothing: float = 0.0
    ) -> None:
        super().__init__(reduction)
        check_smoothing(label_smoothing)
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing

    def forward(self, log_probabilities: Variable, target: Variable) -> Variable:
        options = self.reduction, self.ignore_index, self.label_smoothing
        return F.categorical_cross_entropy(log_probabilities, target, *options)


class ConnectionistTemporalClassification(_Reduced):
    """The negative log probability of all alignments of a longer input with a target.

    Arguments are those of ``functions.connectionist_temporal_classification``.

    Raises:
        ValueError: an unknown reduction.
    """

    def __init__(
        self, blank: int = 0, reduction: str = "mean", zero_infinity: bool = False
    ) -> None:
        super().__init__(reduction)
        self.blank, self.zero_infinity = blank, zero_infinity

    def forward(
        self, log_probabilities: Variable, targets: Variable, input_lengths: Any = None,
        target_lengths: Any = None,
    ) -> Variable:  # fmt: skip
        lengths, options = (input_lengths, target_lengths), (self.reduction, self.zero_infinity)
        return F.connectionist_temporal_classification(
            log_probabilities, targets, *lengths, self.blank, *options
        )
