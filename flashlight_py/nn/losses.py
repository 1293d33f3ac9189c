"""Losses: modules around the functions of ``autograd.functions.losses``."""

from __future__ import annotations

from typing import Any

from flashlight_py.autograd import Variable
from flashlight_py.autograd import functions as F
from flashlight_py.autograd.functions.losses import check_reduction, check_smoothing
from flashlight_py.nn.layers import Plain
from flashlight_py.nn.module import Module


class MeanSquaredError(Plain):
    """The mean of the squared differences over all elements."""

    def forward(self, prediction: Variable, target: Variable) -> Variable:
        """Return the loss, without dimensions; see ``functions.mean_squared_error``."""
        return F.mean_squared_error(prediction, target)


class CategoricalCrossEntropy(Module):
    """The negative log probability of the right classes, given log probabilities.

    Args:
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        ignore_index: targets of this value do not count.
        label_smoothing: the part of each target that all classes share, 0 to 1.

    Raises:
        ValueError: an unknown reduction, or ``label_smoothing`` outside of 0 to 1.
    """

    def __init__(
        self, reduction: str = "mean", ignore_index: int = -1, label_smoothing: float = 0.0
    ) -> None:
        check_reduction(reduction)
        check_smoothing(label_smoothing)
        self.label_smoothing = label_smoothing
        self.reduction = reduction
        self.ignore_index = ignore_index

    def forward(self, log_probabilities: Variable, target: Variable) -> Variable:
        """Return the loss; see ``functions.categorical_cross_entropy``."""
        return F.categorical_cross_entropy(
            *(log_probabilities, target, self.reduction, self.ignore_index, self.label_smoothing)
        )

    def __repr__(self) -> str:
        smoothing = f", label_smoothing={self.label_smoothing}" if self.label_smoothing else ""
        return (
            f"CategoricalCrossEntropy({self.reduction!r}, ignore_index={self.ignore_index}"
            f"{smoothing})"
        )


class _Reduced(Module):
    """A loss of which nothing but the reduction is to choose: "mean", "sum" or "none".

    Another one is a ValueError.
    """

    def __init__(self, reduction: str = "mean") -> None:
        check_reduction(reduction)
        self.reduction = reduction

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.reduction!r})"


class MeanAbsoluteError(_Reduced):
    """The mean (``reduction``: or ``"sum"``, ``"none"``) of ``abs(prediction - target)``."""

    def forward(self, prediction: Variable, target: Variable) -> Variable:
        """Return the loss; see ``functions.mean_absolute_error``."""
        return F.mean_absolute_error(prediction, target, self.reduction)


class BinaryCrossEntropy(_Reduced):
    """The mean of ``-target * log(p) - (1 - target) * log(1 - p)`` of probabilities p.

    ``reduction`` may be ``"sum"`` or ``"none"`` instead.
    """

    def forward(self, probabilities: Variable, target: Variable) -> Variable:
        """Return the loss; see ``functions.binary_cross_entropy``."""
        return F.binary_cross_entropy(probabilities, target, self.reduction)


class ConnectionistTemporalClassification(Module):
    """The negative log probability of all alignments of a longer input with a target.

    Args:
        blank: the class between the others.
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        zero_infinity: whether the loss of a target that is too long is 0, not infinity.

    Raises:
        ValueError: an unknown reduction.
    """

    def __init__(
        self, blank: int = 0, reduction: str = "mean", zero_infinity: bool = False
    ) -> None:
        check_reduction(reduction)
        self.blank, self.reduction, self.zero_infinity = blank, reduction, zero_infinity

    def forward(
        self,
        log_probabilities: Variable,
        targets: Variable,
        input_lengths: Any = None,
        target_lengths: Any = None,
    ) -> Variable:
        """Return the loss; see ``functions.connectionist_temporal_classification``."""
        return F.connectionist_temporal_classification(
            *(log_probabilities, targets, input_lengths, target_lengths),
            *(self.blank, self.reduction, self.zero_infinity),
        )

    def __repr__(self) -> str:
        options = f"blank={self.blank}, reduction={self.reduction!r}"
        return f"ConnectionistTemporalClassification({options})"
