"""Layers, containers and the updater, under the names that pytagi's module ``pytagi.nn`` has.

A name is imported when it is first used: networks know nothing of what communicates.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

# Where each name is imported from; `scripts/stubs` tells type checkers the same.
_HOMES = {
    "activations": [
        *("ClosedFormSoftmax", "EvenExp", "LeakyReLU", "MixtureReLU", "MixtureSigmoid"),
        *("MixtureTanh", "ReLU", "Remax", "Sigmoid", "Softmax", "Softplus", "Tanh"),
    ],
    "blocks": ["LayerBlock", "ResNetBlock"],
    "convolution": ["Conv2d", "ConvTranspose2d"],
    "distributed": ["DDPConfig", "DDPSequential"],
    "embedding": ["Embedding"],
    "layer": ["BaseLayer"],
    "linear": ["Linear"],
    "normalization": ["BatchNorm2d", "LayerNorm"],
    "pooling": ["AvgPool2d", "MaxPool2d"],
    "recurrent": ["LSTM", "SLSTM", "SLinear"],
    "sequential": ["Sequential"],
    "states": ["BaseDeltaStates", "BaseHiddenStates"],
    "updater": ["OutputUpdater"],
    "utilities": ["HRCSoftmax"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
__all__ = [name for names in _HOMES.values() for name in names]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"flashlight_py.tagi.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
