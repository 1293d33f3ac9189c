"""Optimizers, which change parameters by their gradients, schedules of rates, and clipping."""

from __future__ import annotations

from flashlight_py.optim.adam import AdamOptimizer
from flashlight_py.optim.adaptive import (
    AdadeltaOptimizer,
    AdagradOptimizer,
    AMSgradOptimizer,
    NovogradOptimizer,
    RMSPropOptimizer,
)
from flashlight_py.optim.clip import clip_grad_norm
from flashlight_py.optim.optimizer import FirstOrderOptimizer
from flashlight_py.optim.schedules import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LearningRateSchedule,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    SequentialLR,
    StepLR,
)
from flashlight_py.optim.sgd import SGDOptimizer

__all__ = [
    "FirstOrderOptimizer",
    "SGDOptimizer",
    "AdamOptimizer",
    "AMSgradOptimizer",
    "AdagradOptimizer",
    "AdadeltaOptimizer",
    "RMSPropOptimizer",
    "NovogradOptimizer",
    "clip_grad_norm",
    "CosineAnnealingLR",
    "ExponentialLR",
    "LambdaLR",
    "LearningRateSchedule",
    "LinearLR",
    "MultiStepLR",
    "OneCycleLR",
    "SequentialLR",
    "StepLR",
]
