"""Functions of one operand, element by element; the results are new arrays of the same shape."""

from __future__ import annotations

from typing import Any

from flashlight_py import kernels
from flashlight_py.autograd.functions.operands import as_variable
from flashlight_py.autograd.variable import Input, Variable, record
from flashlight_py.device import array_module, is_cupy


def exp(x: Input) -> Variable:
    """Return e to the power of ``x``."""
    x = as_variable(x)
    out = array_module(x.data).exp(x.data)
    return record(out, (x, lambda grad: grad * out))


def log(x: Input) -> Variable:
    """Return the natural logarithm."""
    x = as_variable(x)
    array = x.data
    return record(array_module(array).log(array), (x, lambda grad: grad / array))


def sqrt(x: Input) -> Variable:
    """Return the square root."""
    x = as_variable(x)
    out = array_module(x.data).sqrt(x.data)
    return record(out, (x, lambda grad: grad / (out + out)))


def sin(x: Input) -> Variable:
    """Return the sine of an angle in radians."""
    x = as_variable(x)
    array = x.data
    xp = array_module(array)
    return record(xp.sin(array), (x, lambda grad: grad * xp.cos(array)))


def cos(x: Input) -> Variable:
    """Return the cosine of an angle in radians."""
    x = as_variable(x)
    array = x.data
    xp = array_module(array)
    return record(xp.cos(array), (x, lambda grad: -grad * xp.sin(array)))


def tanh(x: Input) -> Variable:
    """Return the hyperbolic tangent."""
    x = as_variable(x)
    out = array_module(x.data).tanh(x.data)
    return record(out, (x, lambda grad: grad * (1 - out * out)))


def sigmoid(x: Input) -> Variable:
    """Return ``1 / (1 + exp(-x))``, computed by tanh so that no ``x`` overflows."""
    x = as_variable(x)
    half = x.data / 2
    out = (array_module(half).tanh(half) + 1) / 2
    return record(out, (x, lambda grad: grad * (out * (1 - out))))


def relu(x: Input) -> Variable:
    """Return ``max(x, 0)``; the slope at 0 is 0."""
    x = as_variable(x)
    out = array_module(x.data).maximum(x.data, 0)
    if is_cupy(out):
        return record(out, (x, lambda grad: kernels.relu_slope(grad, out)))
    return record(out, (x, lambda grad: grad * (out > 0)))


def abs(x: Input) -> Variable:
    """Return the absolute value; the slope at 0 is 0."""
    x = as_variable(x)
    array = x.data
    xp = array_module(array)
    return record(xp.abs(array), (x, lambda grad: grad * xp.sign(array)))


def clamp(x: Input, lower: float | None = None, upper: float | None = None) -> Variable:
    """Return ``x`` limited to ``lower`` .. ``upper``; the slope is 1 inside and on the limits.

    Raises:
        ValueError: no limit is given, or ``lower`` exceeds ``upper``.
    """
    x = as_variable(x)
    if lower is None and upper is None:
        raise ValueError("clamp needs a lower limit, an upper limit or both, got none")
    if lower is not None and upper is not None and lower > upper:
        raise ValueError(f"clamp: lower ({lower}) must not exceed upper ({upper})")
    array = x.data
    inside: Any = True
    if lower is not None:
        inside = inside & (array >= lower)
    if upper is not None:
        inside = inside & (array <= upper)
    return record(array_module(array).clip(array, lower, upper), (x, lambda grad: grad * inside))
