"""Modules: layers, containers of layers, losses, and the initial values of parameters."""

from flashlight_py.names import export

# The submodule that defines each public name. `scripts/stubs` writes the same table into a stub.
_HOMES = {
    "module": ["Module", "load_torch"],
    "layers": [
        *("Container", "Sequential", "Linear", "ReLU", "Tanh", "Sigmoid", "LogSoftmax", "Dropout"),
        *("View", "Identity", "Embedding", "Residual", "ExponentialMovingAverage", "Softmax"),
        *("GELU", "SiLU", "ELU", "LeakyReLU", "HardTanh", "PReLU", "GatedLinearUnit", "Softplus"),
        *("MeanSquaredError", "MeanAbsoluteError", "BinaryCrossEntropy", "CategoricalCrossEntropy"),
        *("ConnectionistTemporalClassification", "HuberLoss", "KLDivergence"),
        *("LayerNorm", "RMSNorm", "GroupNorm"),
    ],
    "sequences": [
        *("RNN", "MultiheadAttention", "Transformer", "TransformerLayer"),
        *("PositionEmbedding", "SinusoidalPositionEmbedding"),
    ],
    "images": ["Conv2D", "Conv1D", "ConvTranspose2D", "Pool2D", "Upsample"],
    "recompute": ["recompute"],
    ".parallel.layers": ["BatchNorm"],
}
__all__ = ["init"]
export(globals(), _HOMES, later=[".parallel.layers"])  # fl.parallel imports this package
