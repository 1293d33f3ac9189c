"""Elementwise activation functions of neural networks, and the error function.

Results are new arrays. float16 is computed in float32 and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from flashlight_py.autograd.functions.dimensions import reshape
from flashlight_py.autograd.functions.elementwise import as_variable, check_filled
from flashlight_py.autograd.native import record_mapped
from flashlight_py.autograd.variable import Input, Variable, record, record_pair
from flashlight_py.device import Array, array_module, narrowed, widened
from flashlight_py.erf import erf_of


def _function(
    x: Input, value: Callable[..., Array], vjp: Callable[..., Array], native: str = ""
) -> Variable:
    """Return ``value(xp, x)`` with vjp ``vjp``. If kernel ``native`` exists, return its result."""
    x = as_variable(x)
    result = record_mapped(native, x) if native else None
    if result is not None:
        return result
    array = widened(x.data)
    xp = array_module(array)
    out = value(xp, array)
    return record(narrowed(out, x.data), (x, partial(vjp, xp, array, out)))


def log1p(x: Input) -> Variable:
    """Return ``log(1 + x)``, accurate near 0."""
    return _function(x, lambda xp, a: xp.log1p(a), lambda xp, a, out, grad: grad / (a + 1))


def erf(x: Input) -> Variable:
    """Return ``2 / sqrt(pi)`` times the integral of ``exp(-t * t)`` from t = 0 to ``x``."""
    factor = 2 / math.sqrt(math.pi)
    slope = lambda xp, a, out, grad: grad * xp.exp(-a * a) * factor  # noqa: E731
    return _function(x, lambda xp, a: erf_of(a), slope)


def gelu(x: Input, approximate: bool | str = False) -> Variable:
    """Return ``x * Phi(x)``, where ``Phi`` is the standard normal distribution function.

    ``Phi(x) = (1 + erf(x / sqrt(2))) / 2`` (Hendrycks and Gimpel, 2016). If ``approximate`` is True
    or ``"tanh"``, ``Phi(x) = (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x ** 3))) / 2``, as in GPT-2.
    Raises ValueError unless ``approximate`` is a bool, ``"none"`` or ``"tanh"`` (torch's names).
    """
    x, by_tanh = as_variable(x), is_by_tanh(approximate)
    result = record_mapped("gelu_by_tanh" if by_tanh else "gelu", x)
    if result is not None:
        return result
    array = widened(x.data)
    xp = array_module(array)
    if by_tanh:
        square = array * array
        doubled = xp.tanh(array * (square * (0.044715 * _GELU) + _GELU)) + 1
    else:
        doubled = erf_of(array * math.sqrt(0.5)) + 1
    half = array * 0.5

    def vjp(grad: Array) -> Any:
        if by_tanh:
            slope = doubled * (2 - doubled) * (square * (3 * 0.044715 * _GELU) + _GELU)
        else:
            slope = xp.exp(array * -half) * math.sqrt(2 / math.pi)
        return grad * (doubled * 0.5 + half * slope)

    return record(narrowed(half * doubled, x.data), (x, vjp))


_GELU = math.sqrt(2 / math.pi)


def is_by_tanh(approximate: bool | str) -> bool:
    """Return whether ``approximate`` selects tanh. Raises ValueError if the value is unknown."""
    if approximate not in (False, True, "none", "tanh"):
        raise ValueError(
            f"gelu: approximate must be 'none', 'tanh', False or True, got {approximate!r}"
        )
    return approximate in (True, "tanh")


def silu(x: Input) -> Variable:
    """Return ``x * sigmoid(x)``, also known as swish."""

    def vjp(xp: Any, a: Array, out: Array, grad: Array) -> Any:
        gate = _sigmoid(xp, a)
        return grad * (gate + out * (1 - gate))

    return _function(x, lambda xp, a: a * _sigmoid(xp, a), vjp, "silu")


def _sigmoid(xp: Any, array: Array) -> Any:
    return xp.tanh(array * 0.5) * 0.5 + 0.5


def softplus(x: Input, beta: float = 1.0) -> Variable:
    """Return ``log(1 + exp(beta * x)) / beta``, without overflow."""
    return _function(
        x,
        lambda xp, a: xp.logaddexp(a * beta, 0) / beta,
        lambda xp, a, out, grad: grad * _sigmoid(xp, a * beta),
    )


def elu(x: Input, alpha: float = 1.0) -> Variable:
    """Return ``x`` where ``x > 0``, else ``alpha * (exp(x) - 1)``. The slope at 0 is ``alpha``."""
    return _function(
        x,
        lambda xp, a: xp.where(a > 0, a, xp.expm1(xp.minimum(a, 0)) * alpha),
        lambda xp, a, out, grad: xp.where(a > 0, grad, grad * (out + alpha)),
    )


def leaky_relu(x: Input, slope: float = 0.01) -> Variable:
    """Return ``x`` where ``x > 0``, else ``slope * x``. The derivative at 0 is ``slope``."""
    return _function(
        x,
        lambda xp, a: xp.where(a > 0, a, a * slope),
        lambda xp, a, out, grad: xp.where(a > 0, grad, grad * slope),
    )


def hardtanh(x: Input, lower: float = -1.0, upper: float = 1.0) -> Variable:
    """Return ``x`` limited to ``lower`` .. ``upper``. The slope is 1 only between the limits.

    Raises:
        ValueError: If ``lower`` is not below ``upper``.
    """
    if not lower < upper:
        raise ValueError(f"hardtanh: lower must be below upper, got {lower} and {upper}")
    return _function(
        x,
        lambda xp, a: xp.clip(a, lower, upper),
        lambda xp, a, out, grad: grad * ((a > lower) & (a < upper)),
    )


def prelu(x: Input, weight: Input) -> Variable:
    """Return ``x`` where ``x > 0``, else ``weight * x``. The derivative at 0 is ``weight``.

    ``x`` has shape ``[batch, channels, ...]`` and ``weight`` ``[channels]``. With a ``weight`` of
    shape ``[1]``, ``x`` may have any shape.

    Raises:
        ValueError: If ``weight`` has another shape, or if ``x`` has no element.
    """
    x, weight = as_variable(x), as_variable(weight)
    shape = x.data.shape
    channels = shape[1] if len(shape) > 1 else 1
    if weight.data.shape not in ((channels,), (1,)):
        raise ValueError(
            f"prelu: expected a weight of shape ({channels},) or (1,) for input [batch, channels, "
            f"...] of shape {shape}, got {weight.data.shape}"
        )
    check_filled("prelu", x)
    weight = reshape(weight, (-1, *(1,) * (len(shape) - 2)) if weight.data.size > 1 else ())
    array, w = widened(x.data), widened(weight.data)
    xp = array_module(array)
    above = array > 0
    out = xp.where(above, array, array * w)
    return record_pair(
        narrowed(out, x.data),
        *(x, lambda grad: xp.where(above, grad, grad * w)),
        *(weight, lambda grad: widened(grad) * xp.minimum(array, 0)),
    )


def glu(x: Input, axis: int = -1) -> Variable:
    """Return the first half of ``x`` along ``axis`` times the sigmoid of the second half.

    The result is half as long along ``axis`` (Dauphin et al., ICML 2017).

    Raises:
        ValueError: If the length along ``axis`` is odd, or if the axis does not exist.
    """
    x = as_variable(x)
    array = widened(x.data)
    if not -array.ndim <= axis < array.ndim or array.shape[axis] % 2:
        raise ValueError(f"glu: expected an even size of axis {axis}, got shape {array.shape}")
    before, count = (slice(None),) * (axis % array.ndim), array.shape[axis] // 2
    first, second = array[(*before, slice(count))], array[(*before, slice(count, None))]
    xp = array_module(array)
    gate = _sigmoid(xp, second)

    def vjp(grad: Array) -> Any:
        of_first = grad * gate
        return xp.concatenate([of_first, of_first * (1 - gate) * first], axis=axis)

    return record(narrowed(first * gate, x.data), (x, vjp))
