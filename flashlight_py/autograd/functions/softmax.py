"""Softmax and its logarithm, shifted by the maximum so that no input overflows."""

from __future__ import annotations

from flashlight_py.autograd.variable import Variable, record
from flashlight_py.device import Array, array_module

__all__ = ["softmax", "log_softmax"]


def softmax(x: Variable, axis: int = -1) -> Variable:
    """Return ``exp(x) / sum(exp(x))`` along ``axis``, a new array of the same shape."""
    array = x.data
    out = array_module(array).exp(array - array.max(axis=axis, keepdims=True))
    out /= out.sum(axis=axis, keepdims=True)

    def vjp(grad: Array) -> Array:
        weighted = grad * out
        result: Array = weighted - out * weighted.sum(axis=axis, keepdims=True)
        return result

    return record(out, (x, vjp))


def log_softmax(x: Variable, axis: int = -1) -> Variable:
    """Return ``log(softmax(x))`` along ``axis``, a new array of the same shape."""
    xp = array_module(x.data)
    shifted = x.data - x.data.max(axis=axis, keepdims=True)
    out = shifted - xp.log(xp.exp(shifted).sum(axis=axis, keepdims=True))

    def vjp(grad: Array) -> Array:
        total = grad.sum(axis=axis, keepdims=True)
        return grad - xp.exp(out) * total  # type: ignore[no-any-return]

    return record(out, (x, vjp))
