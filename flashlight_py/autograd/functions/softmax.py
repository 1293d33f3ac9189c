"""Softmax and its logarithm, shifted by the maximum so that no input overflows."""

from __future__ import annotations

from flashlight_py.autograd.functions.operands import as_variable
from flashlight_py.autograd.narrow import narrowed, widened
from flashlight_py.autograd.variable import Input, Variable, record
from flashlight_py.device import Array, array_module


def softmax(x: Input, axis: int = -1) -> Variable:
    """Return ``exp(x) / sum(exp(x))`` along ``axis``, a new array of the same shape."""
    x = as_variable(x)
    array = widened(x.data)
    out = array_module(array).exp(array - array.max(axis=axis, keepdims=True))
    out /= out.sum(axis=axis, keepdims=True)

    def vjp(grad: Array) -> Array:
        weighted = grad * out
        result: Array = weighted - out * weighted.sum(axis=axis, keepdims=True)
        return result

    return record(narrowed(out, x.data), (x, vjp))


def log_softmax(x: Input, axis: int = -1) -> Variable:
    """Return ``log(softmax(x))`` along ``axis``, a new array of the same shape."""
    x = as_variable(x)
    array = widened(x.data)
    xp = array_module(array)
    shifted = array - array.max(axis=axis, keepdims=True)
    out = shifted - xp.log(xp.exp(shifted).sum(axis=axis, keepdims=True))

    def vjp(grad: Array) -> Array:
        wide = widened(grad)
        total = wide.sum(axis=axis, keepdims=True)
        return wide - xp.exp(out) * total  # type: ignore[no-any-return]

    return record(narrowed(out, x.data), (x, vjp))
