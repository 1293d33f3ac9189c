"""Layers, containers and the updater, under the names of the module ``pytagi.nn``."""

from __future__ import annotations

from importlib import import_module
from typing import Any

# Public names by module. `scripts/stubs` copies this table to a stub for type checkers.
_HOMES = {
    "activations": [
        *("ClosedFormSoftmax", "EvenExp", "LeakyReLU", "MixtureReLU", "MixtureSigmoid"),
        *("MixtureTanh", "ReLU", "Remax", "Sigmoid", "Softmax", "Softplus", "Tanh"),
    ],
    "convolution": ["Conv2d", "ConvTranspose2d"],
    "distributed": ["DDPConfig", "DDPSequential"],
    "layer": ["BaseLayer", "LayerBlock", "ResNetBlock"],
    "linear": ["Embedding", "Linear"],
    "normalization": ["BatchNorm2d", "LayerNorm"],
    "recurrent": ["LSTM", "SLSTM", "SLinear"],
    "sequential": ["Sequential"],
    "states": ["BaseDeltaStates", "BaseHiddenStates"],
    "updater": ["OutputUpdater"],
    "utilities": ["HRCSoftmax"],
    "windows": ["AvgPool2d", "MaxPool2d"],
}
for _home, _names in _HOMES.items():
    if _home != "distributed":  # imported at first use: networks do not depend on it
        _module = import_module(f"flashlight_py.tagi.{_home}")
        globals().update({name: getattr(_module, name) for name in _names})

__all__ = [name for names in _HOMES.values() for name in names]


def __getattr__(name: str) -> Any:
    if name not in _HOMES["distributed"]:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("flashlight_py.tagi.distributed"), name)


def __dir__() -> list[str]:
    return __all__
