"""Activations: modules around the functions of ``autograd.functions.activations``."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashlight_py.autograd import Variable, param
from flashlight_py.autograd import functions as F
from flashlight_py.nn.layers import Plain, check_sizes
from flashlight_py.nn.module import Module


class _Chosen(Module):
    """An activation with numbers to choose, which are its attributes in their order."""

    def __repr__(self) -> str:
        numbers = (value for name, value in vars(self).items() if not name.startswith("_"))
        return f"{type(self).__name__}({', '.join(map(str, numbers))})"


class SiLU(Plain):
    """``x * sigmoid(x)``, elementwise."""

    def forward(self, x: Variable) -> Variable:
        return F.silu(x)


class GELU(_Chosen):
    """``x * (1 + erf(x / sqrt(2))) / 2``, elementwise.

    Args:
        approximate: take ``x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3))) / 2`` for it.
    """

    def __init__(self, approximate: bool = False) -> None:
        self.approximate = approximate

    def forward(self, x: Variable) -> Variable:
        return F.gelu(x, self.approximate)


class ELU(_Chosen):
    """``x`` above 0, else ``alpha * (exp(x) - 1)``, elementwise.

    Args:
        alpha: minus the limit at the left.
    """

    def __init__(self, alpha: float = 1.0) -> None:
        self.alpha = alpha

    def forward(self, x: Variable) -> Variable:
        return F.elu(x, self.alpha)


class LeakyReLU(_Chosen):
    """``x`` above 0, else ``slope * x``, elementwise.

    Args:
        slope: that of the left side.
    """

    def __init__(self, slope: float = 0.01) -> None:
        self.slope = slope

    def forward(self, x: Variable) -> Variable:
        return F.leaky_relu(x, self.slope)


class HardTanh(_Chosen):
    """``min(max(x, lower), upper)``, elementwise.

    Args:
        lower: the least result.
        upper: the largest result, above ``lower`` (else a ValueError when called).
    """

    def __init__(self, lower: float = -1.0, upper: float = 1.0) -> None:
        self.lower, self.upper = lower, upper

    def forward(self, x: Variable) -> Variable:
        return F.hardtanh(x, self.lower, self.upper)


class PReLU(Module):
    """``x`` above 0, else ``weight * x``: ``[batch, channels, ...]`` to the same shape.

    Args:
        channels: that the weight ``[channels]`` has a number for each; 1: one for all.
        value: the weight at the start.
        dtype: of the weight.

    Raises:
        ValueError: ``channels`` is below 1; when called: the input has another number of them.
        TypeError: ``channels`` is no integer.
    """

    def __init__(self, channels: int = 1, value: float = 0.25, dtype: Any = "float32") -> None:
        check_sizes("PReLU", channels=channels)
        self.weight = param(np.full(channels, value, dtype))

    def forward(self, x: Variable) -> Variable:
        return F.prelu(x, self.weight)

    def __repr__(self) -> str:
        return f"PReLU({self.weight.size})"


class GatedLinearUnit(_Chosen):
    """The first half of ``x`` along a dimension times the sigmoid of the second half.

    Args:
        axis: the dimension, half as long in the result; an odd one is a ValueError when called.
    """

    def __init__(self, axis: int = -1) -> None:
        self.axis = axis

    def forward(self, x: Variable) -> Variable:
        return F.glu(x, self.axis)
