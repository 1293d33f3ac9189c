"""Functions over dimensions: other shapes, parts, reductions and matrix products.

``axis`` is a dimension, several, or None for all; negative ones count from the end. A dimension
that does not exist, or is named twice, is a ValueError. Reductions are new arrays; with
``keepdims`` the reduced dimensions stay, of size 1.
"""

from __future__ import annotations

import builtins
import math
import string
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

from flashlight_py import device, kernels
from flashlight_py.autograd.engine import GradSink
from flashlight_py.autograd.functions import elementwise
from flashlight_py.autograd.functions.elementwise import as_pair, as_variable, mul, slope_of_relu
from flashlight_py.autograd.graph import Vjp
from flashlight_py.autograd.precision import as_float32, as_half, here, real
from flashlight_py.autograd.variable import (
    Input,
    Operand,
    Variable,
    record,
    record_all,
    record_pair,
)
from flashlight_py.device import NARROW, Array, array_module, is_cupy, narrowed, total, widened

Axis: TypeAlias = int | Sequence[int] | None


def reshape(x: Input, shape: int | Sequence[int]) -> Variable:
    """Return ``x`` with another shape of as many elements, else a ValueError; a view if possible.

    One entry of ``shape`` may be -1 and is then computed.
    """
    x = as_variable(x)
    old = x.data.shape
    return record(x.data.reshape(shape), (x, lambda grad: grad.reshape(old)))


moddims = reshape  # flashlight's name


def flat(x: Input) -> Variable:
    """Return ``x`` as one dimension, in row-major order; a view of its array where possible."""
    return reshape(x, -1)


def squeeze(x: Input, axis: Axis = None) -> Variable:
    """Return ``x`` without dimensions ``axis`` (None: all) of size 1, else a ValueError; a view."""
    x = as_variable(x)
    return reshape(x, x.data.squeeze(None if axis is None else _axes(axis, x.ndim)).shape)


def expand_dims(x: Input, axis: int | Sequence[int]) -> Variable:
    """Return ``x`` with new dimensions of size 1, at ``axis`` of the result; a view."""
    x = as_variable(x)
    axes = _axes(axis, x.ndim + (len(axis) if hasattr(axis, "__len__") else 1))
    sizes = iter(x.shape)
    return reshape(x, [1 if a in axes else next(sizes) for a in range(x.ndim + len(axes))])


def flip(x: Input, axis: Axis = None) -> Variable:
    """Return ``x`` with the elements along ``axis`` in reverse order; a view of its array."""
    x = as_variable(x)
    axes = _axes(axis, x.ndim)
    return index(x, tuple(slice(None, None, -1 if a in axes else 1) for a in range(x.ndim)))


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
    """Return the variables joined along the existing dimension ``axis``, as a new array.

    They have equal shapes except along ``axis``.

    Raises:
        ValueError: no variables, or shapes that do not fit.
    """
    if not variables:
        raise ValueError("concatenate needs at least one variable, got none")
    given = [as_variable(variable) for variable in variables]
    arrays = [variable.data for variable in given]
    joined = array_module(arrays[0]).concatenate(arrays, axis=axis)
    before = (slice(None),) * (axis % joined.ndim)
    ends = accumulate((array.shape[axis] for array in arrays), initial=0)
    parts = [(*before, slice(start, stop)) for start, stop in pairwise(ends)]
    vjps = [lambda grad, part=part: grad[part] for part in parts]
    return record(joined, *zip(given, vjps, strict=True))


def stack(variables: Sequence[Input], axis: int = 0) -> Variable:
    """Return the variables joined along a new dimension, ``axis`` of the result, as a new array.

    Raises:
        ValueError: no variables, unequal shapes, or no such axis.
    """
    variables = [as_variable(each) for each in variables]
    shapes = [each.shape for each in variables]
    if len(set(shapes)) != 1:
        raise ValueError(f"stack: expected variables of one shape, got {shapes}")
    return concatenate([expand_dims(each, axis) for each in variables], axis)


