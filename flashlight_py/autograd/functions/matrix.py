"""Matrix products, and the affine map of a fully connected layer as one operation."""

from __future__ import annotations

import math
from typing import Any

from flashlight_py import kernels
from flashlight_py.autograd.functions.elementwise import relu
from flashlight_py.autograd.functions.operands import as_pair, as_variable
from flashlight_py.autograd.functions.shape import reshape
from flashlight_py.autograd.narrow import total
from flashlight_py.autograd.variable import Input, Operand, Variable, record
from flashlight_py.device import Array, is_cupy


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
        return _linear_2d(x, weight, bias)
    *outer, features = x.data.shape
    rows = reshape(x, (math.prod(outer), features))
    return reshape(_linear_2d(rows, weight, bias), (*outer, weight.data.shape[0]))


def _linear_2d(x: Variable, weight: Variable, bias: Variable | None) -> Variable:
    rows, w = x.data, weight.data
    out = rows.dot(w.T)

    def weight_vjp(grad: Array) -> Any:
        return grad.T.dot(rows, out=_buffer_for(weight, grad, rows))

    # The parameters come first: their hooks fire while the input's gradient is still to compute.
    if bias is None:
        return record(out, (weight, weight_vjp), (x, lambda grad: grad.dot(w)))
    out += bias.data
    return record(out, (weight, weight_vjp), (bias, _sum_rows), (x, lambda grad: grad.dot(w)))


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
    rows, w = x.data, weight.data
    out = rows.dot(w.T)
    kernels.add_bias_relu(out, bias.data)
    slope = _SlopeOnce(out)

    def weight_vjp(grad: Array) -> Any:
        through = slope(grad)
        return through.T.dot(rows, out=_buffer_for(weight, through, rows))

    return record(
        out,
        (weight, weight_vjp),
        (bias, lambda grad: _sum_rows(slope(grad))),
        (x, lambda grad: slope(grad).dot(w)),
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


def _buffer_for(weight: Variable, grad: Array, rows: Array) -> Array | None:
    """Return where the first contribution to ``weight.grad`` can be written at once, if it can."""
    buffer = weight.buffer
    if buffer is None or weight.grad is not None or not buffer.flags.c_contiguous:
        return None
    return buffer if grad.dtype == rows.dtype == buffer.dtype else None


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
    p, q = x.data, y.data
    return record(
        p @ q,
        (x, lambda grad: grad @ _transposed(q)),
        (y, lambda grad: _transposed(p) @ grad),
    )


def _transposed(array: Array) -> Array:
    return array.swapaxes(-1, -2)
