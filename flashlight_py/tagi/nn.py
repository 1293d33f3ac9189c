"""Layers, containers and the updater, under the names that pytagi's module ``pytagi.nn`` has."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flashlight_py.tagi.activations import (
    ClosedFormSoftmax,
    EvenExp,
    LeakyReLU,
    MixtureReLU,
    MixtureSigmoid,
    MixtureTanh,
    ReLU,
    Remax,
    Sigmoid,
    Softmax,
    Softplus,
    Tanh,
)
from flashlight_py.tagi.blocks import LayerBlock, ResNetBlock
from flashlight_py.tagi.convolution import Conv2d, ConvTranspose2d
from flashlight_py.tagi.embedding import Embedding
from flashlight_py.tagi.layer import BaseLayer
from flashlight_py.tagi.linear import Linear
from flashlight_py.tagi.normalization import BatchNorm2d, LayerNorm
from flashlight_py.tagi.pooling import AvgPool2d, MaxPool2d
from flashlight_py.tagi.recurrent import LSTM, SLSTM, SLinear
from flashlight_py.tagi.sequential import Sequential
from flashlight_py.tagi.states import BaseDeltaStates, BaseHiddenStates
from flashlight_py.tagi.updater import OutputUpdater
from flashlight_py.tagi.utilities import HRCSoftmax

if TYPE_CHECKING:
    from flashlight_py.tagi.distributed import DDPConfig, DDPSequential

__all__ = [
    "AvgPool2d",
    "BaseDeltaStates",
    "BaseHiddenStates",
    "BaseLayer",
    "BatchNorm2d",
    "ClosedFormSoftmax",
    "Conv2d",
    "ConvTranspose2d",
    "DDPConfig",
    "DDPSequential",
    "Embedding",
    "EvenExp",
    "HRCSoftmax",
    "LSTM",
    "LayerBlock",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "MaxPool2d",
    "MixtureReLU",
    "MixtureSigmoid",
    "MixtureTanh",
    "OutputUpdater",
    "ReLU",
    "Remax",
    "ResNetBlock",
    "SLSTM",
    "SLinear",
    "Sequential",
    "Sigmoid",
    "Softmax",
    "Softplus",
    "Tanh",
]


def __getattr__(name: str) -> Any:
    """Import what communicates when it is first used: networks know nothing of it."""
    if name in ("DDPConfig", "DDPSequential"):
        return getattr(import_module("flashlight_py.tagi.distributed"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
