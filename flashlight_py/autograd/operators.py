"""Python's operators on variables, and what NumPy's users expect of them as methods.

Each is one of the functions, or says something of the array.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from flashlight_py.autograd.functions import arithmetic, elementwise, matrix, reduction, shape
from flashlight_py.autograd.variable import Operand, Variable
from flashlight_py.device import Array


def _radd(self: Variable, other: Operand) -> Variable:
    return arithmetic.add(other, self)


def _rsub(self: Variable, other: Operand) -> Variable:
    return arithmetic.sub(other, self)


def _rmul(self: Variable, other: Operand) -> Variable:
    return arithmetic.mul(other, self)


def _rtruediv(self: Variable, other: Operand) -> Variable:
    return arithmetic.div(other, self)


def _rpow(self: Variable, other: Operand) -> Variable:
    return arithmetic.pow(other, self)


def _rmatmul(self: Variable, other: Operand) -> Variable:
    return matrix.matmul(other, self)


def _array(self: Variable, dtype: Any = None, copy: bool | None = None) -> Array:
    """Return the array, for ``np.asarray(variable)`` and NumPy's functions.

    Raises:
        TypeError: the variable needs a gradient, or is on a GPU.
        ValueError: ``copy`` is False and ``dtype`` needs one.
    """
    if self.calc_grad:
        raise TypeError(
            f"NumPy asks for the array of a Variable that needs a gradient (shape {self.shape}): "
            "what it computes would not be part of the graph. Where that is meant, pass it "
            "variable.numpy(); else use the functions of fl.autograd.functions"
        )
    if copy is None:  # only if need be, which NumPy 1 spells otherwise
        return np.asarray(self.data, dtype)
    return np.array(self.data, dtype=dtype, copy=copy)


def _length(self: Variable) -> int:
    """Return the size of the first dimension."""
    if not self.data.ndim:
        raise TypeError("len() of a Variable without dimensions; its number is scalar()")
    return int(self.data.shape[0])


def _rows(self: Variable) -> Iterator[Variable]:
    """Go through the first dimension."""
    return map(self.__getitem__, range(len(self)))


def _bool(self: Variable) -> bool:
    """Return whether the only element is not 0."""
    return bool(self.scalar())


def _int(self: Variable) -> int:
    """Return the only element as an int."""
    return int(self.scalar())


def _float(self: Variable) -> float:
    """Return the only element as a float."""
    return float(self.scalar())


def _transposed(self: Variable) -> Variable:
    """The variable with its dimensions reversed."""
    return shape.transpose(self)


_OPERATORS = {
    "__neg__": arithmetic.negative,
    "__abs__": elementwise.abs,
    "__add__": arithmetic.add,
    "__radd__": _radd,
    "__sub__": arithmetic.sub,
    "__rsub__": _rsub,
    "__mul__": arithmetic.mul,
    "__rmul__": _rmul,
    "__truediv__": arithmetic.div,
    "__rtruediv__": _rtruediv,
    "__pow__": arithmetic.pow,
    "__rpow__": _rpow,
    "__matmul__": matrix.matmul,
    "__rmatmul__": _rmatmul,
    "__getitem__": shape.index,
    "__array__": _array,
    "__len__": _length,
    "__iter__": _rows,
    "__bool__": _bool,
    "__int__": _int,
    "__float__": _float,
    "sum": reduction.sum,
    "mean": reduction.mean,
    "T": property(_transposed),
}

for _name, _function in _OPERATORS.items():
    setattr(Variable, _name, _function)
