"""Functions as Python's operators on variables, and as the methods that NumPy's users expect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashlight_py.autograd.functions import dimensions, elementwise
from flashlight_py.autograd.variable import Operand, Variable


def _reversed(function: Callable[[Operand, Operand], Variable]) -> Callable[..., Variable]:
    return lambda self, other: function(other, self)


_OPERATORS: dict[str, Any] = {
    "__neg__": elementwise.negative,
    "__abs__": elementwise.abs,
    "__add__": elementwise.add,
    "__radd__": _reversed(elementwise.add),
    "__sub__": elementwise.sub,
    "__rsub__": _reversed(elementwise.sub),
    "__mul__": elementwise.mul,
    "__rmul__": _reversed(elementwise.mul),
    "__truediv__": elementwise.div,
    "__rtruediv__": _reversed(elementwise.div),
    "__pow__": elementwise.pow,
    "__rpow__": _reversed(elementwise.pow),
    "__matmul__": dimensions.matmul,
    "__rmatmul__": _reversed(dimensions.matmul),
    "__getitem__": dimensions.index,
    "sum": dimensions.sum,
    "mean": dimensions.mean,
    "T": property(dimensions.transpose),
}

for _name, _function in _OPERATORS.items():
    setattr(Variable, _name, _function)
