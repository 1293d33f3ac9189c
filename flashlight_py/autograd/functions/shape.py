"""Operations that move elements without changing them: reshape, transpose, join, index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flashlight_py.autograd.functions.operands import as_variable
from flashlight_py.autograd.variable import Input, Variable, record
from flashlight_py.device import Array, array_module


def reshape(x: Input, shape: int | Sequence[int]) -> Variable:
    """Return ``x`` with another shape of as many elements; a view of its array where possible.

    Args:
        x: any shape.
        shape: the new shape; one entry may be -1 and is then computed.

    Raises:
        ValueError: the number of elements differs.
    """
    x = as_variable(x)
    old = x.data.shape
    return record(x.data.reshape(shape), (x, lambda grad: grad.reshape(old)))


def moddims(x: Input, shape: int | Sequence[int]) -> Variable:
    """Return ``reshape(x, shape)``; flashlight's name for it.

    Raises:
        ValueError: the number of elements differs.
    """
    return reshape(x, shape)


def flat(x: Input) -> Variable:
    """Return ``x`` as one dimension, in row-major order; a view of its array where possible."""
    return reshape(x, -1)


def transpose(x: Input, axes: Sequence[int] | None = None) -> Variable:
    """Return ``x`` with its dimensions permuted (None: reversed); a view of its array.

    Raises:
        ValueError: ``axes`` is not a permutation of the dimensions.
    """
    x = as_variable(x)
    if axes is None:
        return record(x.data.T, (x, lambda grad: grad.T))
    ndim = x.data.ndim
    forward = [axis % ndim if -ndim <= axis < ndim else axis for axis in axes]
    if sorted(forward) != list(range(ndim)):
        raise ValueError(f"transpose: axes must permute {ndim} dimensions, got {tuple(axes)}")
    inverse = sorted(range(ndim), key=forward.__getitem__)
    return record(x.data.transpose(forward), (x, lambda grad: grad.transpose(inverse)))


def concatenate(variables: Sequence[Input], axis: int = 0) -> Variable:
    """Return the variables joined along an existing dimension, as a new array.

    Args:
        variables: one or more, of equal shape except along ``axis``.
        axis: the dimension to join along; negative counts from the end.

    Raises:
        ValueError: no variables, or shapes that do not fit.
    """
    if not variables:
        raise ValueError("concatenate needs at least one variable, got none")
    given = [as_variable(variable) for variable in variables]
    arrays = [variable.data for variable in given]
    joined = array_module(arrays[0]).concatenate(arrays, axis=axis)
    before = (slice(None),) * (axis % joined.ndim)
    inputs, start = [], 0
    for variable in given:
        stop = start + variable.data.shape[axis]
        inputs.append((variable, _slicer((*before, slice(start, stop)))))
        start = stop
    return record(joined, *inputs)


def _slicer(where: tuple[slice, ...]) -> Any:
    return lambda grad: grad[where]


def index(x: Input, where: Any) -> Variable:
    """Return ``x[where]`` with NumPy's rules; a view for slices and numbers, else a copy.

    An element that is picked more than once collects the gradients of all its copies.

    Args:
        x: any shape.
        where: an index; integer or Boolean variables in it count as arrays.

    Raises:
        IndexError: out of range, or not an index.
    """
    x = as_variable(x)
    array = x.data
    where = _as_index(where, array)
    parts = where if isinstance(where, tuple) else (where,)
    basic = all(p is None or p is Ellipsis or isinstance(p, (int, slice)) for p in parts)

    def x_vjp(grad: Array) -> Array:
        xp = array_module(array)
        spread: Array = xp.zeros(array.shape, grad.dtype)
        if basic:
            spread[where] = grad
        else:
            xp.add.at(spread, where, grad)
        return spread

    return record(array[where], (x, x_vjp))


def _as_index(where: Any, array: Array) -> Any:
    """Return an index whose arrays, variables' included, are where ``array`` is."""
    if isinstance(where, tuple):
        return tuple(_as_index(part, array) for part in where)
    if isinstance(where, Variable):
        where = where.data
    return array_module(array).asarray(where) if hasattr(where, "__array__") else where


def astype(x: Input, dtype: Any) -> Variable:
    """Return ``x`` cast to ``dtype``, as a new array; its gradient has ``x``'s dtype.

    A cast to a dtype that is not floating ends the graph: the result has no gradient.
    """
    x = as_variable(x)
    array = x.data.astype(dtype)
    if array.dtype.kind != "f":
        return Variable(array)
    return record(array, (x, lambda grad: grad))
