"""Modules: layers, containers of layers, losses, and the initial values of parameters."""

from __future__ import annotations

from flashlight_py.nn import init
from flashlight_py.nn.layers import (
    CategoricalCrossEntropy,
    Container,
    Dropout,
    Linear,
    LogSoftmax,
    MeanSquaredError,
    ReLU,
    Sequential,
    Sigmoid,
    Tanh,
    View,
)
from flashlight_py.nn.module import Module
from flashlight_py.nn.recompute import recompute

__all__ = [
    "Module",
    "Container",
    "Sequential",
    "Linear",
    "ReLU",
    "Tanh",
    "Sigmoid",
    "LogSoftmax",
    "Dropout",
    "View",
    "MeanSquaredError",
    "CategoricalCrossEntropy",
    "init",
    "recompute",
]
