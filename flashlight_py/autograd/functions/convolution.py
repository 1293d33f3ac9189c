"""Convolution and pooling of images with shape ``[batch, channels, height, width]``.

The result has this shape too, but it is a view: the memory stores the channels last. NumPy's
elementwise functions keep this layout, so a chain of layers converts only its first input. Without
a native kernel, array operations compute one matrix product per element of the kernel window.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache, reduce
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from flashlight_py.autograd.functions.dimensions import reshape
from flashlight_py.autograd.functions.elementwise import add, as_variable
from flashlight_py.autograd.graph import Vjp
from flashlight_py.autograd.native import channels_last, channels_second, kernel
from flashlight_py.autograd.precision import as_floating, as_half
from flashlight_py.autograd.variable import Input, Variable, record, record_all
from flashlight_py.device import Array, array_module, as_packed, narrowed, total, widened

Pair: TypeAlias = int | tuple[int, int]
_Two: TypeAlias = tuple[int, int]


class _Windows(NamedTuple):
    """Sizes of a convolution or pooling. Pairs are (down, across). Shapes have channels last."""

    inputs: tuple[int, int, int, int]
    outputs: tuple[int, int, int, int]
    kernel: _Two
    stride: _Two
    pad: _Two
    dilation: _Two
    groups: int
    numbers: tuple[int, ...]  # arguments of native kernels, see csrc/nn/kernels.h

    def places(self) -> Iterator[tuple[_Two, tuple[slice, ...]]]:
        """Yield each position in a window, and the index of its pixels in padded images."""
        for position in np.ndindex(self.kernel):
            steps = zip(position, self.dilation, self.outputs[1:3], self.stride, strict=True)
            ranges = [(i * step, i * step + (n - 1) * far + 1, far) for i, step, n, far in steps]
            yield position, (slice(None), slice(*ranges[0]), slice(*ranges[1]))

    def padded(self, like: Array, value: float) -> tuple[Array, Array]:
        """Return new padded images filled with ``value``, and a view of them without padding."""
        (batch, height, width, channels), (down, across) = self.inputs, self.pad
        shape = batch, height + 2 * down, width + 2 * across, channels
        image: Array = array_module(like).full(shape, value, like.dtype)
        return image, image[:, down : down + height, across : across + width]

    def taken(self, images: Array, beyond: float = 0) -> Iterator[tuple[_Two, Array]]:
        """Yield each position in a window, and its pixels in all windows. Pad with ``beyond``."""
        padded, inside = self.padded(images, beyond)
        inside[...] = images
        return ((position, padded[part]) for position, part in self.places())

    def sum_parts(self, parts: Iterable[Array], like: Array) -> Array:
        """Return the sum of ``parts`` as images. ``parts`` has one part for each of ``places``."""
        padded, inside = self.padded(like, 0)
        for (_, index), part in zip(self.places(), parts, strict=True):
            view = padded[index]
            view += part.reshape(view.shape)
        return inside


def conv2d(
    x: Input, weight: Input, bias: Input | None = None, stride: Pair = 1, padding: Pair | str = 0,
    dilation: Pair = 1, groups: int = 1,
) -> Variable:  # fmt: skip
    """Return the cross-correlation of images with ``weight``, plus ``bias``, as a new variable.

    ``y[n, o, i, j] = bias[o] + sum over c, p, q of weight[o, c, p, q] * x[n, c', i * stride + p *
    dilation - padding, j * stride + q * dilation - padding]``, with zeros around the images. ``c'``
    is channel ``c`` of the group of ``o``. float16 is computed in float32. Windows of 3 x 3 with
    stride 1 and at least 32 channels use Winograd's F(2 x 2, 3 x 3). With Winograd, an infinite
    element makes neighbouring results nan.

    Args:
        x: Shape ``[batch, channels, height, width]``.
        weight: Shape ``[out, channels / groups, kernel height, kernel width]``.
        bias: Shape ``[out]``, or None.
        stride: Distance of windows in pixels: a number or a pair (down, across).
        padding: Number of zeros on each side. ``"same"`` gives the result the height and width of
            ``x``.
        dilation: Distance of the elements of a window in pixels.
        groups: Number of groups of channels. Each group computes ``out / groups`` channels.

    Returns:
        ``[batch, out, (height + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1, ...]``.

    Raises:
        ValueError: If the shapes or options do not fit together, or if the batch is empty.
        TypeError: If an option is not an integer.
    """
    x, weight = as_half(x), as_half(weight)
    bias = None if bias is None else as_half(bias)
    w = _windows_of_conv(x, weight, bias, stride, padding, dilation, groups)
    dtype = np.result_type(*(v.dtype for v in (x, weight, bias) if v is not None))
    images, filters = _rows(_read(x, dtype)), as_packed(_read(weight, dtype))
    added = None if bias is None else as_packed(_read(bias, dtype))
    out = _compute("conv_forward", _to_output, w, w.outputs, images, filters, added)
    # A sharded weight is not kept, to save memory. The backward pass reads it again.
    kept = filters if weight.placement is None else None
    shape = weight.shape

    def weight_vjp(grad: Array) -> Any:
        return _compute("conv_to_weight", _to_weight, w, shape, _rows(grad), images)

    def x_vjp(grad: Array) -> Array:
        filters = as_packed(_read(weight, dtype)) if kept is None else kept
        grads = _compute("conv_to_input", _to_input, w, w.inputs, _rows(grad), filters)
        return channels_second(grads)

    # Parameters come first: their hooks run before the input's gradient is computed.
    edges: list[tuple[Variable, Vjp]] = [(weight, weight_vjp), (x, x_vjp)]
    if bias is not None:
        edges.insert(1, (bias, lambda grad: total(_rows(grad), (0, 1, 2))))
    return record_all(channels_second(out).astype(dtype, copy=False), edges)


def conv_transpose2d(
    x: Input, weight: Variable, bias: Variable | None, stride: _Two, padding: _Two, dilation: _Two,
    groups: int, output_padding: _Two,
) -> Variable:  # fmt: skip
    """Return ``bias`` plus the input gradient of a ``conv2d`` whose result has gradient ``x``."""
    x, weight = as_half(x), as_half(weight)
    channels, in_group, *kernel = weight.shape
    numbers = zip(x.shape[2:], kernel, stride, padding, dilation, output_padding, strict=False)
    size = [(n - 1) * s - 2 * p + d * (k - 1) + 1 + e for n, k, s, p, d, e in numbers]
    if x.ndim != 4 or x.shape[1] != channels or not x.size or min(size) < 1:
        raise ValueError(
            f"ConvTranspose2D: expected x of shape [batch, {channels}, height, width], without "
            f"sizes of 0, for a result of at least 1 x 1 pixels, got {x.shape} and {padding=}"
        )
    images = Variable(np.broadcast_to(0, (x.shape[0], in_group * groups, *size)))
    w = _windows_of_conv(images, weight, None, stride, padding, dilation, groups)
    dtype = np.result_type(x.dtype, weight.dtype)
    rows, filters = _rows(_read(x, dtype)), as_packed(_read(weight, dtype))
    out = channels_second(_compute("conv_to_input", _to_input, w, w.inputs, rows, filters))

    def weight_vjp(grad: Array) -> Any:
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
    """Return the maximum or the mean of each window of each channel, as a new variable.

    The gradient of a maximum goes to one element of the window: the first maximum, row by row.
    float16 is computed in float32.

    Args:
        x: Shape ``[batch, channels, height, width]``.
        kernel: Window size in pixels: a number or a pair (down, across).
        stride: Distance of windows in pixels. Default: ``kernel``.
        padding: Number of pixels on each side, at most half of ``kernel``. A maximum ignores them.
            A mean counts them as zeros.
        mode: ``"max"`` or ``"average"``.
        count_padding: Whether the divisor of a mean includes the padding.

    Returns:
        Shape ``[batch, channels, (height + 2 * padding - kernel) // stride + 1, ...]``.

    Raises:
        ValueError: If the shapes or options do not fit together, or if the batch is empty.
        TypeError: If an option is not an integer.
    """
    x = as_floating(as_variable(x))
    options = pool_options("pool2d", kernel, stride, padding, mode)
    w = _windows("pool2d", x.shape, "[batch, channels, height, width]", (0, 0), *options)
    images, of_all = _rows(x.data), "_of_all" if count_padding else ""

    def mean(w: _Windows, images: Array) -> Array:
        return _sums(w, images) / _counts(w, images, count_padding)

    def spread_mean(w: _Windows, grad: Array) -> Array:
        share = grad / _counts(w, grad, count_padding)
        return w.sum_parts((share for _ in w.places()), grad)

    name, otherwise = ("largest", _largest) if mode == "max" else (f"mean{of_all}", mean)
    dtypes = images.dtype, *[np.dtype(f"i{images.itemsize}")] * (mode == "max")
    made = _compute(f"pool_{name}", otherwise, w, w.outputs, images, dtypes=dtypes)
    out, *kept = made if mode == "max" else (made,)

    def vjp(grad: Array) -> Array:
        args: Any = f"pool_spread_mean{of_all}", spread_mean, w, w.inputs, _rows(grad)
        if mode == "max":
            args = "pool_spread_largest", _spread_largest, *args[2:], *kept
        return channels_second(_compute(*args))

    return record(narrowed(channels_second(out), x.data), (x, vjp))


def _read(variable: Variable, dtype: np.dtype[Any]) -> Array:
    return widened(variable.data.astype(dtype, copy=False))


def _rows(images: Array) -> Array:
    """Return images as the kernels expect them: float32 or wider, with channels last."""
    return as_packed(channels_last(widened(images)))


def _compute(
    name: str, otherwise: Any, w: _Windows, shape: tuple[int, ...], *arrays: Any, dtypes: Any = ()
) -> Any:
    """Return an array, or one array for each of ``dtypes``."""
    native = kernel(name, arrays[0])
    if native is None:
        return otherwise(w, *arrays)
    made = [(shape, dtype) for dtype in dtypes or (arrays[0].dtype,)]
    return native(made, w.numbers, (), *arrays)


def _by_groups(array: Array, w: _Windows) -> Array:
    """Return the channels of all pixels as ``[groups, pixels, channels per group]``."""
    return array.reshape(-1, w.groups, array.shape[3] // w.groups).swapaxes(0, 1)


def _filters(weight: Array, w: _Windows, position: _Two) -> Array:
    """Return ``weight`` at ``position``: ``[groups, out per group, channels per group]``."""
    return weight[:, :, position[0], position[1]].reshape(w.groups, -1, weight.shape[1])


def _to_output(w: _Windows, images: Array, weight: Array, bias: Array | None) -> Array:
    products = (
        _by_groups(part, w) @ _filters(weight, w, position).swapaxes(1, 2)
        for position, part in w.taken(images)
    )
    out: Array = reduce(array_module(images).add, products).swapaxes(0, 1).reshape(w.outputs)
    return out if bias is None else out + bias


def _to_input(w: _Windows, grad: Array, weight: Array) -> Array:
    rows = _by_groups(grad, w)
    products = (rows @ _filters(weight, w, position) for position, _ in w.places())
    return w.sum_parts((product.swapaxes(0, 1) for product in products), grad)


def _to_weight(w: _Windows, grad: Array, images: Array) -> Array:
    shape = w.outputs[3], w.inputs[3] // w.groups
    columns = _by_groups(grad, w).swapaxes(1, 2)
    result: Array = array_module(grad).zeros((*shape, *w.kernel), grad.dtype)
    for (y, x), part in w.taken(images):
        result[:, :, y, x] = (columns @ _by_groups(part, w)).reshape(shape)
    return result


def _largest(w: _Windows, images: Array) -> tuple[Array, Array, Array]:
    out = reduce(array_module(images).maximum, (part for _, part in w.taken(images, -np.inf)))
    return out, images, out  # `images` and `out` are arguments of _spread_largest


def _spread_largest(w: _Windows, grad: Array, images: Array, out: Array) -> Array:
    xp = array_module(grad)
    is_inside = w.taken(xp.ones_like(images, dtype=np.bool_))

    def shares(left: Array) -> Iterator[Array]:
        for (_, part), (_, inside) in zip(w.taken(images), is_inside, strict=True):
            hit = ((part == out) | xp.isnan(part)) & inside
            yield xp.where(hit, left, 0)
            left = xp.where(hit, 0, left)

    return w.sum_parts(shares(grad), grad)


def _sums(w: _Windows, images: Array) -> Array:
    return reduce(array_module(images).add, (part for _, part in w.taken(images)))


def _counts(w: _Windows, like: Array, count_padding: bool) -> Array | int:
    """Return the divisor of each mean: the number of elements in its window."""
    if count_padding:
        return w.kernel[0] * w.kernel[1]
    shape = 1, *w.inputs[1:3], 1
    return _sums(w._replace(inputs=shape), array_module(like).full(shape, 1, like.dtype))


def as_two(name: str, value: Any, least: int) -> _Two:
    """Return an option as (down, across). ``name`` appears in errors.

    Raises TypeError if ``value`` is not an integer or a pair of integers, and ValueError if a
    number is below ``least`` or at least 2**31.
    """
    is_usual = type(value) is tuple and [*map(type, value)] == [int, int]
    if is_usual and least <= min(value) <= max(value) < 2**31:
        return value  # type: ignore[no-any-return]
    two = (value, value) if isinstance(value, (int, np.integer)) else value
    is_pair = isinstance(two, (tuple, list)) and len(two) == 2
    if not is_pair or any(type(n) is not int and not isinstance(n, np.integer) for n in two):
        raise TypeError(f"{name} must be an integer or a pair of integers, got {value!r}")
    if min(two) < least or max(two) >= 2**31:
        raise ValueError(f"{name} must be at least {least} and below 2**31, got {value!r}")
    return int(two[0]), int(two[1])


def pad_of(name: str, padding: Any, kernel: Sequence[int], stride: Any, dilation: Any) -> Any:
    """Return the padding (down, across). "same" requires a stride of 1 and an odd window size."""
    if padding != "same":
        return as_two(f"{name}: padding", padding, 0)
    for size, far, step in zip(kernel, stride, dilation, strict=True):
        if far != 1 or step * (size - 1) % 2:
            raise ValueError(
                f"{name}: padding='same' must have a stride of 1 and an even "
                f"dilation * (kernel - 1), got stride {far}, kernel {size} and dilation {step}"
            )
    return tuple(step * (size - 1) // 2 for size, step in zip(kernel, dilation, strict=True))


def pool_options(
    name: str, kernel: Any, stride: Any, padding: Any, mode: str
) -> tuple[_Two, _Two, _Two]:
    """Return ``kernel``, ``stride`` and ``padding`` as pairs. ``name`` appears in errors."""
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
        expected = "[out, channels / groups, height, width], without sizes of 0"
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
    sizes = tuple(kernel), stride, pad, dilation, groups
    return _windows("conv2d", x.shape, expected, ends, *sizes)


@lru_cache
def _windows(
    name: str, shape: tuple[int, ...], expected: str, ends: _Two, kernel: _Two, stride: _Two,
    pad: _Two, dilation: _Two = (1, 1), groups: int = 1,
) -> _Windows:  # fmt: skip
    """Return the sizes. ``ends``: channels of ``x`` and of the result, or (0, 0) for pooling."""
    if len(shape) != 4 or not all(shape[:2]) or ends[0] not in (0, shape[1]):
        raise ValueError(f"{name}: expected x of shape {expected}, not empty, got {shape}")
    batch, channels, *size = shape
    spans = [step * (k - 1) + 1 for step, k in zip(dilation, kernel, strict=True)]
    beyond = [n + 2 * p - span for n, p, span in zip(size, pad, spans, strict=True)]
    if min(beyond) < 0 or not min(size):
        raise ValueError(
            f"{name}: expected windows that fit in x of shape {shape} with padding {tuple(pad)}, "
            f"got {spans[0]} x {spans[1]} pixels. Use a smaller kernel or more padding"
        )
    down, across = (rest // step + 1 for rest, step in zip(beyond, stride, strict=True))
    inputs = batch, size[0], size[1], channels
    outputs = batch, down, across, ends[1] or channels
    if math.prod(outputs) >= 2**60:
        out = batch, outputs[3], down, across
        raise ValueError(f"{name}: results must have less than 2**60 elements, got shape {out}")
    numbers = *inputs, *outputs[1:], *kernel, *stride, *pad, *dilation, groups
    return _Windows(inputs, outputs, kernel, stride, pad, dilation, groups, numbers)
