"""Differentiable functions on variables, one family per file."""

from flashlight_py.names import export

# The submodule that defines each public name. `scripts/stubs` writes the same table into a stub.
_HOMES = {
    "elementwise": [
        *("negative", "add", "sub", "mul", "div", "pow", "maximum", "minimum", "exp", "log"),
        *("sqrt", "sin", "cos", "tanh", "sigmoid", "relu", "abs", "clamp", "clip", "dropout"),
        *("log1p", "erf", "gelu", "silu", "elu", "leaky_relu", "hardtanh", "prelu", "glu"),
        "softplus",
    ],
    "dimensions": [
        *("sum", "mean", "var", "max", "min", "matmul", "linear", "linear_relu", "reshape"),
        *("moddims", "flat", "transpose", "concatenate", "stack", "split", "tile", "index"),
        *("astype", "norm", "cumsum", "einsum", "squeeze", "expand_dims", "flip"),
        *("std", "prod", "logsumexp"),
    ],
    "normalization": ["layer_norm", "rms_norm", "group_norm", "batch_norm"],
    "selecting": ["where", "gather", "scatter_add", "embedding", "topk", "sort", "pad"],
    "sequences": ["recurrent", "attention", "self_attention"],
    "losses": [
        *("softmax", "log_softmax", "mean_squared_error", "mean_absolute_error"),
        *("categorical_cross_entropy", "binary_cross_entropy"),
        *("binary_cross_entropy_with_logits", "connectionist_temporal_classification"),
    ],
    "convolution": ["conv2d", "pool2d"],
}
export(globals(), _HOMES)
