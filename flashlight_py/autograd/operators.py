"""Python's operators on variables: each is one of the functions, as a method."""

from __future__ import annotations

from flashlight_py.autograd.functions import arithmetic, elementwise, matrix, shape
from flashlight_py.autograd.variable import Operand, Variable

__all__: list[str] = []


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
}

for _name, _function in _OPERATORS.items():
    setattr(Variable, _name, _function)
