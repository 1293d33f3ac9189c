"""Optimizers, which change parameters by their gradients, schedules of rates, and clipping."""

from __future__ import annotations

from flashlight_py.optim.algorithms import (
    AdadeltaOptimizer,
    AdagradOptimizer,
    AdamOptimizer,
    AMSgradOptimizer,
    NovogradOptimizer,
    RMSPropOptimizer,
    SGDOptimizer,
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
