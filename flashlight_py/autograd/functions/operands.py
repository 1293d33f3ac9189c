"""What functions accept beside variables: arrays and numbers, as constants."""

from __future__ import annotations

from flashlight_py.autograd.variable import Input, Operand, Variable
from flashlight_py.device import array_module


def as_variable(x: Input) -> Variable:
    """Return ``x``, or an array as a constant, as ``fl.input`` makes it.

    Raises:
        TypeError: it is neither.
    """
    return x if x.__class__ is Variable else _as_input(x)


def _as_input(x: Input) -> Variable:
    return x if isinstance(x, Variable) else Variable(x)


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
        f"expected at least one Variable, got {type(a).__name__} and {type(b).__name__}; "
        "make one of an array by fl.input or fl.no_grad"
    )


def _as_constant(value: Operand, like: Variable) -> Variable:
    if not isinstance(value, (int, float)):
        return Variable(value)  # type: ignore[arg-type]
    dtype = like.data.dtype
    if isinstance(value, float) and dtype.kind != "f":
        dtype = None  # type: ignore[assignment]  # integers and a fraction: the library's choice
    return Variable(array_module(like.data).asarray(value, dtype))
