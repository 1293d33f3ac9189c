"""Functions that pick elements by a condition or by integers, and their inverse, which adds.

Integers are arrays or variables; they have to be within range and count from 0. Results are new.
"""

import math
from typing import Any

import numpy as np

from flashlight_py.autograd.functions.elementwise import as_pair, as_variable, check_filled
from flashlight_py.autograd.native import contiguous, kernel
from flashlight_py.autograd.variable import Input, Operand, Variable, record, record_pair
from flashlight_py.device import Array, array_module, is_cupy, narrowed, widened
from flashlight_py.structure import require


def where(condition: Input, a: Operand, b: Operand) -> Variable:
    """Return ``a`` where ``condition`` holds, else ``b``, elementwise and broadcast.

    One of ``a`` and ``b`` is a variable, the other that, an array or a number.

    Raises:
        TypeError: the condition has no truth values, or neither is a variable.
        ValueError: the shapes do not broadcast.
    """
    x, y = as_pair(a, b)
    holds = _beside(condition, x.data)
    if holds.dtype != bool:
        raise TypeError(f"where: the condition needs dtype bool, got {holds.dtype}; compare it")
    pick = array_module(holds).where
    out = pick(holds, x.data, y.data)
    return record_pair(
        out, x, lambda grad: pick(holds, grad, 0), y, lambda grad: pick(holds, 0, grad)
    )


def gather(x: Input, index: Input, axis: int) -> Variable:
    """Return of each line of ``x`` along ``axis`` the elements that ``index`` names, as in torch.

    With ``axis`` 0 of two: ``result[i, j] = x[index[i, j], j]``. One that is picked more than once
    collects the gradients of all its copies. ``index`` holds integers and has as many dimensions as
    ``x``, no longer than there in those other than ``axis``; the result has its shape.

    Raises:
        TypeError: ``index`` has no integers.
        ValueError: the shapes do not fit, or there is no such axis.
        IndexError: an element of ``index`` is out of range.
    """
    x = as_variable(x)
    return _gather(x, _places("gather", x.data, index, axis))


def _gather(x: Variable, places: Array) -> Variable:
    shape = x.data.shape
    return record(x.data.reshape(-1)[places], (x, lambda grad: added(shape, places, grad)))


def scatter_add(x: Input, index: Input, source: Input, axis: int) -> Variable:
    """Return ``x`` with ``source`` added where :func:`gather` by ``index`` would pick, as in torch.

    With ``axis`` 0 of two: ``result[index[i, j], j] += source[i, j]``, in the order of ``source``,
    which has the shape of ``index``. Other arguments and errors are those of :func:`gather`.
    """
    x, source = as_variable(x), as_variable(source)
    places = _places("scatter_add", x.data, index, axis)
    if source.data.shape != places.shape:
        raise ValueError(
            f"scatter_add: expected a source of the shape of index, {places.shape}, got "
            f"{source.data.shape}"
        )
    sums = added(x.data.shape, places, source.data, widened(x.data))
    edges = (x, lambda grad: grad), (source, lambda grad: grad.reshape(-1)[places])
    return record(narrowed(sums, x.data), *edges)


def embedding(weight: Input, indices: Input, padding_idx: int | None = None) -> Variable:
    """Return the rows of ``weight [rows, dim]`` that ``indices [...]`` name: ``[..., dim]``.

    A row collects the gradients of all its uses, but for row ``padding_idx``, which gets none.

    Raises:
        TypeError: the indices are no integers.
        ValueError: another shape of the weight, no index, or ``padding_idx`` is out of range.
        IndexError: an index is out of range.
    """
    weight = as_variable(weight)
    if weight.data.ndim != 2:
        raise ValueError(f"embedding: expected a weight [rows, dim], got {weight.data.shape}")
    rows, dim = weight.data.shape
    if padding_idx is not None and not -rows <= padding_idx < rows:
        raise ValueError(f"embedding: padding_idx {padding_idx} is none of {rows} rows")
    index = integers("embedding", indices, weight.data)
    check_filled("embedding", index)
    index = _in_range("embedding", index, weight.data.shape, 0)

    def vjp(grad: Array) -> Array:
        native = kernel("add_rows", grad)
        if native is not None:
            sizes, grad = (index.size, dim, rows), contiguous(grad)
            sums = native((((rows, dim), grad.dtype),), sizes, (), grad, index)
        else:
            places = index.reshape(-1, 1) * dim + array_module(grad).arange(dim)
            sums = added((rows, dim), places, grad)
        if padding_idx is not None:
            sums[padding_idx] = 0
        return sums  # type: ignore[no-any-return]

    native, table = kernel("take_rows", weight.data), weight.data
    if native is None:
        out = table[index]
    else:
        made = (((*index.shape, dim), table.dtype),)
        out = native(made, (index.size, dim, rows), (), contiguous(table), index)
    return record(out, (weight, vjp))


