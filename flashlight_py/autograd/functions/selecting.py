"""Selection of elements by a condition or by indices, and scatter_add.

Indices are integer arrays or variables. They must be in range, and negative indices are not
allowed. Results are new arrays.
"""

import math
from functools import partial
from typing import Any

import numpy as np

from flashlight_py.autograd.functions.elementwise import as_pair, as_variable, check_filled
from flashlight_py.autograd.native import kernel
from flashlight_py.autograd.variable import Input, Operand, Variable, record, record_pair
from flashlight_py.device import Array, array_module, as_packed, is_cupy, narrowed, widened
from flashlight_py.structure import require_all

_PAD_MODES = "constant", "edge", "reflect", "symmetric", "wrap"


def where(condition: Input, a: Operand, b: Operand) -> Variable:
    """Return ``a`` where ``condition`` is True, else ``b``, elementwise with broadcasting.

    At least one of ``a`` and ``b`` is a variable. The other may be an array or a number.

    Raises:
        TypeError: If the condition is not Boolean, or if neither ``a`` nor ``b`` is a variable.
        ValueError: If the shapes do not broadcast.
    """
    x, y = as_pair(a, b)
    holds = _beside(condition, x.data)
    if holds.dtype != bool:
        raise TypeError(f"where: condition must have dtype bool, got {holds.dtype}")
    pick = partial(array_module(holds).where, holds)
    out = pick(x.data, y.data)
    return record_pair(out, x, lambda grad: pick(grad, 0), y, lambda grad: pick(0, grad))


def gather(x: Input, index: Input, axis: int) -> Variable:
    """Return the elements of ``x`` at positions ``index`` along ``axis``, as in torch.

    For 2-D arrays and ``axis`` 0: ``result[i, j] = x[index[i, j], j]``. If an element is read
    several times, its gradients are summed. ``index`` has as many dimensions as ``x``, and is not
    longer than ``x`` in dimensions other than ``axis``. The result has the shape of ``index``.

    Raises:
        TypeError: If the dtype of ``index`` is not an integer dtype.
        ValueError: If the shapes do not fit, or if the axis does not exist.
        IndexError: If an element of ``index`` is out of range.
    """
    x = as_variable(x)
    return _gather(x, _places("gather", x.data, index, axis))


def _gather(x: Variable, positions: Array) -> Variable:
    shape = x.data.shape
    return record(x.data.reshape(-1)[positions], (x, lambda grad: added(shape, positions, grad)))


def scatter_add(x: Input, index: Input, source: Input, axis: int) -> Variable:
    """Return ``x`` plus ``source`` at positions ``index`` along ``axis``, as in torch.

    For 2-D arrays and ``axis`` 0: ``result[index[i, j], j] += source[i, j]``, in the order of
    ``source``. ``source`` has the shape of ``index``. See :func:`gather` for other arguments and
    errors.
    """
    x, source = as_variable(x), as_variable(source)
    positions = _places("scatter_add", x.data, index, axis)
    if source.data.shape != positions.shape:
        raise ValueError(
            f"scatter_add: expected a source of the index's shape {positions.shape}, got "
            f"{source.data.shape}"
        )
    sums = added(x.data.shape, positions, source.data, widened(x.data))
    edges = (x, lambda grad: grad), (source, lambda grad: grad.reshape(-1)[positions])
    return record(narrowed(sums, x.data), *edges)


def embedding(weight: Input, indices: Input, padding_idx: int | None = None) -> Variable:
    """Return the rows of ``weight [rows, dim]`` at ``indices [...]``, with shape ``[..., dim]``.

    The gradients of all uses of a row are summed. Row ``padding_idx`` gets no gradient.

    Raises:
        TypeError: If the indices are not integers.
        ValueError: If the weight's shape or ``padding_idx`` is invalid, or there are no indices.
        IndexError: If an index is out of range.
    """
    weight = as_variable(weight)
    if weight.data.ndim != 2:
        raise ValueError(f"embedding: expected a weight [rows, dim], got {weight.data.shape}")
    rows, dim = weight.data.shape
    if padding_idx is not None and not -rows <= padding_idx < rows:
        raise ValueError(f"embedding: padding_idx must be in [-{rows}, {rows}), got {padding_idx}")
    index = integers("embedding", indices, weight.data)
    check_filled("embedding", index)
    index = _in_range("embedding", index, weight.data.shape, 0)

    def vjp(grad: Array) -> Array:
        native = kernel("add_rows", grad)
        if native is not None:
            sizes, grad = (index.size, dim, rows), as_packed(grad)
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
        out = native(made, (index.size, dim, rows), (), as_packed(table), index)
    return record(out, (weight, vjp))


