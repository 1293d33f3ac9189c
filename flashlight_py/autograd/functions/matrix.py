"""The matrix product."""

from __future__ import annotations

from flashlight_py.autograd.functions.operands import as_pair
from flashlight_py.autograd.functions.shape import reshape
from flashlight_py.autograd.variable import Operand, Variable, record
from flashlight_py.device import Array


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