def topk(x: Input, k: int, axis: int = -1) -> tuple[Variable, Variable]:
    """Return the ``k`` largest elements along ``axis``, largest first, and their int64 indices.

    Both have ``x``'s shape with ``k`` along ``axis``. Of equal ones the first counts as larger; nan
    counts as smallest.

    Raises:
        ValueError: there are fewer than ``k``, ``k`` is negative, or there is no such axis.
    """
    x = as_variable(x)
    array = x.data
    if not -array.ndim <= axis < array.ndim or not 0 <= k <= array.shape[axis]:
        raise ValueError(f"topk: there are no {k} along axis {axis} of shape {array.shape}")
    before = (slice(None),) * (axis % array.ndim)
    falling = ~array if array.dtype.kind in "iub" else -array  # the negative of least ones wraps
    order = array_module(array).argsort(falling, axis=axis, kind="stable")
    index = order[(*before, slice(k))]
    return _gather(x, _flat(index, array, axis)), Variable(index)


def sort(x: Input, axis: int = -1) -> Variable:
    """Return the elements along ``axis`` in rising order, nan last.

    Raises:
        ValueError: there is no such axis.
    """
    x = as_variable(x)
    if axis not in range(-x.ndim, x.ndim):
        raise ValueError(f"sort: there is no axis {axis} of shape {x.shape}")
    order = array_module(x.data).argsort(x.data, axis=axis, kind="stable")
    return _gather(x, _flat(order, x.data, axis))


def pad(x: Input, pad_width: Any, mode: str = "constant", constant_values: Any = 0) -> Variable:
    """Return ``x`` with elements before and after each dimension, of ``numpy.pad``'s arguments.

    Modes are ``"constant"``, and ``"edge"``, ``"reflect"``, ``"symmetric"`` and ``"wrap"``, which
    copy elements of ``x``.

    Raises:
        ValueError: another mode, or a width that is negative or does not fit.
    """
    x = as_variable(x)
    array, shape = x.data, x.shape
    xp = array_module(array)
    if mode not in ("constant", "edge", "reflect", "symmetric", "wrap"):
        raise ValueError(f"pad: there is no mode {mode!r}, but constant, edge, reflect and others")
    if mode != "constant":
        places = np.pad(np.arange(x.size).reshape(shape), pad_width, mode)  # type: ignore[call-overload]
        return _gather(x, xp.asarray(places))
    out = xp.pad(array, pad_width, constant_values=constant_values)
    before = np.broadcast_to(pad_width, (x.ndim, 2))[:, 0].tolist()
    inside = tuple(slice(k, k + n) for k, n in zip(before, shape, strict=True))
    return record(out, (x, lambda grad: grad[inside]))


def _beside(value: Input, array: Array) -> Array:
    """Return what picks elements as an array where ``array`` is."""
    value = value.data if isinstance(value, Variable) else value
    if is_cupy(array) == is_cupy(value) and hasattr(value, "dtype"):
        return value
    return array_module(array).asarray(value)  # type: ignore[no-any-return]


def integers(name: str, value: Input, array: Array) -> Array:
    """Return indices where ``array`` is, or raise a TypeError of the function ``name``."""
    index = _beside(value, array)
    if index.dtype.kind not in "iu":
        raise TypeError(f"{name}: indices must be integers, got {index.dtype}; cast them")
    return index


def _in_range(name: str, index: Array, shape: tuple[int, ...], axis: int) -> Array:
    """Return a checked copy, int64 and contiguous, as users may overwrite ``index`` later."""
    copy, given = index.astype("int64", order="C"), index.shape
    require(
        copy.view("uint64") < shape[axis],  # negative integers become large
        index,
        lambda wrong: IndexError(
            f"{name}: expected indices of 0..{shape[axis] - 1} for axis {axis} of shape {shape}, "
            f"got index {wrong} in shape {given}"
        ),
    )
    return copy


def _places(name: str, array: Array, index: Input, axis: int) -> Array:
    """Return where the elements are that :func:`gather` picks, in row-major order."""
    index, ndim = integers(name, index, array), array.ndim
    fits = -ndim <= axis < ndim and index.ndim == ndim
    sizes = list(zip(index.shape, array.shape, strict=False))
    if not fits or any(n > most for d, (n, most) in enumerate(sizes) if d != axis % ndim):
        raise ValueError(
            f"{name}: an index for shape {array.shape} along axis {axis} needs as many dimensions, "
            f"none longer but along the axis, got {index.shape}"
        )
    return _flat(_in_range(name, index, array.shape, axis), array, axis)


def _flat(index: Array, array: Array, axis: int) -> Array:
    xp, shape, ndim = array_module(index), array.shape, array.ndim
    flat = index * math.prod(shape[axis % ndim + 1 :])
    for d, count in enumerate(index.shape):
        if d != axis % ndim and shape[d] > 1:
            steps = xp.arange(count) * math.prod(shape[d + 1 :])
            flat = flat + steps.reshape(-1, *(1,) * (ndim - d - 1))
    return flat


def added(shape: Any, places: Array, source: Array, start: Array | None = None) -> Array:
    """Return ``start`` (None: zeros) of that shape with ``source`` added at flat ``places``."""
    xp = array_module(source)
    wide = widened(source)
    sums = xp.zeros(math.prod(shape), wide.dtype) if start is None else start.reshape(-1).copy()
    xp.add.at(sums, places.reshape(-1), wide.reshape(-1))  # by one dimension NumPy is fast
    return sums.reshape(shape)
