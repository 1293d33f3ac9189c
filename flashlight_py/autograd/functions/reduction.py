"""Reductions over dimensions.

``axis`` is None for all dimensions, a dimension, or several; negative ones count from the end.
``keepdims`` leaves the reduced dimensions in place with size 1. The results are new arrays.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

from flashlight_py.autograd.functions.arithmetic import mul, sub
from flashlight_py.autograd.functions.operands import as_variable
from flashlight_py.autograd.narrow import narrowed, total, widened
from flashlight_py.autograd.variable import Input, Variable, record
from flashlight_py.device import Array, array_module

Axis: TypeAlias = int | Sequence[int] | None


def sum(x: Input, axis: Axis = None, keepdims: bool = False) -> Variable:
    """Return the sum over ``axis``.

    Raises:
        ValueError: ``axis`` names no dimension of ``x``, or one twice.
    """
    x = as_variable(x)
    array = x.data
    axes = _axes(axis, array.ndim)
    out = narrowed(total(array, axes, keepdims), array)
    return record(out, (x, lambda grad: _spread(grad, axes, array.shape)))


def mean(x: Input, axis: Axis = None, keepdims: bool = False) -> Variable:
    """Return the mean over ``axis``.

    Raises:
        ValueError: ``axis`` names no dimension of ``x``, or one twice, or has no element.
    """
    x = as_variable(x)
    array = x.data
    axes = _axes(axis, array.ndim)
    count = _count(array.shape, axes, "mean")
    out = array.mean(axis=axes, keepdims=keepdims)
    return record(out, (x, lambda grad: _spread(widened(grad) / count, axes, array.shape)))


def var(x: Input, axis: Axis = None, keepdims: bool = False, ddof: int = 0) -> Variable:
    """Return the variance over ``axis``: the squared deviations' sum divided by ``n - ddof``.

    Raises:
        ValueError: ``axis`` names no dimension of ``x``, or one twice, or ``n <= ddof``.
    """
    x = as_variable(x)
    axes = _axes(axis, x.data.ndim)
    count = _count(x.data.shape, axes, "var")
    if count <= ddof:
        raise ValueError(f"var: needs more than ddof ({ddof}) elements, got {count}")
    deviation = sub(x, mean(x, axes, keepdims=True))
    return mul(mean(mul(deviation, deviation), axes, keepdims), count / (count - ddof))


def max(x: Input, axis: Axis = None, keepdims: bool = False) -> Variable:
    """Return the largest element over ``axis``; equal ones share the gradient evenly.

    Raises:
        ValueError: ``axis`` names no dimension of ``x``, or one twice, or has no element.
    """
    x = as_variable(x)
    axes = _axes(axis, x.data.ndim)
    return _extremum(x, x.data.max(axis=axes, keepdims=True), axes, keepdims)


def min(x: Input, axis: Axis = None, keepdims: bool = False) -> Variable:
    """Return the smallest element over ``axis``; equal ones share the gradient evenly.

    Raises:
        ValueError: ``axis`` names no dimension of ``x``, or one twice, or has no element.
    """
    x = as_variable(x)
    axes = _axes(axis, x.data.ndim)
    return _extremum(x, x.data.min(axis=axes, keepdims=True), axes, keepdims)


def _extremum(x: Variable, best: Array, axes: tuple[int, ...], keepdims: bool) -> Variable:
    array = x.data

    def vjp(grad: Array) -> Any:
        winners = array == best
        shares = winners / winners.sum(axis=axes, keepdims=True)
        wide = widened(grad)
        return _spread(wide, axes, array.shape) * shares.astype(wide.dtype)

    return record(best if keepdims else best.squeeze(axes).copy(), (x, vjp))


def _axes(axis: Axis, ndim: int) -> tuple[int, ...]:
    """Return the dimensions to reduce as numbers of 0 .. ndim - 1."""
    if axis is None:
        return tuple(range(ndim))
    named = (axis,) if isinstance(axis, int) else tuple(axis)
    axes = tuple(a + ndim if a < 0 else a for a in named)
    if len(set(axes)) < len(axes) or not all(0 <= a < ndim for a in axes):
        raise ValueError(f"axis {axis} does not name distinct dimensions of {ndim}")
    return axes


def _count(shape: tuple[int, ...], axes: tuple[int, ...], what: str) -> int:
    count = math.prod(shape[a] for a in axes)
    if not count:
        raise ValueError(f"{what}: nothing to reduce over axis {axes} of shape {shape}")
    return count


def _spread(grad: Array, axes: tuple[int, ...], shape: tuple[int, ...]) -> Array:
    """Return the gradient of a reduction repeated over the reduced dimensions, as a view."""
    kept = tuple(1 if a in axes else n for a, n in enumerate(shape))
    return array_module(grad).broadcast_to(grad.reshape(kept), shape)  # type: ignore[no-any-return]
