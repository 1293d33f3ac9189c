"""Functions over dimensions: shapes, sections, reductions and matrix products.

``axis`` is one dimension, several dimensions, or None for all. Negative numbers count from the end.
ValueError is raised if a dimension does not exist or occurs twice. Reductions return new arrays.
With ``keepdims`` the reduced dimensions stay, with size 1.
"""

import builtins
import math
import string
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

from flashlight_py import device, kernels
from flashlight_py.autograd import variable
from flashlight_py.autograd.engine import GradSink
from flashlight_py.autograd.functions import elementwise
from flashlight_py.autograd.functions.elementwise import as_pair, as_variable, slope_of_relu
from flashlight_py.autograd.graph import Vjp
from flashlight_py.autograd.precision import active_precision, as_float32, as_floating, as_half
from flashlight_py.autograd.variable import Input, Operand, Variable, record, record_all
from flashlight_py.device import NARROW, Array, array_module, is_cupy, narrowed, total, widened

Axis: TypeAlias = int | Sequence[int] | None


def reshape(x: Input, shape: int | Sequence[int]) -> Variable:
    """Return ``x`` with another shape, as a view if possible.

    One entry of ``shape`` may be -1: this size is computed. Raises ValueError if the number of
    elements differs.
    """
    x = as_variable(x)
    old = x.data.shape
    return record(x.data.reshape(shape), (x, lambda grad: grad.reshape(old)))


moddims = reshape  # name in flashlight


def flat(x: Input) -> Variable:
    """Return ``x`` as one dimension, in row-major order, as a view if possible."""
    return reshape(x, -1)


def squeeze(x: Input, axis: Axis = None) -> Variable:
    """Return a view without dimensions ``axis``, which must have size 1. Default: all of size 1."""
    x = as_variable(x)
    return reshape(x, x.data.squeeze(None if axis is None else _axes(axis, x.ndim)).shape)


def expand_dims(x: Input, axis: int | Sequence[int]) -> Variable:
    """Return a view of ``x`` with new dimensions of size 1 at ``axis`` of the result."""
    x = as_variable(x)
    axes = _axes(axis, x.ndim + (len(axis) if hasattr(axis, "__len__") else 1))
    sizes = iter(x.shape)
    return reshape(x, [1 if a in axes else next(sizes) for a in range(x.ndim + len(axes))])


def flip(x: Input, axis: Axis = None) -> Variable:
    """Return a view of ``x`` with the elements along ``axis`` in reverse order."""
    x = as_variable(x)
    axes = _axes(axis, x.ndim)
    return index(x, tuple(slice(None, None, -1 if a in axes else 1) for a in range(x.ndim)))


def transpose(x: Input, axes: Sequence[int] | None = None) -> Variable:
    """Return a view of ``x`` with dimensions in the order ``axes``, by default reversed.

    Raises:
        ValueError: If ``axes`` is not a permutation of the dimensions.
    """
    x = as_variable(x)
    if axes is None:
        return record(x.data.T, (x, lambda grad: grad.T))
    ndim = x.data.ndim
    forward = [axis % ndim if -ndim <= axis < ndim else axis for axis in axes]
    if sorted(forward) != list(range(ndim)):
        raise ValueError(f"transpose: axes must have each of {ndim} axes once, got {tuple(axes)}")
    inverse = sorted(range(ndim), key=forward.__getitem__)
    return record(x.data.transpose(forward), (x, lambda grad: grad.transpose(inverse)))


def concatenate(variables: Sequence[Input], axis: int = 0) -> Variable:
    """Return the variables joined along the existing dimension ``axis``, as a new array.

    Raises:
        ValueError: If ``variables`` is empty, or if the shapes differ except along ``axis``.
    """
    if not variables:
        raise ValueError("concatenate: expected at least one variable, got an empty list")
    inputs = [as_variable(variable) for variable in variables]
    arrays = [variable.data for variable in inputs]
    joined = array_module(arrays[0]).concatenate(arrays, axis=axis)
    before = (slice(None),) * (axis % joined.ndim)
    ends = accumulate((array.shape[axis] for array in arrays), initial=0)
    parts = [(*before, slice(start, stop)) for start, stop in pairwise(ends)]
    vjps = [lambda grad, part=part: grad[part] for part in parts]
    return record(joined, *zip(inputs, vjps, strict=True))


