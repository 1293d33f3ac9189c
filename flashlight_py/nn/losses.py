"""Losses as modules: called with the prediction and the target."""

from __future__ import annotations

from flashlight_py.autograd import Variable
from flashlight_py.autograd import functions as F
from flashlight_py.autograd.functions.losses import check_reduction
from flashlight_py.nn.module import Module


class MeanSquaredError(Module):
    """The mean of the squared differences over all elements."""

    def forward(self, prediction: Variable, target: Variable) -> Variable:
        """Return the loss, without dimensions; see ``functions.mean_squared_error``."""
        return F.mean_squared_error(prediction, target)

    def __repr__(self) -> str:
        return "MeanSquaredError()"


class CategoricalCrossEntropy(Module):
    """The negative log probability of the right classes, given log probabilities.

    Args:
        reduction: ``"mean"``, ``"sum"`` or ``"none"``.
        ignore_index: targets of this value do not count.

    Raises:
        ValueError: an unknown reduction.
    """

    def __init__(self, reduction: str = "mean", ignore_index: int = -1) -> None:
        check_reduction(reduction)
        self.reduction = reduction
        self.ignore_index = ignore_index

    def forward(self, log_probabilities: Variable, target: Variable) -> Variable:
        """Return the loss; see ``functions.categorical_cross_entropy``."""
        return F.categorical_cross_entropy(
            log_probabilities, target, self.reduction, self.ignore_index
        )

    def __repr__(self) -> str:
        return f"CategoricalCrossEntropy({self.reduction!r}, ignore_index={self.ignore_index})"
