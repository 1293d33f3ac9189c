"""Convolution and pooling of images: ``[batch, channels, height, width]``.

Results lie in memory with the channels last, as views of the shape above; NumPy's elementwise
functions keep that, so that a chain of layers converts nothing but its first input. Where there is
no native kernel, the same is computed by a matrix product for each place of the window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from flashlight_py.autograd.functions.elementwise import as_variable
from flashlight_py.autograd.graph import Vjp
from flashlight_py.autograd.native import contiguous, kernel
from flashlight_py.autograd.precision import as_half
from flashlight_py.autograd.variable import Input, Variable, record, record_all
from flashlight_py.device import Array, array_module, narrowed, widened

Pair: TypeAlias = int | tuple[int, int]
_CHANNELS_LAST, _CHANNELS_SECOND = (0, 2, 3, 1), (0, 3, 1, 2)


class _Windows(NamedTuple):
    """The numbers that kernels are given, in the order of csrc/nn/windows.h."""

    batch: int
    height: int
    width: int
    channels: int
    out_height: int
    out_width: int
    out_channels: int
    kernel_y: int
    kernel_x: int
    stride_y: int
    stride_x: int
    pad_y: int
    pad_x: int
    step_y: int
    step_x: int
    groups: int

    @property
    def inputs(self) -> tuple[int, int, int, int]:
        """The shape of images, channels last."""
        return self[:4]

    @property
    def outputs(self) -> tuple[int, int, int, int]:
        return self.batch, *self[4:7]

    def places(self) -> Iterator[tuple[int, int, tuple[slice, ...]]]:
        """Yield each place of a window, and where padded images have it for all outputs."""
        for y in range(self.kernel_y):
            for x in range(self.kernel_x):
                top, left = y * self.step_y, x * self.step_x
                rows = slice(top, top + (self.out_height - 1) * self.stride_y + 1, self.stride_y)
                columns = slice(
                    left, left + (self.out_width - 1) * self.stride_x + 1, self.stride_x
                )
                yield y, x, (slice(None), rows, columns)

    def padded(self, image: Array | None, like: Array, value: float = 0) -> tuple[Array, Array]:
        """Return images amid padding, and the part of that inside it; None: all of ``value``."""
        height, width = self.height + 2 * self.pad_y, self.width + 2 * self.pad_x
        shape = (self.batch, height, width, self.channels)
        whole: Array = array_module(like).full(shape, value, like.dtype)
        inside = whole[:, self.pad_y : height - self.pad_y, self.pad_x : width - self.pad_x]
        if image is not None:
            inside[...] = image
        return whole, inside


def conv2d(
    x: Input,
    weight: Input,
    bias: Input | None = None,
    stride: Pair = 1,
    padding: Pair | str = 0,
    dilation: Pair = 1,
    groups: int = 1,
) -> Variable:
    """Return the cross-correlation of images with ``weight``, plus ``bias``, a new variable.

    ``y[n, o, i, j] = bias[o] + sum over c, p, q of weight[o, c, p, q] * x[n, c', i * stride +
    p * dilation - padding, j * stride + q * dilation - padding]``, with zeros around the images;
    ``c'`` is channel ``c`` of the group that ``o`` is in. float16 is computed in float32.

    Kernels of 3 x 3 with stride 1 are computed by Winograd's F(2 x 2, 3 x 3) where there are 16
    channels or more: an infinite element also makes neighbours of what it belongs to nan.

    Args:
        x: shape ``[batch, channels, height, width]``.
        weight: shape ``[out, channels / groups, kernel height, kernel width]``.
        bias: shape ``[out]``, or None.
        stride: from one window to the next, in pixels; a number or a pair (down, across).
        padding: zeros at each side; ``"same"`` for results of the size of ``x``.
        dilation: from one element of a window to the next, in pixels.
        groups: into how many the channels are divided, of which each makes its part of ``out``.

    Returns:
        Shape ``[batch, out, (height + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1,
        ...]``.

    Raises:
        ValueError: the shapes or options do not fit together, or the batch is empty.
        TypeError: an option is no integer.
    """
    x, weight = as_half(x), as_half(weight)
    bias = None if bias is None else as_half(bias)
    w = _windows_of_conv(x, weight, bias, stride, padding, dilation, groups)
    dtype = np.result_type(*(each.dtype for each in (x, weight, bias) if each is not None))

    def read(variable: Variable) -> Array:
        array = variable.data
        return widened(array if array.dtype == dtype else array.astype(dtype))

    images, filters = _channels_last(read(x)), contiguous(read(weight))
    added = None if bias is None else contiguous(read(bias))
    out = _to_output(w, images, filters, added)
    kept = filters if weight.placement is None else None  # a sharded one is read again in the end
    result = out.transpose(_CHANNELS_SECOND)
    if result.dtype != dtype:
        result = result.astype(dtype)

    def rows(grad: Array) -> Array:
        return _channels_last(widened(grad))

    # The parameters come first: their hooks fire while the input's gradient is still to compute.
    edges: list[tuple[Variable, Vjp]] = [(weight, lambda grad: _to_weight(w, rows(grad), images))]
    if bias is not None:
        edges.append((bias, lambda grad: _to_bias(w, rows(grad))))
    if x._calc_grad:

        def x_vjp(grad: Array) -> Array:
            filters = contiguous(read(weight)) if kept is None else kept
            return _to_input(w, rows(grad), filters).transpose(_CHANNELS_SECOND)

        edges.append((x, x_vjp))
    return record_all(result, edges)


def pool2d(
    x: Input,
    kernel: Pair,
    stride: Pair | None = None,
    padding: Pair = 0,
    mode: str = "max",
    count_padding: bool = True,
) -> Variable:
    """Return the largest element, or the mean, of each window of each channel, a new variable.

    Equal elements of a window: the first, row by row, gets the gradient of the maximum. float16
    is computed in float32.

    Args:
        x: shape ``[batch, channels, height, width]``.
        kernel: the size of windows in pixels; a number or a pair (down, across).
        stride: from one window to the next, in pixels; None: ``kernel``.
        padding: pixels at each side, at most half of ``kernel``; no maximum, and 0 in a mean.
        mode: ``"max"`` or ``"average"``.
        count_padding: whether a mean divides by the whole window's size, not that of its part
            inside the image.

    Returns:
        Shape ``[batch, channels, (height + 2 * padding - kernel) // stride + 1, ...]``.

    Raises:
        ValueError: the shapes or options do not fit together, or the batch is empty.
        TypeError: an option is no integer.
    """
    x = as_variable(x)
    w = _windows_of_pool(x, kernel, stride, padding, mode)
    array = x.data if x.data.dtype.kind not in "iub" else x.data.astype("float32")
    images = _channels_last(widened(array))
    out = _largest(w, images) if mode == "max" else _mean(w, images, count_padding)

    def vjp(grad: Array) -> Array:
        rows = _channels_last(widened(grad))
        if mode == "average":
            spread = _spread_mean(w, rows, count_padding)
        else:
            spread = _spread_largest(w, rows, images, out)
        return spread.transpose(_CHANNELS_SECOND)

    return record(narrowed(out.transpose(_CHANNELS_SECOND), array), (x, vjp))


# What kernels compute, images channels last; each beside the same in array operations ------------


def _native(name: str, w: _Windows, shape: tuple[int, ...], *arrays: Array | None) -> Array | None:
    """Return what a kernel computes; None: there is none for arrays like the first."""
    first = arrays[0]
    assert first is not None
    native = kernel(name, first)
    return None if native is None else native(((shape, first.dtype),), tuple(w), (), *arrays)


def _to_output(w: _Windows, images: Array, weight: Array, bias: Array | None) -> Array:
    found = _native("conv_forward", w, w.outputs, images, weight, bias)
    if found is not None:
        return found
    padded, whole = w.padded(images, images)[0], None
    for y, x, part in w.places():
        filters = weight[:, :, y, x].reshape(w.groups, -1, weight.shape[1])
        product = _by_groups(padded[part], w) @ filters.swapaxes(1, 2)
        whole = product if whole is None else whole + product
    assert whole is not None
    out: Array = whole.swapaxes(0, 1).reshape(w.outputs)
    return out if bias is None else out + bias


def _to_input(w: _Windows, grad: Array, weight: Array) -> Array:
    found = _native("conv_to_input", w, w.inputs, grad, weight)
    if found is not None:
        return found
    whole, inside = w.padded(None, grad)
    rows = _by_groups(grad, w)
    for y, x, part in w.places():
        product = rows @ weight[:, :, y, x].reshape(w.groups, -1, weight.shape[1])
        view = whole[part]
        view += product.swapaxes(0, 1).reshape(view.shape)
    return inside


def _to_weight(w: _Windows, grad: Array, images: Array) -> Array:
    shape = w.out_channels, w.channels // w.groups, w.kernel_y, w.kernel_x
    found = _native("conv_to_weight", w, shape, grad, images)
    if found is not None:
        return found
    padded = w.padded(images, images)[0]
    columns = _by_groups(grad, w).swapaxes(1, 2)
    result: Array = array_module(grad).zeros(shape, grad.dtype)
    for y, x, part in w.places():
        result[:, :, y, x] = (columns @ _by_groups(padded[part], w)).reshape(shape[:2])
    return result


def _to_bias(w: _Windows, grad: Array) -> Array:
    found = _native("conv_to_bias", w, (w.out_channels,), grad)
    return grad.sum((0, 1, 2)) if found is None else found


def _largest(w: _Windows, images: Array) -> Array:
    found = _native("pool_largest", w, w.outputs, images)
    if found is not None:
        return found
    xp, padded = array_module(images), w.padded(images, images, -np.inf)[0]
    out: Array = xp.full(w.outputs, -np.inf, images.dtype)
    for _, _, part in w.places():
        out = xp.maximum(out, padded[part])
    return out


def _spread_largest(w: _Windows, grad: Array, images: Array, out: Array) -> Array:
    found = _native("pool_spread_largest", w, w.inputs, grad, images, out)
    if found is not None:
        return found
    xp, padded = array_module(grad), w.padded(images, images, -np.inf)[0]
    whole, inside = w.padded(None, grad)
    for _, _, part in w.places():
        hit = (padded[part] == out) | (padded[part] != padded[part])  # or it is not a number
        view = whole[part]
        view += xp.where(hit, grad, 0)
        grad = xp.where(hit, 0, grad)
    return inside


def _mean(w: _Windows, images: Array, count_padding: bool) -> Array:
    found = _native("pool_mean_of_all" if count_padding else "pool_mean", w, w.outputs, images)
    if found is not None:
        return found
    padded = w.padded(images, images)[0]
    out: Array = array_module(images).zeros(w.outputs, images.dtype)
    for _, _, part in w.places():
        out += padded[part]
    return out / _counts(w, images, count_padding)


def _spread_mean(w: _Windows, grad: Array, count_padding: bool) -> Array:
    name = "pool_spread_mean_of_all" if count_padding else "pool_spread_mean"
    found = _native(name, w, w.inputs, grad)
    if found is not None:
        return found
    whole, inside = w.padded(None, grad)
    shares = grad / _counts(w, grad, count_padding)
    for _, _, part in w.places():
        view = whole[part]
        view += shares
    return inside


def _counts(w: _Windows, like: Array, count_padding: bool) -> Array:
    """Return how many elements each mean is of, for arrays of results."""

    def inside(kernel: int, stride: int, pad: int, size: int, out: int) -> list[int]:
        tops = [at * stride - pad for at in range(out)]
        return [min(top + kernel, size) - max(top, 0) for top in tops]

    rows = inside(w.kernel_y, w.stride_y, w.pad_y, w.height, w.out_height)
    columns = inside(w.kernel_x, w.stride_x, w.pad_x, w.width, w.out_width)
    area = w.kernel_y * w.kernel_x
    counts = [[[area if count_padding else a * b] for b in columns] for a in rows]
    return array_module(like).asarray(counts, like.dtype)  # type: ignore[no-any-return]


def _by_groups(array: Array, w: _Windows) -> Array:
    """Return all positions' channels as ``[groups, positions, channels of a group]``."""
    return array.reshape(-1, w.groups, array.shape[3] // w.groups).swapaxes(0, 1)


def _channels_last(images: Array) -> Array:
    return contiguous(images.transpose(_CHANNELS_LAST))


# What is given, checked --------------------------------------------------------------------------


def as_two(name: str, value: Any, least: int) -> tuple[int, int]:
    """Return an option as (down, across); ``name``: for errors.

    Raises:
        TypeError: it is neither an integer nor a pair of them.
        ValueError: it is less than ``least``.
    """
    two = (value, value) if isinstance(value, int) else value
    is_pair = isinstance(two, (tuple, list)) and len(two) == 2
    if not is_pair or not all(type(each) is int for each in two):
        raise TypeError(f"{name} must be an integer or a pair of them, got {value!r}")
    if min(two) < least:
        raise ValueError(f"{name} must be at least {least}, got {value!r}")
    return two[0], two[1]


def pad_of(name: str, padding: Any, kernel: Sequence[int], stride: Any, dilation: Any) -> Any:
    """Return ``padding`` as (down, across), of ``"same"`` too.

    Raises:
        TypeError: it is neither an integer, a pair of them, nor ``"same"``.
        ValueError: it is negative, or there is none for results of the size of the input.
    """
    if padding != "same":
        return as_two(f"{name}: padding", padding, 0)
    ends = [step * (size - 1) for step, size in zip(dilation, kernel, strict=True)]
    if tuple(stride) != (1, 1) or any(end % 2 for end in ends):
        raise ValueError(
            f"{name}: padding='same' needs a stride of 1 and windows of an odd size, got stride "
            f"{stride} and a kernel of {tuple(kernel)}, dilated by {dilation}"
        )
    return ends[0] // 2, ends[1] // 2


def _windows_of_conv(
    x: Variable,
    weight: Variable,
    bias: Variable | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    groups: int,
) -> _Windows:
    stride, dilation = as_two("conv2d: stride", stride, 1), as_two("conv2d: dilation", dilation, 1)
    if weight.ndim != 4 or not weight.size:
        raise ValueError(
            "conv2d: expected a weight of shape [out, channels / groups, height, width], got "
            f"{weight.shape}"
        )
    out, in_group, *kernel = weight.shape
    if type(groups) is not int or groups < 1 or out % groups:
        raise ValueError(
            f"conv2d: groups must divide the {out} output channels of a weight of shape "
            f"{weight.shape}, got {groups!r}"
        )
    pad = pad_of("conv2d", padding, kernel, stride, dilation)
    expected = f"[batch, {in_group * groups}, height, width] for a weight of shape {weight.shape}"
    if groups > 1:
        expected += f" and {groups} groups"
    w = _windows("conv2d", x, expected, out, kernel, stride, pad, dilation, groups)
    if w.channels != in_group * groups:
        raise ValueError(f"conv2d: expected x of shape {expected}, got {x.shape}")
    if bias is not None and bias.shape != (out,):
        raise ValueError(
            f"conv2d: expected bias of shape ({out},) for a weight of shape {weight.shape}, got "
            f"{bias.shape}"
        )
    return w


def _windows_of_pool(x: Variable, kernel: Any, stride: Any, padding: Any, mode: str) -> _Windows:
    check_mode("pool2d", mode)
    kernel = as_two("pool2d: kernel", kernel, 1)
    stride = kernel if stride is None else as_two("pool2d: stride", stride, 1)
    pad = as_two("pool2d: padding", padding, 0)
    if any(2 * p > k for p, k in zip(pad, kernel, strict=True)):
        raise ValueError(
            f"pool2d: padding must be at most half of the kernel {kernel}, got {padding!r}"
        )
    channels = x.shape[1] if x.ndim > 1 else 1
    expected = "[batch, channels, height, width]"
    return _windows("pool2d", x, expected, channels, kernel, stride, pad, (1, 1), 1)


def check_mode(name: str, mode: str) -> None:
    """Raise a ValueError unless it is ``"max"`` or ``"average"``; ``name``: for it."""
    if mode not in ("max", "average"):
        raise ValueError(f"{name}: mode must be 'max' or 'average', got {mode!r}")


def _windows(
    name: str,
    x: Variable,
    expected: str,
    out_channels: int,
    kernel: Sequence[int],
    stride: Sequence[int],
    pad: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> _Windows:
    if x.ndim != 4 or not x.shape[0] or not x.shape[1]:
        raise ValueError(f"{name}: expected x of shape {expected}, none empty, got {x.shape}")
    batch, channels, *size = x.shape
    spans = [step * (k - 1) + 1 for step, k in zip(dilation, kernel, strict=True)]
    beyond = [n + 2 * p - span for n, p, span in zip(size, pad, spans, strict=True)]
    if min(beyond) < 0 or not min(size):
        raise ValueError(
            f"{name}: windows of {spans[0]} x {spans[1]} pixels do not fit in x of shape "
            f"{x.shape} with padding {tuple(pad)}"
        )
    outs = [rest // step + 1 for rest, step in zip(beyond, stride, strict=True)]
    return _Windows(
        *(batch, *size, channels, *outs, out_channels),
        *(*kernel, *stride, *pad, *dilation, groups),
    )
