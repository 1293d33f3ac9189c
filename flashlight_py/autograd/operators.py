"""Operators and methods of variables, and implementations of NumPy functions for variables."""

from collections.abc import Callable
from inspect import signature
from typing import Any

import numpy as np

from flashlight_py.autograd import functions
from flashlight_py.autograd.functions import dimensions, elementwise, selecting
from flashlight_py.autograd.variable import Operand, Variable, record, summed
from flashlight_py.device import array_module


def _reshape(self: Variable, *shape: Any) -> Variable:
    """Return the variable with another shape, as a view if possible. One size may be -1."""
    return dimensions.reshape(self, shape[0] if len(shape) == 1 else shape)


def _transpose(self: Variable, *axes: Any) -> Variable:
    """Return a view with dimensions in the order ``axes``, by default reversed."""
    return dimensions.transpose(self, axes if len(axes) > 1 else (*axes, None)[0])


def _missing(self: Variable, name: str) -> Any:
    """Raise AttributeError. The message names the replacement of ``name``, if there is one."""
    replacement = _INSTEAD.get(name, f"x.numpy().{name}" if hasattr(np.ndarray, name) else "")
    if callable(getattr(functions, name, 0)):
        replacement = f"fl.autograd.functions.{name}(x)"
    hint = f". Use {replacement}" if replacement and name[0] != "_" else ""
    raise AttributeError(f"a Variable x has no attribute {name!r}{hint}", name=name, obj=self)


# What a user can write instead of an attribute of NumPy arrays or torch tensors.
_INSTEAD = {
    **{"clone": "x.copy()", "dim": "x.ndim", "numel": "x.size", "requires_grad": "x.calc_grad"},
    **{"view": "x.reshape(shape)", "permute": "x.transpose(axes)", "ravel": "x.flatten()"},
    **{"unsqueeze": "fl.autograd.functions.expand_dims(x, axis)", "dot": "x @ y"},
    **{"take": "np.take(x, indices, axis)", "swapaxes": "x.transpose(axes)"},
    **{"expand": "np.broadcast_to(x, shape)", "contiguous": "x.copy()"},
    **dict.fromkeys(("half", "float", "double", "type"), "x.astype(dtype)"),
    **dict.fromkeys(("cpu", "cuda", "to"), "fl.device.to_device(x.array, device)"),
}


def _where(condition: Any, *values: Any) -> Any:
    if any(isinstance(value, Variable) for value in values):
        return selecting.where(condition, *values)
    return np.where(condition.data, *values)


def _dot(a: Operand, b: Operand) -> Variable:
    if np.ndim(b) > 2:
        raise TypeError(f"numpy.dot: operands must have at most 2 dimensions, got {np.ndim(b)}")
    return dimensions.matmul(a, b) if np.ndim(a) and np.ndim(b) else elementwise.mul(a, b)


def _split(ary: Variable, indices_or_sections: Any, axis: int = 0) -> list[Variable]:
    parts = np.split(np.arange(ary.shape[axis]), indices_or_sections)
    return dimensions.split(ary, [len(part) for part in parts], axis)


def _take(a: Any, indices: Any, axis: int | None = None) -> Variable:
    index = (indices,) if axis is None else (*(slice(None),) * range(a.ndim)[axis], indices)
    return dimensions.index(dimensions.flat(a) if axis is None else a, index)


def _moveaxis(a: Variable, source: Any, destination: Any) -> Variable:
    order = np.moveaxis(np.empty(range(a.ndim)), source, destination).shape  # has no elements
    return dimensions.transpose(a, order)


def _broadcast_to(array: Variable, shape: Any) -> Variable:
    out = array_module(array.data).broadcast_to(array.data, shape)
    return record(out, (array, summed(lambda grad: grad, array.shape)))


def _concatenate(variables: Any, axis: int | None = 0) -> Variable:
    flats = variables if axis is not None else [dimensions.flat(variable) for variable in variables]
    return dimensions.concatenate(flats, axis or 0)


def _by_line(function: Callable[..., Variable], default: int | None) -> Callable[..., Variable]:
    return lambda a, axis=default: (
        function(dimensions.flat(a), 0) if axis is None else function(a, axis)
    )


