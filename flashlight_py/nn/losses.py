"""Losses: modules around the functions of ``autograd.functions.losses``.

Their inputs, and the errors of a call, are those of the function of the same name. ``reduction`` is
``"mean"``, ``"sum"`` or ``"none"``; another one is a ValueError.
"""

from __future__ import annotations

from flashlight_py.autograd import functions as F
from flashlight_py.autograd.functions import losses
from flashlight_py.nn.layers import Function


class MeanSquaredError(Function):
    """The mean of the squared differences over all elements."""

    def __init__(self) -> None:
        super().__init__(F.mean_squared_error)


class MeanAbsoluteError(Function):
    """The mean of ``abs(prediction - target)``."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__(F.mean_absolute_error, reduction=losses.check_reduction(reduction))


class HuberLoss(Function):
    """The mean of ``d * d / 2`` of differences d up to ``delta``, beyond it of the tangent there.

    Raises:
        ValueError: also if ``delta`` is not above 0.
    """

    def __init__(self, reduction: str = "mean", delta: float = 1.0) -> None:
        if not delta > 0:
            raise ValueError(f"HuberLoss: delta must be above 0, got {delta}")
        reduction = losses.check_reduction(reduction)
        super().__init__(losses.huber_loss, reduction=reduction, delta=delta)


class KLDivergence(Function):
    """``sum(target * (log(target) - log_probabilities))`` over classes, the mean over samples.

    Both have shape ``[..., classes]``, which ``reduction="none"`` makes ``[...]``. A target of 0
    adds 0. ``"mean"`` is torch's ``"batchmean"``.
    """

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__(losses.kl_divergence, reduction=losses.check_reduction(reduction))


class BinaryCrossEntropy(Function):
    """The mean of ``-target * log(p) - (1 - target) * log(1 - p)`` of probabilities p."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__(F.binary_cross_entropy, reduction=losses.check_reduction(reduction))


class CategoricalCrossEntropy(Function):
    """The negative log probability of the right classes, given log probabilities.

    Arguments are those of ``functions.categorical_cross_entropy``. ``label_smoothing`` outside of 0
    to 1 is a ValueError.
    """

    def __init__(
        self, reduction: str = "mean", ignore_index: int = -1, label_smoothing: float = 0.0
    ) -> None:
        losses.check_smoothing(label_smoothing)
        options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
        reduction = losses.check_reduction(reduction)
        super().__init__(F.categorical_cross_entropy, reduction=reduction, **options)


class ConnectionistTemporalClassification(Function):
    """The negative log probability of all alignments of a longer input with a target.

    Arguments are those of ``functions.connectionist_temporal_classification``.
    """

    def __init__(
        self, blank: int = 0, reduction: str = "mean", zero_infinity: bool = False
    ) -> None:
        options = {"reduction": losses.check_reduction(reduction), "zero_infinity": zero_infinity}
        super().__init__(F.connectionist_temporal_classification, blank=blank, **options)
