"""Modules: layers, containers of layers, losses, and the initial values of parameters."""

from __future__ import annotations

from flashlight_py.nn import init
from flashlight_py.nn.activations import LogSoftmax, ReLU, Sigmoid, Tanh
from flashlight_py.nn.containers import Container, Sequential
from flashlight_py.nn.dropout import Dropout
from flashlight_py.nn.linear import Linear
from flashlight_py.nn.losses import CategoricalCrossEntropy, MeanSquaredError
from flashlight_py.nn.module import Module
from flashlight_py.nn.view import View

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
]
