"""Modules: layers, containers of layers, losses, and the initial values of parameters."""

from importlib import import_module

from flashlight_py.names import export

# The submodule that defines each public name. `scripts/stubs` writes the same table into a stub.
_HOMES = {
    "module": ["Module"],
    "layers": [
        *("Container", "Sequential", "Linear", "ReLU", "Tanh", "Sigmoid", "LogSoftmax", "Dropout"),
        *("View", "Identity", "Embedding", "Residual", "ExponentialMovingAverage", "Softmax"),
        *("GELU", "SiLU", "ELU", "LeakyReLU", "HardTanh", "PReLU", "GatedLinearUnit", "Softplus"),
        *("MeanSquaredError", "MeanAbsoluteError", "BinaryCrossEntropy", "CategoricalCrossEntropy"),
        *("ConnectionistTemporalClassification", "HuberLoss", "KLDivergence"),
    ],
    "sequences": [
        *("RNN", "MultiheadAttention", "Transformer", "TransformerLayer"),
        *("PositionEmbedding", "SinusoidalPositionEmbedding"),
    ],
    "images": ["Conv2D", "Conv1D", "ConvTranspose2D", "Pool2D", "Upsample"],
    "normalization": ["LayerNorm", "RMSNorm", "GroupNorm"],
    "recompute": ["recompute"],
    "loading": ["load_torch"],
}
# Layers of fl.parallel, imported at their first use, because fl.parallel imports this package.
_ABOVE = {"BatchNorm": "flashlight_py.parallel.batch_norm"}

__all__ = ["init", "BatchNorm"]
export(globals(), _HOMES)


def __getattr__(name: str) -> object:
    if name not in _ABOVE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_ABOVE[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_ABOVE})
