"""Arithmetic with two operands, broadcast as NumPy's; the results are new arrays.

Every function takes variables, arrays and numbers, at least one of them a variable. The shapes
must broadcast (else ``ValueError``). A number takes the dtype of the other operand.
"""

from __future__ import annotations

from typing import Any

from flashlight_py.autograd.functions.operands import as_pair, as_variable
from flashlight_py.autograd.variable import Input, Operand, Variable, record
from flashlight_py.device import Array, array_module


def negative(x: Input) -> Variable:
    """Return ``-x``, elementwise."""
    x = as_variable(x)
    return record(-x.data, (x, lambda grad: -grad))


def add(a: Operand, b: Operand) -> Variable:
    """Return ``a + b``, elementwise."""
    x, y = as_pair(a, b)
    return record(x.data + y.data, (x, lambda grad: grad), (y, lambda grad: grad))


def sub(a: Operand, b: Operand) -> Variable:
    """Return ``a - b``, elementwise."""
    x, y = as_pair(a, b)
    return record(x.data - y.data, (x, lambda grad: grad), (y, lambda grad: -grad))


def mul(a: Operand, b: Operand) -> Variable:
    """Return ``a * b``, elementwise."""
    x, y = as_pair(a, b)
    p, q = x.data, y.data
    return record(p * q, (x, lambda grad: grad * q), (y, lambda grad: grad * p))


def div(a: Operand, b: Operand) -> Variable:
    """Return ``a / b``, elementwise."""
    x, y = as_pair(a, b)
    p, q = x.data, y.data
    return record(p / q, (x, lambda grad: grad / q), (y, lambda grad: -grad * p / (q * q)))


def pow(a: Operand, b: Operand) -> Variable:
    """Return ``a ** b``, elementwise.

    Where the base is 0, the gradient of the exponent is 0. Where it is negative, that gradient
    does not exist and is nan.
    """
    x, y = as_pair(a, b)
    base, exponent = x.data, y.data
    out = base**exponent

    def base_vjp(grad: Array) -> Any:
        # An exponent of 0 has slope 0 everywhere; base ** -1 would make that nan at base 0.
        lowered = array_module(exponent).where(exponent == 0, 0, exponent - 1)
        return grad * exponent * base ** lowered.astype(exponent.dtype)

    def exponent_vjp(grad: Array) -> Any:
        xp = array_module(base)
        return grad * out * xp.log(xp.where(base == 0, 1, base))

    return record(out, (x, base_vjp), (y, exponent_vjp))


def maximum(a: Operand, b: Operand) -> Variable:
    """Return the larger of both, elementwise; equal elements share the gradient in halves."""
    x, y = as_pair(a, b)
    p, q = x.data, y.data
    out = array_module(p).maximum(p, q)
    return record(out, (x, lambda grad: grad * _share(p > q, p == q, grad)),
                  (y, lambda grad: grad * _share(q > p, p == q, grad)))  # fmt: skip


def minimum(a: Operand, b: Operand) -> Variable:
    """Return the smaller of both, elementwise; equal elements share the gradient in halves."""
    x, y = as_pair(a, b)
    p, q = x.data, y.data
    out = array_module(p).minimum(p, q)
    return record(out, (x, lambda grad: grad * _share(p < q, p == q, grad)),
                  (y, lambda grad: grad * _share(q < p, p == q, grad)))  # fmt: skip


def _share(chosen: Array, equal: Array, grad: Array) -> Any:
    """Return 1 where chosen, 1/2 where equal, else 0, in the dtype of ``grad``."""
    half = array_module(grad).asarray(0.5, grad.dtype)
    return (chosen * 2 + equal) * half
