"""The fully connected layer."""

from __future__ import annotations

import math
from typing import Any

from flashlight_py.autograd import Variable, param
from flashlight_py.autograd import functions as F
from flashlight_py.nn import init
from flashlight_py.nn.module import Module


class Linear(Module):
    """``y = x @ weight.T + bias``: ``[..., in_features]`` to ``[..., out_features]``.

    The weight ``[out_features, in_features]`` starts uniform within ``sqrt(3 / in_features)`` of
    0, the bias ``[out_features]`` uniform within ``1 / sqrt(in_features)``, as in flashlight.

    Args:
        in_features: size of the last dimension of the input, at least 1.
        out_features: size of the last dimension of the result, at least 1.
        bias: whether there is a bias.
        dtype: of the parameters.

    Raises:
        ValueError: a size is below 1; when called: the input's last dimension differs.
        TypeError: a size is not an integer.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, dtype: Any = "float32"
    ) -> None:
        _check_size("in_features", in_features)
        _check_size("out_features", out_features)
        shape = (out_features, in_features)
        bound = 1 / math.sqrt(in_features)
        self.weight = param(init.kaiming_uniform(shape, in_features, dtype))
        self.bias = param(init.uniform(shape[:1], -bound, bound, dtype)) if bias else None

    def forward(self, x: Variable) -> Variable:
        """Return ``x @ weight.T + bias``."""
        return F.linear(x, self.weight, self.bias)

    def __repr__(self) -> str:
        out_features, in_features = self.weight.shape
        return f"Linear({in_features}, {out_features}, bias={self.bias is not None})"


def _check_size(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"Linear: {name} must be an integer, got {type(value).__name__}")
    if value < 1:
        raise ValueError(f"Linear: {name} must be at least 1, got {value}")