_SAME = "add negative maximum minimum exp log log1p sqrt sin cos tanh matmul"
_UFUNCS: dict[Any, Callable[..., Variable]] = {
    **{getattr(np, name): getattr(functions, name) for name in _SAME.split()},
    **{np.subtract: elementwise.sub, np.multiply: elementwise.mul, np.divide: elementwise.div},
    **{np.power: elementwise.pow, np.square: lambda x: x * x, np.absolute: elementwise.abs},
}
# For a NumPy function: our function, and the number of leading arguments that both have in common.
_AS_HERE = "sum mean var max min stack transpose reshape tile squeeze expand_dims flip std prod"
_FUNCTIONS: dict[Any, tuple[Callable[..., Any], int]] = {
    **{getattr(np, name): (getattr(functions, name), 2) for name in _AS_HERE.split()},
    **{np.amax: (dimensions.max, 2), np.amin: (dimensions.min, 2), np.dot: (_dot, 2)},
    **{np.concatenate: (_concatenate, 2), np.cumsum: (_by_line(dimensions.cumsum, None), 2)},
    **{np.sort: (_by_line(selecting.sort, -1), 2), np.pad: (selecting.pad, 3)},
    **{np.split: (_split, 3), np.take: (_take, 3), np.moveaxis: (_moveaxis, 3)},
    **{np.broadcast_to: (_broadcast_to, 2)},
    **{np.ravel: (dimensions.flat, 1), np.linalg.norm: (dimensions.norm, 1)},
    **{np.clip: (elementwise.clip, 3), np.where: (_where, 3), np.einsum: (dimensions.einsum, 99)},
}
# Functions without a derivative, whose results are Booleans, indices, shapes or types.
_CONSTANT = {np.argmax, np.argmin, np.argsort, np.any, np.all, np.isclose, np.allclose, np.shape,
             np.array_equal, np.count_nonzero, np.nonzero, np.ndim, np.size, np.result_type,
             np.zeros_like, np.ones_like, np.empty_like, np.full_like}  # fmt: skip


def _call_ufunc(self: Variable, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
    """Call this package's function for ``ufunc`` if it exists. Else call ``ufunc`` with arrays."""
    if ufunc in _UFUNCS and method == "__call__" and not options:
        return _UFUNCS[ufunc](*inputs)
    if any(isinstance(output, Variable) for output in options.get("out", ())):
        raise TypeError(f"numpy.{ufunc.__name__}: out must be an array, got a Variable")
    is_test = all(types[-1] == "?" for types in ufunc.types if "O" not in types)
    name = ".".join(["numpy", ufunc.__name__, *[method] * (method != "__call__")])
    arrays = _arrays_of(inputs, "" if is_test else " with ".join([name, *options]))
    return getattr(ufunc, method)(*arrays, **options)


def _call_function(self: Variable, function: Any, _: Any, args: Any, options: Any) -> Any:
    """Call this package's function for ``function`` if it exists. Else pass arrays to it."""
    call, most = _FUNCTIONS.get(function, (None, 0))
    if call and len(args) <= most and options.keys() <= signature(call).parameters.keys():
        return call(*args, **options)
    name = " with ".join([f"{function.__module__}.{function.__name__}", *options])
    args, options = _arrays_of((args, options), "" if function in _CONSTANT else name)
    return function(*args, **options)


def _arrays_of(value: Any, function: str = "") -> Any:
    """Replace variables by arrays. If ``function`` is set, a variable with ``calc_grad`` raises."""
    if isinstance(value, Variable):
        if function and value.calc_grad:
            raise TypeError(
                f"{function} has no derivative, but got a Variable of shape {value.shape} that "
                "needs a gradient. Use a function of fl.autograd.functions, or define one by "
                "fl.autograd.function. If no gradient is needed, pass variable.array (from a GPU: "
                "variable.numpy())"
            )
        return value.data
    if type(value) in (list, tuple):
        return type(value)(_arrays_of(item, function) for item in value)
    if type(value) is dict:
        return {name: _arrays_of(item, function) for name, item in value.items()}
    return value


_OPERATORS: dict[str, Any] = {
    **{"__neg__": elementwise.negative, "__abs__": elementwise.abs, "__add__": elementwise.add},
    **{"__sub__": elementwise.sub, "__mul__": elementwise.mul, "__truediv__": elementwise.div},
    **{"__pow__": elementwise.pow, "__matmul__": dimensions.matmul},
    "__lt__": lambda self, other: self.data < _arrays_of(other),
    "__le__": lambda self, other: self.data <= _arrays_of(other),
    "__gt__": lambda self, other: self.data > _arrays_of(other),
    "__ge__": lambda self, other: self.data >= _arrays_of(other),
    **{f"__{of.__name__}__": lambda x, of=of: of(x.scalar()) for of in (bool, int, float)},
    "__array_ufunc__": _call_ufunc,
    "__array_function__": _call_function,
    "__getattr__": _missing,
    "__getitem__": dimensions.index,
    **{"sum": dimensions.sum, "mean": dimensions.mean, "max": dimensions.max},
    **{"min": dimensions.min, "var": dimensions.var, "astype": dimensions.astype},
    **{"squeeze": dimensions.squeeze, "flatten": dimensions.flat},
    **{"reshape": _reshape, "transpose": _transpose},
    "T": property(dimensions.transpose),
}
for _name in ("add", "sub", "mul", "truediv", "pow", "matmul"):
    _OPERATORS[f"__r{_name}__"] = lambda self, x, of=_OPERATORS[f"__{_name}__"]: of(x, self)

for _name, _function in _OPERATORS.items():
    setattr(Variable, _name, _function)
