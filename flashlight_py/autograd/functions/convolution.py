"""Convolution and pooling of images: ``[batch, channels, height, width]``.

Results lie in memory with the channels last, as views of the shape above; NumPy's elementwise
functions keep that, so that a chain of layers converts nothing but its first input. Where there is
no native kernel, the same is computed by a matrix product for each place of the window.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from flashlight_py.autograd.functions.dimensions import reshape
from flashlight_py.autograd.functions.elementwise import add, as_variable
from flashlight_py.autograd.graph import Vjp
from flashlight_py.autograd.native import channels_last, channels_second, contiguous, kernel
from flashlight_py.autograd.precision import as_half, real
from flashlight_py.autograd.variable import Input, Variable, record, record_all
from flashlight_py.device import Array, array_module, narrowed, widened

Pair: TypeAlias = int | tuple[int, int]
_Two: TypeAlias = tuple[int, int]


class _Windows(NamedTuple):
    """Windows over images; pairs are (down, across), shapes have the channels last."""

    inputs: tuple[int, int, int, int]
    outputs: tuple[int, int, int, int]
    kernel: _Two
    stride: _Two
    pad: _Two
    dilation: _Two
    groups: int
    numbers: tuple[int, ...]  # the same for kernels, in the order of csrc/nn/windows.h

    def places(self) -> Iterator[tuple[_Two, tuple[slice, ...]]]:
        """Yield each place of a window, and where padded images have it for all outputs."""
        for place in np.ndindex(self.kernel):
            steps = zip(place, self.dilation, self.outputs[1:3], self.stride, strict=True)
            ranges = [(at * step, at * step + (n - 1) * far + 1, far) for at, step, n, far in steps]
            yield place, (slice(None), slice(*ranges[0]), slice(*ranges[1]))

    def padded(self, like: Array, value: float) -> tuple[Array, Array]:
        """Return images amid padding, all of ``value``, and the part of them inside it."""
        (batch, height, width, channels), (down, across) = self.inputs, self.pad
        shape = batch, height + 2 * down, width + 2 * across, channels
        whole: Array = array_module(like).full(shape, value, like.dtype)
        return whole, whole[:, down : down + height, across : across + width]

    def taken(self, images: Array, beyond: float = 0) -> Iterator[tuple[_Two, Array]]:
        """Yield each place of a window and its pixels for all outputs; ``beyond``: the padding."""
        whole, inside = self.padded(images, beyond)
        inside[...] = images
        return ((place, whole[part]) for place, part in self.places())

    def given(self, parts: Iterable[Array], like: Array) -> Array:
        """Return images to which each place of a window has added its part, in order."""
        whole, inside = self.padded(like, 0)
        for (_, where), part in zip(self.places(), parts, strict=True):
            view = whole[where]
            view += part.reshape(view.shape)
        return inside


def conv2d(
    x: Input, weight: Input, bias: Input | None = None, stride: Pair = 1, padding: Pair | str = 0,
    dilation: Pair = 1, groups: int = 1,
) -> Variable:  # fmt: skip
    """Return the cross-correlation of images with ``weight``, plus ``bias``, a new variable.

    ``y[n, o, i, j] = bias[o] + sum over c, p, q of weight[o, c, p, q] * x[n, c', i * stride + p *
    dilation - padding, j * stride + q * dilation - padding]``, with zeros around the images; ``c'``
    is channel ``c`` of the group that ``o`` is in. float16 is computed in float32. Windows of 3 x 3
    with stride 1 are computed by Winograd's F(2 x 2, 3 x 3) if there are 16 channels or more: an
    infinite element also makes neighbours of what it belongs to nan.

    Args:
        x: shape ``[batch, channels, height, width]``.
        weight: shape ``[out, channels / groups, kernel height, kernel width]``.
        bias: shape ``[out]``, or None.
        stride: from one window to the next, in pixels; a number or a pair (down, across).
        padding: zeros at each side; ``"same"`` for results of the size of ``x``.
        dilation: from one element of a window to the next, in pixels.
        groups: into how many the channels are divided, of which each makes its part of ``out``.

    Returns:
        ``[batch, out, (height + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1, ...]``.

    Raises:
        ValueError: the shapes or options do not fit together, or the batch is empty.
        TypeError: an option is no integer.
    """
    x, weight = as_half(x), as_half(weight)
    bias = None if bias is None else as_half(bias)
    w = _windows_of_conv(x, weight, bias, stride, padding, dilation, groups)
    dtype = np.result_type(*(each.dtype for each in (x, weight, bias) if each is not None))

    def read(variable: Variable) -> Array:
        return widened(variable.data.astype(dtype, copy=False))

    images, filters = _rows(read(x)), contiguous(read(weight))
    added = None if bias is None else contiguous(read(bias))
    out = _compute("conv_forward", _to_output, w, w.outputs, images, filters, added)
    kept = filters if weight.placement is None else None  # a sharded one is read again in the end
    shape = weight.shape

    def weight_vjp(grad: Array) -> Array:
        return _compute("conv_to_weight", _to_weight, w, shape, _rows(grad), images)

    def bias_vjp(grad: Array) -> Array:
        rows = _rows(grad)
        return _compute("conv_to_bias", lambda _, rows: rows.sum((0, 1, 2)), w, shape[:1], rows)

    def x_vjp(grad: Array) -> Array:
        filters = contiguous(read(weight)) if kept is None else kept
        found = _compute("conv_to_input", _to_input, w, w.inputs, _rows(grad), filters)
        return channels_second(found)

    # The parameters come first: their hooks fire while the input's gradient is still to compute.
    edges: list[tuple[Variable, Vjp]] = [(weight, weight_vjp), (x, x_vjp)]
    if bias is not None:
        edges.insert(1, (bias, bias_vjp))
    return record_all(channels_second(out).astype(dtype, copy=False), edges)


def conv_transpose2d(
    x: Input, weight: Variable, bias: Variable | None, stride: _Two, padding: _Two, dilation: _Two,
    groups: int, output_padding: _Two,
) -> Variable:  # fmt: skip
    """Return ``bias`` plus the gradient of ``conv2d`` by images, if ``x`` is that of the result."""
    x, weight = as_half(x), as_half(weight)
    channels, in_group, *kernel = weight.shape
    numbers = zip(x.shape[2:], kernel, stride, padding, dilation, output_padding, strict=False)
    size = [(n - 1) * s - 2 * p + d * (k - 1) + 1 + e for n, k, s, p, d, e in numbers]
    if x.ndim != 4 or x.shape[1] != channels or not x.size or min(size) < 1:
        raise ValueError(
            f"ConvTranspose2D: expected x of shape [batch, {channels}, height, width], none empty, "
            f"for a result of at least 1 x 1 pixels, got {x.shape} and {padding=}"
        )
    images = Variable(np.broadcast_to(0, (x.shape[0], in_group * groups, *size)))
    w = _windows_of_conv(images, weight, None, stride, padding, dilation, groups)
    dtype = np.result_type(x.dtype, weight.dtype)
    rows, filters = (widened(each.data.astype(dtype, copy=False)) for each in (x, weight))
    rows, filters = _rows(rows), contiguous(filters)
    out = channels_second(_compute("conv_to_input", _to_input, w, w.inputs, rows, filters))

    def weight_vjp(grad: Array) -> Array:
        return _compute("conv_to_weight", _to_weight, w, weight.shape, rows, _rows(grad))

    def x_vjp(grad: Array) -> Array:
        parts = _rows(grad), filters, None
        return channels_second(_compute("conv_forward", _to_output, w, w.outputs, *parts))

    result = record(out.astype(dtype, copy=False), (weight, weight_vjp), (x, x_vjp))
    return result if bias is None else add(result, reshape(bias, (-1, 1, 1)))


def pool2d(
    x: Input, kernel: Pair, stride: Pair | None = None, padding: Pair = 0, mode: str = "max",
    count_padding: bool = True,
) -> Variable:  # fmt: skip
    """Return the largest element, or the mean, of each window of each channel, a new variable.

    Equal elements of a window: the first, row by row, gets the gradient of the maximum. float16
    is computed in float32.

    Args:
        x: shape ``[batch, channels, height, width]``.
        kernel: the size of windows in pixels; a number or a pair (down, across).
        stride: from one window to the next, in pixels; None: ``kernel``.
        padding: pixels at each side, at most half of ``kernel``; no maximum, and 0 in a mean.
        mode: ``"max"`` or ``"average"``.
        count_padding: whether the divisor of a mean counts the padding in a window.

    Returns:
        Shape ``[batch, channels, (height + 2 * padding - kernel) // stride + 1, ...]``.

    Raises:
        ValueError: the shapes or options do not fit together, or the batch is empty.
        TypeError: an option is no integer.
    """
    x = real(as_variable(x))
    options = pool_options("pool2d", kernel, stride, padding, mode)
    w = _windows("pool2d", x, "[batch, channels, height, width]", (0, 0), *options)
    images, of_all = _rows(x.data), "_of_all" if count_padding else ""

    def mean(w: _Windows, images: Array) -> Array:
        return _sums(w, images) / _counts(w, images, count_padding)

    def spread_mean(w: _Windows, grad: Array) -> Array:
        share = grad / _counts(w, grad, count_padding)
        return w.given((share for _ in w.places()), grad)

    name, otherwise = ("largest", _largest) if mode == "max" else (f"mean{of_all}", mean)
    out = _compute(f"pool_{name}", otherwise, w, w.outputs, images)

    def vjp(grad: Array) -> Array:
        rows = _rows(grad)
        if mode == "max":
            args = "pool_spread_largest", _spread_largest, w, w.inputs, rows, images, out
            return channels_second(_compute(*args))
        found = _compute(f"pool_spread_mean{of_all}", spread_mean, w, w.inputs, rows)
        return channels_second(found)

    return record(narrowed(channels_second(out), x.data), (x, vjp))


def _rows(images: Array) -> Array:
    """Return images as they are computed: wide, the channels last in memory."""
    return contiguous(channels_last(widened(images)))


def _compute(
    name: str, otherwise: Callable[..., Array], w: _Windows, shape: tuple[int, ...], *arrays: Any
) -> Array:
    """Return a kernel's result, of ``shape``; where there is no kernel, what ``otherwise`` does."""
    native, dtype = kernel(name, arrays[0]), arrays[0].dtype
    if native is None:
        return otherwise(w, *arrays)
    return native(((shape, dtype),), w.numbers, (), *arrays)  # type: ignore[no-any-return]


# What kernels compute, in array operations -------------------------------------------------------


def _by_groups(array: Array, w: _Windows) -> Array:
    """Return all positions' channels as ``[groups, positions, channels of a group]``."""
    return array.reshape(-1, w.groups, array.shape[3] // w.groups).swapaxes(0, 1)


def _filters(weight: Array, w: _Windows, place: _Two) -> Array:
    """Return a window's place in a weight, ``[groups, out of a group, channels of a group]``."""
    return weight[:, :, place[0], place[1]].reshape(w.groups, -1, weight.shape[1])


def _to_output(w: _Windows, images: Array, weight: Array, bias: Array | None) -> Array:
    products = (
        _by_groups(part, w) @ _filters(weight, w, place).swapaxes(1, 2)
        for place, part in w.taken(images)
    )
    out: Array = reduce(array_module(images).add, products).swapaxes(0, 1).reshape(w.outputs)
    return out if bias is None else out + bias


def _to_input(w: _Windows, grad: Array, weight: Array) -> Array:
    rows = _by_groups(grad, w)
    products = (rows @ _filters(weight, w, place) for place, _ in w.places())
    return w.given((each.swapaxes(0, 1) for each in products), grad)


def _to_weight(w: _Windows, grad: Array, images: Array) -> Array:
    shape = w.outputs[3], w.inputs[3] // w.groups
    columns = _by_groups(grad, w).swapaxes(1, 2)
    result: Array = array_module(grad).zeros((*shape, *w.kernel), grad.dtype)
    for (y, x), part in w.taken(images):
        result[:, :, y, x] = (columns @ _by_groups(part, w)).reshape(shape)
    return result


def _largest(w: _Windows, images: Array) -> Array:
    parts = (part for _, part in w.taken(images, -np.inf))
    return reduce(array_module(images).maximum, parts)


def _spread_largest(w: _Windows, grad: Array, images: Array, out: Array) -> Array:
    xp = array_module(grad)
    is_inside = w.taken(xp.ones_like(images, dtype=np.bool_))

    def shares(left: Array) -> Iterator[Array]:
        for (_, part), (_, inside) in zip(w.taken(images), is_inside, strict=True):
            hit = ((part == out) | xp.isnan(part)) & inside
            yield xp.where(hit, left, 0)
            left = xp.where(hit, 0, left)

    return w.given(shares(grad), grad)


def _sums(w: _Windows, images: Array) -> Array:
    return reduce(array_module(images).add, (part for _, part in w.taken(images)))


def _counts(w: _Windows, like: Array, count_padding: bool) -> Array | int:
    """Return how many elements each mean is of."""
    if count_padding:
        return w.kernel[0] * w.kernel[1]
    shape = 1, *w.inputs[1:3], 1
    return _sums(w._replace(inputs=shape), array_module(like).full(shape, 1, like.dtype))


# What is given, checked --------------------------------------------------------------------------


def as_two(name: str, value: Any, least: int) -> _Two:
    """Return an option as (down, across); ``name``: for errors.

    Others than an integer and a pair of them are a TypeError; numbers below ``least``, or of 2**31
    or more, are a ValueError.
    """
    two = (value, value) if isinstance(value, (int, np.integer)) else value
    is_pair = isinstance(two, (tuple, list)) and len(two) == 2
    if not is_pair or not all(type(each) is int or isinstance(each, np.integer) for each in two):
        raise TypeError(f"{name} must be an integer or a pair of them, got {value!r}")
    if min(two) < least or max(two) >= 2**31:
        raise ValueError(f"{name} must be at least {least} and below 2**31, got {value!r}")
    return int(two[0]), int(two[1])


def pad_of(name: str, padding: Any, kernel: Sequence[int], stride: Any, dilation: Any) -> Any:
    """Return ``padding`` as (down, across), of ``"same"`` too, with the errors of :func:`as_two`.

    It is a ValueError, too, if no padding makes results of the size of the input.
    """
    if padding != "same":
        return as_two(f"{name}: padding", padding, 0)
    for size, far, step in zip(kernel, stride, dilation, strict=True):
        if far != 1 or step * (size - 1) % 2:
            raise ValueError(
                f"{name}: padding='same' needs a stride of 1 and windows of an odd size, got "
                f"stride {far}, kernel {size} and dilation {step}"
            )
    return tuple(step * (size - 1) // 2 for size, step in zip(kernel, dilation, strict=True))


def pool_options(
    name: str, kernel: Any, stride: Any, padding: Any, mode: str
) -> tuple[_Two, _Two, _Two]:
    """Return the options of ``pool2d`` as pairs, or raise its errors with ``name``."""
    if mode not in ("max", "average"):
        raise ValueError(f"{name}: mode must be 'max' or 'average', got {mode!r}")
    kernel = as_two(f"{name}: kernel", kernel, 1)
    stride = kernel if stride is None else as_two(f"{name}: stride", stride, 1)
    pad = as_two(f"{name}: padding", padding, 0)
    if 2 * pad[0] > kernel[0] or 2 * pad[1] > kernel[1]:
        raise ValueError(
            f"{name}: padding must be at most half of the kernel {kernel}, got {padding!r}"
        )
    return kernel, stride, pad


def _windows_of_conv(
    x: Variable, weight: Variable, bias: Variable | None, *options: Any
) -> _Windows:
    stride, padding, dilation, groups = options
    stride, dilation = as_two("conv2d: stride", stride, 1), as_two("conv2d: dilation", dilation, 1)
    shape = weight.shape
    if weight.ndim != 4 or not weight.size:
        expected = "[out, channels / groups, height, width], none empty"
        raise ValueError(f"conv2d: expected a weight of shape {expected}, got {shape}")
    out, in_group, *kernel = shape
    groups = int(groups) if isinstance(groups, np.integer) else groups
    if type(groups) is not int or groups < 1 or out % groups:
        raise ValueError(
            f"conv2d: groups must divide the {out} output channels of a weight of shape {shape}, "
            f"got {groups!r}"
        )
    pad = pad_of("conv2d", padding, kernel, stride, dilation)
    if bias is not None and bias.shape != (out,):
        raise ValueError(f"conv2d: expected bias of shape ({out},), got {bias.shape}")
    ends = in_group * groups, out
    expected = f"[batch, {ends[0]}, height, width] for a weight of shape {shape} and {groups=}"
    return _windows("conv2d", x, expected, ends, kernel, stride, pad, dilation, groups)


def _windows(
    name: str, x: Variable, expected: str, ends: _Two, kernel: Any, stride: Any, pad: Any,
    dilation: Any = (1, 1), groups: int = 1,
) -> _Windows:  # fmt: skip
    """``ends``: the channels of ``x`` and of the result; 0 for those of ``x``."""
    if x.ndim != 4 or not all(x.shape[:2]) or ends[0] not in (0, x.shape[1]):
        raise ValueError(f"{name}: expected x of shape {expected}, none empty, got {x.shape}")
    batch, channels, *size = x.shape
    spans = [step * (k - 1) + 1 for step, k in zip(dilation, kernel, strict=True)]
    beyond = [n + 2 * p - span for n, p, span in zip(size, pad, spans, strict=True)]
    if min(beyond) < 0 or not min(size):
        raise ValueError(
            f"{name}: windows of {spans[0]} x {spans[1]} pixels do not fit in x of shape "
            f"{x.shape} with padding {tuple(pad)}"
        )
    down, across = (rest // step + 1 for rest, step in zip(beyond, stride, strict=True))
    inputs = batch, size[0], size[1], channels
    outputs = batch, down, across, ends[1] or channels
    if math.prod(outputs) >= 2**60:
        shape = batch, outputs[3], down, across
        raise ValueError(f"{name}: results of shape {shape} are too large, of x of shape {x.shape}")
    numbers = *inputs, *outputs[1:], *kernel, *stride, *pad, *dilation, groups
    return _Windows(inputs, outputs, tuple(kernel), stride, pad, dilation, groups, numbers)
