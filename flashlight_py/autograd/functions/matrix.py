"""Matrix products, and the affine map of a fully connected layer as one operation."""

from __future__ import annotations

import math
from typing import Any

from flashlight_py import kernels
from flashlight_py.autograd.engine import GradSink
from flashlight_py.autograd.functions.elementwise import relu
from flashlight_py.autograd.functions.operands import as_pair, as_variable
from flashlight_py.autograd.functions.shape import reshape
from flashlight_py.autograd.narrow import total
from flashlight_py.autograd.variable import Input, Operand, Variable, record
from flashlight_py.device import Array, captured_gpu, is_cupy, product


def linear(x: Input, weight: Input, bias: Input | None = None) -> Variable:
    """Return ``x @ weight.T + bias``, a new variable of shape ``[..., out]``.

    Args:
        x: shape ``[..., in]``.
        weight: shape ``[out, in]``.
        bias: shape ``[out]``, or None.

    Raises:
        ValueError: the shapes do not fit together.
    """
    x, weight = as_variable(x), as_variable(weight)
    bias = None if bias is None else as_variable(bias)
    _check_shapes(x, weight, bias)
    if x.data.ndim == 2:
        return _linear(x, weight, bias)
    *outer, features = x.data.shape
    rows = reshape(x, (math.prod(outer), features))
    return reshape(_linear(rows, weight, bias), (*outer, weight.data.shape[0]))


def _linear(x: Variable, weight: Variable, bias: Variable | None) -> Variable:
    rows, w = x.data, _to_keep(weight)
    out = product(rows, weight.data.T)

    def weight_vjp(grad: Array) -> Any:
        return _into_gradient(weight, grad, rows)

    def x_vjp(grad: Array) -> Any:
        return product(grad, weight.data if w is None else w)

    # The parameters come first: their hooks fire while the input's gradient is still to compute.
    edges = [(weight, weight_vjp), (x, x_vjp)]
    if bias is not None:
        out += bias.data
        edges.insert(1, (bias, _sum_rows))
    if isinstance(weight.buffer, GradSink) and weight.buffer.is_stepped:
        edges.insert(0, edges.pop())
    return record(out, *edges)


def linear_relu(x: Input, weight: Input, bias: Input) -> Variable:
    """Return ``max(linear(x, weight, bias), 0)``; on a GPU, bias and maximum are one launch.

    Args:
        x: shape ``[..., in]``.
        weight: shape ``[out, in]``.
        bias: shape ``[out]``.

    Raises:
        ValueError: the shapes do not fit together.
    """
    x, weight, bias = as_variable(x), as_variable(weight), as_variable(bias)
    _check_shapes(x, weight, bias)
    rows = x.data
    fits = rows.ndim == 2 and rows.dtype == weight.data.dtype == bias.data.dtype
    return _fused(x, weight, bias) if fits and is_cupy(rows) else relu(linear(x, weight, bias))


def _fused(x: Variable, weight: Variable, bias: Variable) -> Variable:
    rows, w = x.data, _to_keep(weight)
    out = product(rows, weight.data.T)
    kernels.add_bias_relu(out, bias.data)
    slope = _SlopeOnce(out)

    def weight_vjp(grad: Array) -> Any:
        return _into_gradient(weight, slope(grad), rows)

    return record(
        out,
        (weight, weight_vjp),
        (bias, lambda grad: _sum_rows(slope(grad))),
        (x, lambda grad: product(slope(grad), weight.data if w is None else w)),
    )


class _SlopeOnce:
    """What a gradient is before the ReLU, computed once for all that need it."""

    def __init__(self, out: Array) -> None:
        self._out = out
        self._grad: Array | None = None
        self._through: Array = out

    def __call__(self, grad: Array) -> Array:
        if grad is not self._grad:
            self._grad, self._through = grad, kernels.relu_slope(grad, self._out)
        return self._through


def _sum_rows(grad: Array) -> Any:
    return grad[0] if len(grad) == 1 else total(grad, 0)  # a view is ten times cheaper


def _into_gradient(weight: Variable, grad: Array, rows: Array) -> Any:
    """Return the product; the first contribution is written to where it belongs, if it can be."""
    buffer = weight.buffer
    if isinstance(buffer, GradSink):
        return buffer.product(weight, grad.T, rows)
    fits = buffer is not None and weight.grad is None and buffer.flags.c_contiguous
    fits = fits and grad.dtype == rows.dtype == weight.dtype
    return product(grad.T, rows, buffer if fits else None)


def _check_shapes(x: Variable, weight: Variable, bias: Variable | None) -> None:
    shape = weight.data.shape
    if len(shape) != 2:
        raise ValueError(f"linear: expected a weight of shape [out, in], got {shape}")
    if x.data.shape[-1:] != shape[1:]:
        raise ValueError(
            f"linear: expected input of shape [..., {shape[1]}] for a weight of shape {shape}, "
            f"got {x.data.shape}"
        )
    if bias is not None and bias.data.shape != shape[:1]:
        raise ValueError(
            f"linear: expected bias of shape ({shape[0]},) for a weight of shape {shape}, "
            f"got {bias.data.shape}"
        )


def matmul(a: Operand, b: Operand) -> Variable:
    """Return ``a @ b`` with NumPy's rules, as a new array.

    Args:
        a: shape ``[..., n, k]``, or ``[k]``, a row.
        b: shape ``[..., k, m]``, or ``[k]``, a column. Leading dimensions broadcast.

    Returns:
        Shape ``[..., n, m]``, without the dimension that a row or column stands for.

    Raises:
        ValueError: the inner sizes differ, or an operand has no dimensions.
    """
    x, y = as_pair(a, b)
    if not x.data.ndim or not y.data.ndim:
        raise ValueError(f"matmul: needs dimensions, got shapes {x.shape} and {y.shape}")
    row = x if x.data.ndim > 1 else reshape(x, (1, -1))
    column = y if y.data.ndim > 1 else reshape(y, (-1, 1))
    out = _matmul(row, column)
    if row is x and column is y:
        return out
    *outer, n, m = out.data.shape
    return reshape(out, (*outer, *([n] if row is x else []), *([m] if column is y else [])))


def _matmul(x: Variable, y: Variable) -> Variable:
    p, q = _to_keep(x), _to_keep(y)
    return record(
        _stacked(x.data, y.data),
        (x, lambda grad: _stacked(grad, _transposed(y.data if q is None else q))),
        (y, lambda grad: _stacked(_transposed(x.data if p is None else p), grad)),
    )


def _stacked(a: Array, b: Array) -> Array:
    """Return the products of matrices in the last two dimensions."""
    owner = captured_gpu() if is_cupy(a) else None
    found: Array = a @ b if owner is None else owner.product(a, b)
    return found


def _to_keep(operand: Variable) -> Array | None:
    """Return the array for the backward pass; None: a sharded one is read again then, not kept."""
    return operand.data if operand.placement is None else None


def _transposed(array: Array) -> Array:
    return array.swapaxes(-1, -2)