def topk(x: Input, k: int, axis: int = -1) -> tuple[Variable, Variable]:
    """Return the ``k`` largest elements along ``axis``, largest first, and their int64 indices.

    They have the shape of ``x`` with length ``k`` along ``axis``. Of equal elements the first
    counts as larger. nan counts as the smallest.

    Raises:
        ValueError: If ``k`` is negative or exceeds the length, or if the axis does not exist.
    """
    x = as_variable(x)
    array = x.data
    if not -array.ndim <= axis < array.ndim or not 0 <= k <= array.shape[axis]:
        raise ValueError(f"topk: k must be 0 to the axis size, got {k=}, {axis=}, {array.shape=}")
    before = (slice(None),) * (axis % array.ndim)
    falling = ~array if array.dtype.kind in "iub" else -array  # -array would overflow
    index = array_module(array).argsort(falling, axis=axis, kind="stable")[(*before, slice(k))]
    return _gather(x, _flat(index, array, axis)), Variable(index)


def sort(x: Input, axis: int = -1) -> Variable:
    """Return the elements along ``axis`` in ascending order, with nan last.

    Raises:
        ValueError: If the axis does not exist.
    """
    x = as_variable(x)
    if axis not in range(-x.ndim, x.ndim):
        raise ValueError(f"sort: axis must be a dimension of shape {x.shape}, got {axis}")
    order = array_module(x.data).argsort(x.data, axis=axis, kind="stable")
    return _gather(x, _flat(order, x.data, axis))


def pad(x: Input, pad_width: Any, mode: str = "constant", constant_values: Any = 0) -> Variable:
    """Return ``x`` with elements added around each dimension. Arguments are as in ``numpy.pad``.

    ``mode`` is ``"constant"``, or a mode that copies elements of ``x``: ``"edge"``, ``"reflect"``,
    ``"symmetric"`` or ``"wrap"``.

    Raises:
        ValueError: If the mode is unknown, or if a width is negative or does not fit.
    """
    x = as_variable(x)
    array, shape = x.data, x.shape
    xp = array_module(array)
    if mode not in _PAD_MODES:
        raise ValueError(f"pad: mode must be one of {', '.join(_PAD_MODES)}, got {mode!r}")
    if mode != "constant":
        places = np.pad(np.arange(x.size).reshape(shape), pad_width, mode)  # type: ignore[call-overload]
        return _gather(x, xp.asarray(places))
    out = xp.pad(array, pad_width, constant_values=constant_values)
    before = np.broadcast_to(pad_width, (x.ndim, 2))[:, 0].tolist()
    inside = tuple(slice(k, k + n) for k, n in zip(before, shape, strict=True))
    return record(out, (x, lambda grad: grad[inside]))


def _beside(value: Input, array: Array) -> Array:
    value = value.data if isinstance(value, Variable) else value
    if is_cupy(array) == is_cupy(value) and hasattr(value, "dtype"):
        return value
    return array_module(array).asarray(value)  # type: ignore[no-any-return]


def integers(name: str, value: Input, array: Array) -> Array:
    """Return ``value`` on the device of ``array``. Raises TypeError if it is not integer."""
    index = _beside(value, array)
    if index.dtype.kind not in "iu":
        raise TypeError(f"{name}: indices must be integers, got {index.dtype}. Cast them")
    return index


def _in_range(name: str, index: Array, shape: tuple[int, ...], axis: int) -> Array:
    """Return a contiguous int64 copy of ``index``. IndexError if a number is out of range."""
    copy, index_shape = index.astype("int64", order="C"), index.shape
    require_all(
        copy.view("uint64") < shape[axis],  # a negative number is a large uint64
        index,
        lambda wrong: IndexError(
            f"{name}: expected indices of 0..{shape[axis] - 1} for axis {axis} of shape {shape}, "
            f"got index {wrong} in an array of shape {index_shape}"
        ),
    )
    return copy


def _places(name: str, array: Array, index: Input, axis: int) -> Array:
    """Return the positions that :func:`gather` reads, as indices of the flattened ``array``."""
    index, ndim = integers(name, index, array), array.ndim
    fits = -ndim <= axis < ndim and index.ndim == ndim
    sizes = list(zip(index.shape, array.shape, strict=False))
    if not fits or any(n > most for d, (n, most) in enumerate(sizes) if d != axis % ndim):
        raise ValueError(
            f"{name}: expected an index of {ndim} dimensions, not longer than shape {array.shape} "
            f"except along axis {axis}, got {index.shape}"
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


def added(shape: Any, positions: Array, source: Array, start: Array | None = None) -> Array:
    """Return ``start`` (or zeros) in ``shape``, with ``source`` added at flat ``positions``."""
    xp = array_module(source)
    wide = widened(source)
    sums = xp.zeros(math.prod(shape), wide.dtype) if start is None else start.reshape(-1).copy()
    xp.add.at(sums, positions.reshape(-1), wide.reshape(-1))  # NumPy's add.at is fast in 1-D
    return sums.reshape(shape)
