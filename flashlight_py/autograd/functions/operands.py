"""What an operator accepts beside variables: arrays and numbers, as constants."""

from __future__ import annotations

from flashlight_py.autograd.variable import Operand, Variable
from flashlight_py.device import array_module

__all__ = ["as_pair"]


def as_pair(a: Operand, b: Operand) -> tuple[Variable, Variable]:
    """Return both operands as variables; a number takes the dtype and device of the other one.

    Raises:
        TypeError: an operand is no variable, array or number, or none of both is a variable.
    """
    if isinstance(a, Variable):
        return a, b if isinstance(b, Variable) else _as_constant(b, a)
    if isinstance(b, Variable):
        return _as_constant(a, b), b
    raise TypeError(
        f"expected at least one Variable, got {type(a).__name__} and {type(b).__name__}"
    )


def _as_constant(value: Operand, like: Variable) -> Variable:
    if not isinstance(value, (int, float)):
        return Variable(value)  # type: ignore[arg-type]
    dtype = like.data.dtype
    if isinstance(value, float) and dtype.kind != "f":
        dtype = None  # type: ignore[assignment]  # integers and a fraction: the library's choice
    return Variable(array_module(like.data).asarray(value, dtype))
