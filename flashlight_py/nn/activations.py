"""Activations: modules around the functions of ``autograd.functions.activations``."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashlight_py.autograd import Variable, param
from flashlight_py.autograd import functions as F
from flashlight_py.autograd.functions.activations import is_by_tanh
from flashlight_py.nn.layers import Function, check_sizes
from flashlight_py.nn.module import Module


class SiLU(Function):
    """``x * sigmoid(x)``, elementwise."""

    def __init__(self) -> None:
        super().__init__(F.silu)


class GELU(Function):
    """``x * (1 + erf(x / sqrt(2))) / 2``, elementwise; ``approximate``: see ``functions.gelu``."""

    def __init__(self, approximate: bool | str = False) -> None:
        super().__init__(F.gelu, approximate=is_by_tanh(approximate))


class ELU(Function):
    """``x`` above 0, else ``alpha * (exp(x) - 1)``, elementwise."""

    def __init__(self, alpha: float = 1.0) -> None:
        super().__init__(F.elu, alpha=alpha)


class Softplus(Function):
    """``log(1 + exp(beta * x)) / beta``, elementwise."""

    def __init__(self, beta: float = 1.0) -> None:
        super().__init__(F.softplus, beta=beta)


class LeakyReLU(Function):
    """``x`` above 0, else ``slope * x``, elementwise."""

    def __init__(self, slope: float = 0.01) -> None:
        super().__init__(F.leaky_relu, slope=slope)


class HardTanh(Function):
    """``min(max(x, lower), upper)``, elementwise."""

    def __init__(self, lower: float = -1.0, upper: float = 1.0) -> None:
        super().__init__(F.hardtanh, lower=lower, upper=upper)


class GatedLinearUnit(Function):
    """The first half of ``x`` along ``axis``, of even size, times the sigmoid of the other half."""

    def __init__(self, axis: int = -1) -> None:
        super().__init__(F.glu, axis=axis)


class PReLU(Module):
    """``x`` above 0, else ``weight * x``: ``[batch, channels, ...]`` to the same shape.

    The weight ``[channels]``, of ``dtype``, starts as ``value``; with 1 channel it is for all.

    Raises:
        ValueError: ``channels`` is below 1; when called: the input has another number of them.
        TypeError: ``channels`` is no integer.
    """

    def __init__(self, channels: int = 1, value: float = 0.25, dtype: Any = "float32") -> None:
        self.weight = param(np.full(check_sizes("PReLU", channels=channels), value, dtype))

    def forward(self, x: Variable) -> Variable:
        return F.prelu(x, self.weight)

    def __repr__(self) -> str:
        return f"PReLU({self.weight.size})"
