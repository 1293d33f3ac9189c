"""Python's operators on variables, and what NumPy's users expect of them as methods.

Each is one of the functions, or says something of the array.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from flashlight_py.autograd.functions import dimensions, elementwise
from flashlight_py.autograd.variable import Operand, Variable
from flashlight_py.device import Array


def _reversed(function: Callable[[Operand, Operand], Variable]) -> Callable[..., Variable]:
    return lambda self, other: function(other, self)


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
    "__array__": _array,
    "__len__": _length,
    "__iter__": _rows,
    "__bool__": lambda self: bool(self.scalar()),
    "__int__": lambda self: int(self.scalar()),
    "__float__": lambda self: float(self.scalar()),
    "sum": dimensions.sum,
    "mean": dimensions.mean,
    "T": property(dimensions.transpose),
}

for _name, _function in _OPERATORS.items():
    setattr(Variable, _name, _function)