def split(x: Input, sections: int | Sequence[int], axis: int = 0) -> list[Variable]:
    """Return the parts of ``x`` along ``axis``, in order; views of its array.

    ``sections`` is the number of equal parts, as in NumPy, or the size of each part, as in torch.

    Raises:
        ValueError: the parts do not add up to the length along ``axis``, or no such axis.
    """
    x = as_variable(x)
    (place,) = _axes(axis, x.data.ndim)
    length = x.data.shape[place]
    if isinstance(sections, int):
        sizes = [length // builtins.max(sections, 1)] * sections
    else:
        sizes = list(sections)
    ends = [*accumulate(sizes, initial=0)]
    if ends[-1] != length or builtins.min(sizes, default=-1) < 0:
        raise ValueError(f"split: {length} along axis {axis} cannot be cut into {sections}")
    before = (slice(None),) * place
    return [index(x, (*before, slice(start, stop))) for start, stop in pairwise(ends)]


def tile(x: Input, repeats: int | Sequence[int]) -> Variable:
    """Return ``x`` repeated as ``repeats`` say for each dimension, with NumPy's rules; a new array.

    ``repeats`` belong to the last dimensions; ``x`` gets more in front if there are more of them. A
    negative number is a ValueError.
    """
    x = as_variable(x)
    array, shape = x.data, x.data.shape
    counts = (repeats,) if isinstance(repeats, int) else tuple(repeats)
    ndim = builtins.max(len(counts), len(shape))
    counts, sizes = (1,) * (ndim - len(counts)) + counts, (1,) * (ndim - len(shape)) + shape
    apart = [number for pair in zip(counts, sizes, strict=True) for number in pair]
    copies = tuple(range(0, 2 * ndim, 2))
    out = array_module(array).tile(array, counts)
    return record(out, (x, lambda grad: total(grad.reshape(apart), copies).reshape(shape)))


def index(x: Input, where: Any) -> Variable:
    """Return ``x[where]`` with NumPy's rules; a view for slices and numbers, else a copy.

    An element that is picked more than once collects the gradients of all its copies. Integer and
    Boolean variables in ``where`` count as arrays. An index out of range is an IndexError.
    """
    x = as_variable(x)
    array = x.data
    where = _as_index(where, array)
    parts = where if isinstance(where, tuple) else (where,)
    basic = all(p is None or p is Ellipsis or isinstance(p, (int, slice)) for p in parts)

    def x_vjp(grad: Array) -> Array:
        xp = array_module(array)
        grad = grad if basic else widened(grad)
        spread: Array = xp.zeros(array.shape, grad.dtype)
        if basic:
            spread[where] = grad
        else:
            xp.add.at(spread, where, grad)
        return spread

    return record(array[where], (x, x_vjp))


def _as_index(where: Any, array: Array) -> Any:
    """Return an index whose arrays, variables' included, are copies where ``array`` is."""
    if isinstance(where, tuple):
        return tuple(_as_index(part, array) for part in where)
    if isinstance(where, Variable):
        where = where.data
    return array_module(array).array(where) if hasattr(where, "__array__") else where


def astype(x: Input, dtype: Any) -> Variable:
    """Return ``x`` cast to ``dtype``, as a new array; its gradient has ``x``'s dtype.

    ``"bfloat16"`` is the dtype of ml_dtypes. A result that is not floating has no gradient.
    """
    x = as_variable(x)
    array = x.data.astype(device.bfloat16() if dtype == "bfloat16" else dtype)
    if not device.is_floating(array.dtype):
        return Variable(array)
    return record(array, (x, lambda grad: grad))


def sum(x: Input, axis: Axis = None, keepdims: bool = False) -> Variable:
    """Return the sum over ``axis``; a missing or repeated dimension is a ValueError."""
    x = as_float32(x)
    array = x.data
    axes = _axes(axis, array.ndim)
    out = narrowed(total(array, axes, keepdims), array)
    return record(out, (x, lambda grad: _spread(grad, axes, array.shape)))


def mean(x: Input, axis: Axis = None, keepdims: bool = False) -> Variable:
    """Return the mean over ``axis``; of no element it is a ValueError."""
    x = as_float32(x)
    array = x.data
    axes = _axes(axis, array.ndim)
    count = _count(array.shape, axes, "mean")
    if array.dtype.char in NARROW:
        out = narrowed(total(array, axes, keepdims) / count, array)
    else:
        out = array.mean(axis=axes, keepdims=keepdims)
    return record(out, (x, lambda grad: _spread(widened(grad) / count, axes, array.shape)))


def var(x: Input, axis: Axis = None, keepdims: bool = False, ddof: int = 0) -> Variable:
    """Return the variance over ``axis``: the squared deviations' sum divided by ``n - ddof``.

    ``n <= ddof`` is a ValueError.
    """
    deviation, count = _deviation("var", x, axis, ddof)
    return mul(mean(mul(deviation, deviation), axis, keepdims), count / (count - ddof))


def std(x: Input, axis: Axis = None, keepdims: bool = False, ddof: int = 0) -> Variable:
    """Return the square root of :func:`var`, with its errors; the slope of 0 is 0."""
    deviation, count = _deviation("std", x, axis, ddof)
    return norm(mul(deviation, (count - ddof) ** -0.5), 2, axis, keepdims)


def _deviation(name: str, x: Input, axis: Axis, ddof: int) -> tuple[Variable, int]:
    x = as_float32(x)
    axes = _axes(axis, x.data.ndim)
    count = _count(x.data.shape, axes, name)
    if count <= ddof:
        raise ValueError(f"{name}: needs more than ddof ({ddof}) elements, got {count}")
    return elementwise.sub(x, mean(x, axes, keepdims=True)), count


def prod(x: Input, axis: Axis = None, keepdims: bool = False) -> Variable:
    """Return the product over ``axis``."""
    x = as_float32(x)
    array, axes = widened(x.data), _axes(axis, x.data.ndim)
    xp = array_module(array)

    def slope() -> Any:  # the product of all other elements
        is_zero = array == 0
        rest = xp.where(is_zero, 1, array)
        product = rest.prod(axis=axes, keepdims=True) / rest
        return xp.where(is_zero.sum(axis=axes, keepdims=True) > is_zero, 0, product)

    return _reduction(x, array.prod(axis=axes, keepdims=True), axes, keepdims, slope)


def logsumexp(x: Input, axis: Axis = None, keepdims: bool = False) -> Variable:
    """Return ``log(sum(exp(x)))`` over ``axis``; of no element it is a ValueError."""
    x = real(as_float32(x))
    array, axes = widened(x.data), _axes(axis, x.data.ndim)
    xp, top = array_module(array), array.max(axis=axes, keepdims=True)
    powers = xp.exp(array - xp.where(xp.isfinite(top), top, 0))
    sums = xp.maximum(powers.sum(axis=axes, keepdims=True), 1)  # less if all are -inf
    return _reduction(x, top + xp.log(sums), axes, keepdims, lambda: powers / sums)


def _reduction(
    x: Variable, found: Array, axes: tuple[int, ...], keepdims: bool, slope: Callable[[], Any]
) -> Variable:
    def vjp(grad: Array) -> Any:
        return _spread(widened(grad), axes, x.data.shape) * slope()

    vjp.__qualname__ = slope.__qualname__  # which is in errors
    out = narrowed(found, x.data)
    return record(out if keepdims else out.squeeze(axes), (x, vjp))


def norm(x: Input, p: float = 2, axis: Axis = None, keepdims: bool = False) -> Variable:
    """Return ``sum(abs(x) ** p) ** (1 / p)`` over ``axis``: the vector norm of order ``p``.

    For ``p`` infinite it is the largest absolute value. The slope is 0 where an element is 0.

    Raises:
        ValueError: ``p`` is below 1.
    """
    if not p >= 1:
        raise ValueError(f"norm: p must be at least 1, got {p}")
    x = as_float32(x)
    if p == math.inf:
        return max(elementwise.abs(x), axis, keepdims)
    array, axes = widened(x.data), _axes(axis, x.data.ndim)
    xp = array_module(array)
    powers = array * array if p == 2 else xp.abs(array) ** p
    found = total(powers, axes, keepdims=True)
    found = xp.sqrt(found) if p == 2 else found ** (1 / p)

    def slope() -> Any:
        share = array / xp.where(found == 0, 1, found)
        return share if p == 2 else xp.sign(share) * xp.abs(share) ** (p - 1)

    return _reduction(x, found, axes, keepdims, slope)


def cumsum(x: Input, axis: int) -> Variable:
    """Return the sums up to each element along ``axis``, new; no such axis is a ValueError."""
    x = as_float32(x)
    (place,) = _axes(axis, x.data.ndim)
    back = (*(slice(None),) * place, slice(None, None, -1))
    out = narrowed(widened(x.data).cumsum(place), x.data)
    return record(out, (x, lambda grad: widened(grad)[back].cumsum(place)[back]))


def max(x: Input, axis: Axis = None, keepdims: bool = False) -> Variable:
    """Return the largest element over ``axis``; equal ones share the gradient evenly.

    Of no element it is a ValueError.
    """
    return _extremum("max", as_variable(x), axis, keepdims)


def min(x: Input, axis: Axis = None, keepdims: bool = False) -> Variable:
    """Return the smallest element over ``axis``, as :func:`max` the largest one."""
    return _extremum("min", as_variable(x), axis, keepdims)


def _extremum(name: str, x: Variable, axis: Axis, keepdims: bool) -> Variable:
    array, axes = x.data, _axes(axis, x.data.ndim)
    best = getattr(array, name)(axis=axes, keepdims=True)

    def slope() -> Any:
        winners = array == best
        shares = winners / winners.sum(axis=axes, keepdims=True)
        return shares.astype(widened(best).dtype)

    return _reduction(x, best.copy(), axes, keepdims, slope)


def _axes(axis: Axis, ndim: int) -> tuple[int, ...]:
    """Return the dimensions to reduce as numbers of 0 .. ndim - 1."""
    if axis is None:
        return tuple(range(ndim))
    named = tuple(axis) if hasattr(axis, "__iter__") else (axis,)
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


def linear(x: Input, weight: Input, bias: Input | None = None) -> Variable:
    """Return ``x @ weight.T + bias``, a new variable of shape ``[..., out]``.

    On the CPU float16 and bfloat16 are multiplied and summed in float32, and rounded once. ``x``
    has shape ``[..., in]``, ``weight`` ``[out, in]``, and ``bias`` ``[out]``; shapes that do not
    fit are a ValueError.
    """
    return _linear(x, weight, bias, False)


def linear_relu(x: Input, weight: Input, bias: Input | None = None) -> Variable:
    """Return ``max(linear(x, weight, bias), 0)``, a new variable, by one operation.

    Arguments and errors are those of :func:`linear`. On a GPU one launch does both.
    """
    return _linear(x, weight, bias, True)


def _linear(x: Input, weight: Input, bias: Input | None, with_relu: bool) -> Variable:
    x = x if isinstance(x, Variable) else Variable(x)
    weight = weight if isinstance(weight, Variable) else Variable(weight)
    if bias is not None and not isinstance(bias, Variable):
        bias = Variable(bias)
    if here.dtype is not None:
        x, weight, bias = as_half(x), as_half(weight), None if bias is None else as_half(bias)
    rows, w = x.data, weight.data
    if rows.ndim != 2 or w.ndim != 2:
        *outer, features = rows.shape or (-1,)
        if w.ndim != 2 or features != w.shape[1]:
            raise _misfit(rows, w)
        flat = reshape(x, (math.prod(outer), features))
        return reshape(_linear(flat, weight, bias, with_relu), (*outer, len(w)))
    # NumPy's own product of float16 is a loop; a GPU multiplies it, and sums in float32.
    is_narrow = w.dtype.char in NARROW and not is_cupy(w)
    try:
        out = widened(rows).dot(widened(w).T) if is_narrow else rows.dot(w.T)
    except ValueError:
        if rows.shape[1] == w.shape[1]:
            raise
        raise _misfit(rows, w) from None
    if bias is not None and bias.data.shape != out.shape[1:]:
        raise ValueError(
            f"linear: expected bias of shape ({len(w)},) for a weight of shape {w.shape}, "
            f"got {bias.data.shape}"
        )
    slope: Vjp | None = None
    if with_relu:
        slope = _add_bias_and_relu(out, bias)
    elif bias is not None:
        out += bias.data
    if is_narrow:
        out = narrowed(out, rows)
        narrow_slope = slope_of_relu(out, 0)
        slope = (lambda grad: widened(narrow_slope(grad))) if with_relu else widened
    kept = w if weight.placement is None else None  # a sharded one is read again in the end

    def weight_vjp(grad: Array) -> Any:
        buffer = weight.buffer
        if buffer is None or is_narrow:
            return grad.T.dot(widened(rows) if is_narrow else rows)
        if isinstance(buffer, GradSink):
            return buffer.product(weight, grad.T, rows)
        # The first contribution is written to where it belongs, if it can be.
        fits = weight.grad is None and buffer.flags.c_contiguous
        fits = fits and grad.dtype == rows.dtype == weight.dtype
        return grad.T.dot(rows, out=buffer if fits else None)

    def bias_vjp(grad: Array) -> Any:
        if len(grad) == 1:
            return grad[0]  # a view is ten times cheaper than a sum
        return total(grad, 0) if grad.dtype.char in NARROW else grad.sum(0)

    def x_vjp(grad: Array) -> Any:
        w = weight.data if kept is None else kept
        return grad.dot(widened(w) if is_narrow else w)

    # The parameters come first: their hooks fire while the input's gradient is still to compute.
    edges: list[tuple[Variable, Vjp]] = [(weight, weight_vjp), (x, x_vjp)]
    if bias is not None:
        edges.insert(1, (bias, bias_vjp))
    return record_all(out, edges, slope)


def _add_bias_and_relu(out: Array, bias: Variable | None) -> Vjp:
    """Make ``out`` the larger of ``out + bias`` and 0, in place; return the slope of the latter."""
    zero = device.constant(0, out)
    if bias is not None and is_cupy(out) and bias.data.dtype == out.dtype:
        kernels.add_bias_relu(out, bias.data)
    else:
        if bias is not None:
            out += bias.data
        array_module(out).maximum(out, zero, out=out)
    return slope_of_relu(out, zero)


def _misfit(rows: Array, w: Array) -> ValueError:
    if w.ndim != 2:
        return ValueError(f"linear: expected a weight of shape [out, in], got {w.shape}")
    return ValueError(
        f"linear: expected input of shape [..., {w.shape[1]}] for a weight of shape {w.shape}, "
        f"got {rows.shape}"
    )


def matmul(a: Operand, b: Operand) -> Variable:
    """Return ``a @ b`` with NumPy's rules, as a new array; of narrow dtypes as :func:`linear`.

    ``a`` has shape ``[..., n, k]``, or ``[k]``, a row; ``b`` ``[..., k, m]``, or ``[k]``, a column.
    Leading dimensions broadcast. The result, ``[..., n, m]``, lacks that of a row or column.

    Raises:
        ValueError: the inner sizes differ, or an operand has no dimensions.
    """
    x, y = map(as_half, as_pair(a, b))
    if not x.data.ndim or not y.data.ndim:
        raise ValueError(f"matmul: needs dimensions, got shapes {x.shape} and {y.shape}")
    row = x if x.data.ndim > 1 else reshape(x, (1, -1))
    column = y if y.data.ndim > 1 else reshape(y, (-1, 1))
    out = _matmul(row, column)
    if row is x and column is y:
        return out
    *outer, n, m = out.data.shape
    return reshape(out, (*outer, *([n] if row is x else []), *([m] if column is y else [])))


def _matmul(x: Variable, y: Variable) -> Variable:
    # Sharded operands are read again in the backward pass, not kept.
    p = x.data if x.placement is None else None
    q = y.data if y.placement is None else None
    # Narrow ones are computed in float32, and widened once more in the backward pass.
    is_narrow = x.data.dtype.char in NARROW and not is_cupy(x.data)
    wide: Any = widened if is_narrow else lambda array: array
    out = wide(x.data) @ wide(y.data)
    return record_pair(
        narrowed(out, x.data) if is_narrow and y.data.dtype.char in NARROW else out,
        *(x, lambda grad: grad @ wide(y.data if q is None else q).swapaxes(-1, -2)),
        *(y, lambda grad: wide(x.data if p is None else p).swapaxes(-1, -2) @ grad),
        through=widened if is_narrow else None,
    )


def einsum(subscripts: str, *operands: Input) -> Variable:
    """Return the sum of products that ``subscripts`` describe, with NumPy's rules, a new array.

    Such as ``"bij,bjk->bik"`` or ``"...ii->...i"``, with an operand for each term before the arrow.
    Letters that are repeated take the diagonal, those that the result lacks are summed over, and an
    ellipsis stands for dimensions that broadcast. Without ``->`` the result has the letters that
    occur once, in the order of the alphabet, after the ellipsis. Subscripts that cannot be read, or
    do not fit the operands' shapes, are a ValueError.
    """
    given = [as_half(operand) for operand in operands]
    terms, result, sizes = _read_subscripts(subscripts, [each.data.shape for each in given])
    arrays, used = [], []
    for variable, term in zip(given, terms, strict=True):  # without what is to be stretched
        own = [x for x, n in zip(term, variable.data.shape, strict=True) if n == sizes[x]]
        arrays.append(widened(variable.data).reshape([sizes[x] for x in own]))
        used.append("".join(own))

    def vjp(place: int, grad: Array) -> Any:
        """Return an operand's gradient: the same sum, with ``grad`` in its place.

        A letter of it alone was summed over: its elements have equal gradients, 0 off a diagonal.
        """
        xp, operands, others = array_module(grad), list(arrays), list(used)
        operands[place], others[place] = widened(grad), result
        term, letters = used[place], "".join(dict.fromkeys(used[place]))
        own = "".join(x for x in letters if x in "".join(others))
        found = xp.einsum(f"{','.join(others)}->{own}", *operands, optimize=True)
        if len(own) < len(letters):
            found = found.reshape([sizes[x] if x in own else 1 for x in letters])
            found = xp.broadcast_to(found, [sizes[x] for x in letters])
        if len(letters) < len(term):
            spread = xp.zeros([sizes[x] for x in term], found.dtype)
            behind = enumerate(reversed(letters))
            along = {x: xp.arange(sizes[x]).reshape(-1, *(1,) * k) for k, x in behind}
            spread[tuple(along[x] for x in term)] = found
            found = spread
        return found.reshape(given[place].data.shape)

    xp = array_module(arrays[0])
    out = xp.einsum(f"{','.join(used)}->{result}", *arrays, optimize=True)
    vjps = [lambda grad, place=place: vjp(place, grad) for place in range(len(given))]
    return record(narrowed(out, given[0].data), *zip(given, vjps, strict=True))


def _read_subscripts(
    subscripts: str, shapes: Sequence[tuple[int, ...]]
) -> tuple[list[str], str, dict[str, int]]:
    """Return the operands' letters and the result's, one a dimension, and how long each is."""
    before, arrow, result = subscripts.replace(" ", "").partition("->")
    terms = before.split(",")
    wrong = f"einsum: {subscripts!r} does not fit operands of shapes {list(shapes)}: "
    if len(terms) != len(shapes):
        raise ValueError(f"{wrong}it has {len(terms)} terms")
    free = [letter for letter in string.ascii_letters if letter not in subscripts]
    bare = [term.replace("...", "") for term in terms]
    counts = [len(shape) - len(own) for shape, own in zip(shapes, bare, strict=True)]
    for count, term in zip(counts, terms, strict=True):
        if count < 0 or (count and "..." not in term):
            raise ValueError(f"{wrong}{term!r} has another number of dimensions")
    most = builtins.max(counts)  # those without an ellipsis have 0
    dots = "".join(free[:most])
    full = [term.replace("...", dots[most - n :]) for n, term in zip(counts, terms, strict=True)]
    sizes: dict[str, int] = {}
    for term, shape in zip(full, shapes, strict=True):
        for letter, n in zip(term, shape, strict=True):
            if n != sizes.setdefault(letter, n) and 1 not in (n, sizes[letter]):
                raise ValueError(f"{wrong}{letter!r} stands for {sizes[letter]} and {n}")
            sizes[letter] = n if sizes[letter] == 1 else sizes[letter]
    if not arrow:
        result = "..." + "".join(sorted(x for x in sizes if "".join(bare).count(x) == 1))
    result = result.replace("...", dots)
    if len(set(result)) < len(result) or not sizes.keys() >= set(result):
        raise ValueError(f"{wrong}{result!r} has a letter twice, or one that no operand has")
    return full, result, sizes