def stack(variables: Sequence[Input], axis: int = 0) -> Variable:
    """Return the variables joined along a new dimension ``axis`` of the result, as a new array.

    Raises:
        ValueError: If ``variables`` is empty, if the shapes differ, or if the axis does not exist.
    """
    variables = [as_variable(variable) for variable in variables]
    shapes = [variable.shape for variable in variables]
    if len(set(shapes)) != 1:
        raise ValueError(f"stack: expected variables of one shape, got {shapes}")
    return concatenate([expand_dims(variable, axis) for variable in variables], axis)


def split(x: Input, sections: int | Sequence[int], axis: int = 0) -> list[Variable]:
    """Return the sections of ``x`` along ``axis``, in order, as views.

    ``sections`` is the number of equal sections, as in NumPy, or the list of sizes, as in torch.

    Raises:
        ValueError: If the sizes do not add up to the length, or if the axis does not exist.
    """
    x = as_variable(x)
    (position,) = _axes(axis, x.data.ndim)
    length = x.data.shape[position]
    if isinstance(sections, int):
        sizes = [length // builtins.max(sections, 1)] * sections
    else:
        sizes = list(sections)
    ends = [*accumulate(sizes, initial=0)]
    if ends[-1] != length or builtins.min(sizes, default=-1) < 0:
        raise ValueError(
            f"split: sections must sum to {length}, size of axis {axis}, got {sections}"
        )
    before = (slice(None),) * position
    return [index(x, (*before, slice(start, stop))) for start, stop in pairwise(ends)]


def tile(x: Input, repeats: int | Sequence[int]) -> Variable:
    """Return ``x`` repeated ``repeats`` times per dimension, by NumPy's rules, as a new array.

    ``repeats`` applies to the last dimensions. If ``repeats`` is longer than the shape, ``x`` gets
    additional leading dimensions. Raises ValueError if a number is negative.
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
    """Return ``x[where]`` by NumPy's rules: a view for slices and numbers, else a copy.

    If ``where`` selects an element several times, its gradients are summed. ``where`` may contain
    integer and Boolean variables. Raises IndexError if an index is out of range.
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
    if isinstance(where, tuple):
        return tuple(_as_index(part, array) for part in where)
    if isinstance(where, Variable):
        where = where.data
    return array_module(array).array(where) if hasattr(where, "__array__") else where


def astype(x: Input, dtype: Any) -> Variable:
    """Return ``x`` cast to ``dtype``, as a new array. The gradient has the dtype of ``x``.

    ``"bfloat16"`` is the dtype of ml_dtypes. A result that is not floating has no gradient.
    """
    x = as_variable(x)
    array = x.data.astype(device.bfloat16() if dtype == "bfloat16" else dtype)
    if not device.is_floating(array.dtype):
        return Variable(array)
    return record(array, (x, lambda grad: grad))


def sum(x: Input, axis: Axis = None, keepdims: bool = False) -> Variable:
    """Return the sum over ``axis``."""
    x = as_float32(x)
    array = x.data
    axes = _axes(axis, array.ndim)
    out = narrowed(total(array, axes, keepdims), array)
    return record(out, (x, lambda grad: _spread(grad, axes, array.shape)))


def mean(x: Input, axis: Axis = None, keepdims: bool = False) -> Variable:
    """Return the mean over ``axis``. Raises ValueError if there are no elements."""
    x = as_float32(x)
    array = x.data
    axes = _axes(axis, array.ndim)
    count = _count(array.shape, axes, "mean")
    if is_cupy(array) and array.dtype.char not in NARROW:
        out = array.mean(axis=axes, keepdims=keepdims)  # one launch
    else:  # twice as fast as NumPy's mean(), which is a Python function
        out = narrowed(total(array, axes, keepdims) / count, array)
    return record(out, (x, lambda grad: _spread(widened(grad) / count, axes, array.shape)))


def var(x: Input, axis: Axis = None, keepdims: bool = False, ddof: int = 0) -> Variable:
    """Return the variance of n elements over ``axis``: the divisor is ``n - ddof``, at least 1."""
    return _variance("var", x, axis, keepdims, ddof)


def std(x: Input, axis: Axis = None, keepdims: bool = False, ddof: int = 0) -> Variable:
    """Return the square root of :func:`var`, with the same errors. At 0 the gradient is 0."""
    return _variance("std", x, axis, keepdims, ddof)


def _variance(name: str, x: Input, axis: Axis, keepdims: bool, ddof: int) -> Variable:
    x = as_float32(x)
    array, axes = widened(x.data), _axes(axis, x.data.ndim)
    count = _count(array.shape, axes, name)
    if count <= ddof:
        raise ValueError(f"{name}: expected more than ddof = {ddof} elements, got {count}")
    deviation, divisor = array - total(array, axes, keepdims=True) / count, count - ddof
    result = total(deviation * deviation, axes, keepdims=True) / divisor
    if name == "var":
        return _reduction(x, result, axes, keepdims, lambda: deviation * (2 / divisor))
    root = array_module(result).sqrt(result)
    scale = (result > 0) / (root * divisor + (result == 0))
    return _reduction(x, root, axes, keepdims, lambda: deviation * scale)


def prod(x: Input, axis: Axis = None, keepdims: bool = False) -> Variable:
    """Return the product over ``axis``."""
    x = as_float32(x)
    array, axes = widened(x.data), _axes(axis, x.data.ndim)
    xp = array_module(array)

    def slope() -> Any:
        is_zero = array == 0
        rest = xp.where(is_zero, 1, array)
        product = rest.prod(axis=axes, keepdims=True) / rest
        return xp.where(is_zero.sum(axis=axes, keepdims=True) > is_zero, 0, product)

    return _reduction(x, array.prod(axis=axes, keepdims=True), axes, keepdims, slope)


def logsumexp(x: Input, axis: Axis = None, keepdims: bool = False) -> Variable:
    """Return ``log(sum(exp(x)))`` over ``axis``. Raises ValueError if there are no elements."""
    x = as_floating(as_float32(x))
    array, axes = widened(x.data), _axes(axis, x.data.ndim)
    xp, top = array_module(array), array.max(axis=axes, keepdims=True)
    powers = xp.exp(array - xp.where(xp.isfinite(top), top, 0))
    # The largest power is 1, so the sum is at least 1, unless all elements are -inf.
    sums = xp.maximum(total(powers, axes, keepdims=True), 1)
    return _reduction(x, top + xp.log(sums), axes, keepdims, lambda: powers / sums)


def _reduction(
    x: Variable, result: Array, axes: tuple[int, ...], keepdims: bool, slope: Callable[[], Any]
) -> Variable:
    def vjp(grad: Array) -> Any:
        return _kept(widened(grad), axes, x.data.shape) * slope()

    vjp.__qualname__ = slope.__qualname__  # errors quote it
    out = narrowed(result, x.data)
    return record(out if keepdims else out.squeeze(axes), (x, vjp))


def norm(x: Input, p: float = 2, axis: Axis = None, keepdims: bool = False) -> Variable:
    """Return the vector norm of order ``p`` over ``axis``: ``sum(abs(x) ** p) ** (1 / p)``.

    An infinite ``p`` gives the largest absolute value. An element of 0 gets gradient 0.

    Raises:
        ValueError: If ``p`` is below 1.
    """
    if not p >= 1:
        raise ValueError(f"norm: p must be at least 1, got {p}")
    x = as_float32(x)
    if p == math.inf:
        return max(elementwise.abs(x), axis, keepdims)
    array, axes = widened(x.data), _axes(axis, x.data.ndim)
    xp = array_module(array)
    powers = array * array if p == 2 else xp.abs(array) ** p
    result = total(powers, axes, keepdims=True)
    result = xp.sqrt(result) if p == 2 else result ** (1 / p)

    def slope() -> Any:
        share = array / xp.where(result == 0, 1, result)
        return share if p == 2 else xp.sign(share) * xp.abs(share) ** (p - 1)

    return _reduction(x, result, axes, keepdims, slope)


def cumsum(x: Input, axis: int) -> Variable:
    """Return the cumulative sums along ``axis``, as a new array."""
    x = as_float32(x)
    (position,) = _axes(axis, x.data.ndim)
    back = (*(slice(None),) * position, slice(None, None, -1))
    out = narrowed(widened(x.data).cumsum(position), x.data)
    return record(out, (x, lambda grad: widened(grad)[back].cumsum(position)[back]))


def max(x: Input, axis: Axis = None, keepdims: bool = False) -> Variable:
    """Return the maximum over ``axis``. Equal maxima share the gradient. ValueError if empty."""
    return _extremum("max", as_variable(x), axis, keepdims)


def min(x: Input, axis: Axis = None, keepdims: bool = False) -> Variable:
    """Return the smallest element over ``axis``, like :func:`max`."""
    return _extremum("min", as_variable(x), axis, keepdims)


def _extremum(name: str, x: Variable, axis: Axis, keepdims: bool) -> Variable:
    array, axes = x.data, _axes(axis, x.data.ndim)
    best = getattr(array, name)(axis=axes, keepdims=True)

    def slope() -> Any:
        winners = array == best
        return (winners / winners.sum(axis=axes, keepdims=True)).astype(widened(best).dtype)

    return _reduction(x, best.copy(), axes, keepdims, slope)


def _axes(axis: Axis, ndim: int) -> tuple[int, ...]:
    if axis is None:
        return tuple(range(ndim))
    named = tuple(axis) if hasattr(axis, "__iter__") else (axis,)
    axes = tuple(a + ndim if a < 0 else a for a in named)
    if len(set(axes)) < len(axes) or not all(0 <= a < ndim for a in axes):
        raise ValueError(f"axis must name distinct dimensions of a {ndim}-D array, got {axis}")
    return axes


def _count(shape: tuple[int, ...], axes: tuple[int, ...], name: str) -> int:
    count = math.prod(shape[a] for a in axes)
    if not count:
        raise ValueError(f"{name}: expected elements to reduce over axis {axes}, got shape {shape}")
    return count


def _spread(grad: Array, axes: tuple[int, ...], shape: tuple[int, ...]) -> Array:
    return array_module(grad).broadcast_to(_kept(grad, axes, shape), shape)  # type: ignore[no-any-return]


def _kept(grad: Array, axes: tuple[int, ...], shape: tuple[int, ...]) -> Array:
    return grad.reshape([1 if axis in axes else n for axis, n in enumerate(shape)])


def linear(x: Input, weight: Input, bias: Input | None = None) -> Variable:
    """Return ``x @ weight.T + bias``, a new variable of shape ``[..., out]``.

    ``x`` has shape ``[..., in]``, ``weight`` ``[out, in]`` and ``bias`` ``[out]``. Raises
    ValueError for other shapes. On the CPU, float16 and bfloat16 are computed in float32 and
    rounded once.
    """
    return _linear(x, weight, bias, False)


def linear_relu(x: Input, weight: Input, bias: Input | None = None) -> Variable:
    """Return ``max(linear(x, weight, bias), 0)``, computed as one operation. See :func:`linear`."""
    return _linear(x, weight, bias, True)


def _linear(x: Input, weight: Input, bias: Input | None, with_relu: bool) -> Variable:
    x = x if isinstance(x, Variable) else Variable(x)
    weight = weight if isinstance(weight, Variable) else Variable(weight)
    if bias is not None and not isinstance(bias, Variable):
        bias = Variable(bias)
    if active_precision.dtype is not None:
        x, weight, bias = as_half(x), as_half(weight), None if bias is None else as_half(bias)
    rows, w = x.data, weight.data
    if rows.ndim != 2 or w.ndim != 2:
        *outer, features = rows.shape or (-1,)
        if w.ndim != 2 or features != w.shape[1]:
            raise _misfit(rows, w)
        flat = reshape(x, (math.prod(outer), features))
        return reshape(_linear(flat, weight, bias, with_relu), (*outer, len(w)))
    # NumPy multiplies float16 matrices slowly. A GPU is fast and sums in float32.
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
    # A sharded weight is not kept, to save memory. The backward pass reads it again.
    kept = w if weight.placement is None else None

    def weight_vjp(grad: Array) -> Any:
        buffer = weight.buffer
        if buffer is None or is_narrow:
            return grad.T.dot(widened(rows) if is_narrow else rows)
        if isinstance(buffer, GradSink):
            return buffer.product(weight, grad.T, rows)
        # Write the product directly into the buffer if it is the first contribution and fits.
        fits = weight.grad is None and buffer.flags.c_contiguous
        fits = fits and grad.dtype == rows.dtype == weight.dtype
        return grad.T.dot(rows, out=buffer if fits else None)

    def bias_vjp(grad: Array) -> Any:
        if len(grad) == 1:
            return grad[0]  # ten times as fast as a sum of one row
        return total(grad, 0)

    def x_vjp(grad: Array) -> Any:
        w = weight.data if kept is None else kept
        return grad.dot(widened(w) if is_narrow else w)

    # Parameters come first: their hooks run before the input's gradient is computed.
    edges: list[tuple[Variable, Vjp]] = [(weight, weight_vjp), (x, x_vjp)]
    if bias is not None:
        edges.insert(1, (bias, bias_vjp))
    return record_all(out, edges, slope)


def _add_bias_and_relu(out: Array, bias: Variable | None) -> Vjp:
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
    """Return ``a @ b`` by NumPy's rules, as a new array. Dtypes behave as in :func:`linear`.

    ``a`` has shape ``[..., n, k]``, or ``[k]`` (a row). ``b`` has shape ``[..., k, m]``, or ``[k]``
    (a column). Leading dimensions broadcast. The result has shape ``[..., n, m]``, without n if
    ``a`` is a row and without m if ``b`` is a column.

    Raises:
        ValueError: If the sizes k differ, or if an operand has no dimensions.
    """
    x, y = map(as_half, as_pair(a, b))
    if not x.data.ndim or not y.data.ndim:
        raise ValueError(f"matmul: expected shapes with axes, got {x.shape} and {y.shape}. Use mul")
    row = x if x.data.ndim > 1 else reshape(x, (1, -1))
    column = y if y.data.ndim > 1 else reshape(y, (-1, 1))
    out = _matmul(row, column)
    if row is x and column is y:
        return out
    *outer, n, m = out.data.shape
    return reshape(out, (*outer, *([n] if row is x else []), *([m] if column is y else [])))


def _matmul(x: Variable, y: Variable) -> Variable:
    # Sharded operands are not kept, to save memory. The backward pass reads them again.
    p = x.data if x.placement is None else None
    q = y.data if y.placement is None else None
    # Operands of 16 bits are converted again in the backward pass, to save memory.
    is_narrow = x.data.dtype.char in NARROW and not is_cupy(x.data)
    wide: Any = widened if is_narrow else lambda array: array
    out = wide(x.data) @ wide(y.data)
    return variable.record_pair(
        narrowed(out, x.data) if is_narrow and y.data.dtype.char in NARROW else out,
        *(x, lambda grad: grad @ wide(y.data if q is None else q).swapaxes(-1, -2)),
        *(y, lambda grad: wide(x.data if p is None else p).swapaxes(-1, -2) @ grad),
        through=widened if is_narrow else None,
    )


def einsum(subscripts: str, *operands: Input) -> Variable:
    """Return the sum of products that ``subscripts`` describe, by NumPy's rules, as a new array.

    Examples are ``"bij,bjk->bik"`` and ``"...ii->...i"``, with one operand per term before the
    arrow. A repeated letter in a term selects the diagonal. The result is summed over letters that
    it does not contain. An ellipsis represents dimensions that broadcast. Without ``->`` the result
    has the ellipsis, then the letters that occur once, in alphabetical order. Raises ValueError if
    the subscripts are malformed or do not fit the shapes of the operands.
    """
    inputs = [as_half(operand) for operand in operands]
    terms, result, sizes = _read_subscripts(subscripts, [x.data.shape for x in inputs])
    arrays, used = [], []
    # Broadcast dimensions of size 1 are removed from arrays and terms.
    for operand, term in zip(inputs, terms, strict=True):
        letters = [x for x, n in zip(term, operand.data.shape, strict=True) if n == sizes[x]]
        arrays.append(widened(operand.data).reshape([sizes[x] for x in letters]))
        used.append("".join(letters))

    def vjp(position: int, grad: Array) -> Any:
        """Return an operand's gradient: the same sum with ``grad`` in place of the operand."""
        xp, operands, others = array_module(grad), list(arrays), list(used)
        operands[position], others[position] = widened(grad), result
        term, letters = used[position], "".join(dict.fromkeys(used[position]))
        kept = "".join(x for x in letters if x in "".join(others))
        gradient = xp.einsum(f"{','.join(others)}->{kept}", *operands, optimize=True)
        if len(kept) < len(letters):
            gradient = gradient.reshape([sizes[x] if x in kept else 1 for x in letters])
            gradient = xp.broadcast_to(gradient, [sizes[x] for x in letters])
        if len(letters) < len(term):
            spread = xp.zeros([sizes[x] for x in term], gradient.dtype)
            behind = enumerate(reversed(letters))
            along = {x: xp.arange(sizes[x]).reshape(-1, *(1,) * k) for k, x in behind}
            spread[tuple(along[x] for x in term)] = gradient
            gradient = spread
        return gradient.reshape(inputs[position].data.shape)

    xp = array_module(arrays[0])
    out = xp.einsum(f"{','.join(used)}->{result}", *arrays, optimize=True)
    vjps = [lambda grad, i=i: vjp(i, grad) for i in range(len(inputs))]
    return record(narrowed(out, inputs[0].data), *zip(inputs, vjps, strict=True))


def _read_subscripts(
    subscripts: str, shapes: Sequence[tuple[int, ...]]
) -> tuple[list[str], str, dict[str, int]]:
    """Return the terms of operands and result, with letters for ``...``, and the letters' sizes."""
    before, arrow, result = subscripts.replace(" ", "").partition("->")
    terms = before.split(",")
    wrong = f"einsum: {subscripts!r} does not fit operands of shapes {list(shapes)}: "
    if len(terms) != len(shapes):
        raise ValueError(f"{wrong}expected {len(shapes)} terms, got {len(terms)}")
    free = [letter for letter in string.ascii_letters if letter not in subscripts]
    bare = [term.replace("...", "") for term in terms]
    counts = [len(shape) - len(letters) for shape, letters in zip(shapes, bare, strict=True)]
    for count, term in zip(counts, terms, strict=True):
        if count < 0 or (count and "..." not in term):
            raise ValueError(f"{wrong}{term!r} must have one letter per dimension of its operand")
    most = builtins.max(counts)  # number of dimensions of the longest ellipsis
    dots = "".join(free[:most])
    full = [term.replace("...", dots[most - n :]) for n, term in zip(counts, terms, strict=True)]
    sizes: dict[str, int] = {}
    for term, shape in zip(full, shapes, strict=True):
        for letter, n in zip(term, shape, strict=True):
            if n != sizes.setdefault(letter, n) and 1 not in (n, sizes[letter]):
                raise ValueError(
                    f"{wrong}{letter!r} must have equal sizes, got {sizes[letter]} and {n}"
                )
            sizes[letter] = n if sizes[letter] == 1 else sizes[letter]
    if not arrow:
        result = "..." + "".join(sorted(x for x in sizes if "".join(bare).count(x) == 1))
    result = result.replace("...", dots)
    if len(set(result)) < len(result) or not sizes.keys() >= set(result):
        raise ValueError(f"{wrong}result must have distinct letters of operands, got {result!r}")
    return full, result, sizes
