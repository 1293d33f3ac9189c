"""Layers for images: convolution and pooling."""

import math
from typing import Any

from flashlight_py.autograd import Variable, param
from flashlight_py.autograd import functions as F
from flashlight_py.autograd.functions import convolution
from flashlight_py.autograd.functions.convolution import Pair, as_two, pad_of, pool_options
from flashlight_py.autograd.functions.elementwise import as_variable
from flashlight_py.autograd.precision import as_floating
from flashlight_py.device import array_module
from flashlight_py.nn import init
from flashlight_py.nn.layers import Function, Plain, check_sizes


class Conv2D(Plain):
    """Convolution of images ``[batch, in_channels, height, width]``: see ``functions.conv2d``.

    The weight ``[out_channels, in_channels / groups, kernel height, kernel width]`` is initialised
    uniformly within ``sqrt(3 / fan_in)`` of 0, and the bias ``[out_channels]`` within ``1 /
    sqrt(fan_in)``, as in flashlight. ``fan_in`` is the number of inputs of an output element.
    ``kernel`` is the window size in pixels: a number or (down, across).

    Raises:
        ValueError: If a size is too small, or if ``groups`` does not divide the channels, or,
            in a call, if the input does not fit.
        TypeError: If a size is not an integer.
    """

    _swaps = False  # whether in_channels is the first dimension of the weight

    def __init__(
        self, in_channels: int, out_channels: int, kernel: Pair, stride: Pair = 1,
        padding: Pair | str = 0, dilation: Pair = 1, groups: int = 1, bias: bool = True,
        dtype: Any = "float32",
    ) -> None:  # fmt: skip
        name = type(self).__name__
        sizes = {"in_channels": in_channels, "out_channels": out_channels, "groups": groups}
        in_channels, out_channels, groups = check_sizes(name, **sizes)
        if in_channels % groups or out_channels % groups:
            channels = f"in_channels ({in_channels}) and out_channels ({out_channels})"
            raise ValueError(f"{name}: groups must divide {channels}, got {groups}")
        self.in_channels, self.out_channels = in_channels, out_channels
        self.kernel = size = as_two(f"{name}: kernel", kernel, 1)
        self.stride = as_two(f"{name}: stride", stride, 1)
        self.dilation = as_two(f"{name}: dilation", dilation, 1)
        self.padding: tuple[int, int] = pad_of(name, padding, size, self.stride, self.dilation)
        self.groups = groups
        ends = (in_channels, out_channels) if self._swaps else (out_channels, in_channels)
        shape = (ends[0], ends[1] // groups, *size)
        fan_in = math.prod(shape[1:])
        bound = fan_in**-0.5
        self.weight = param(init.kaiming_uniform(shape, fan_in, dtype))
        self.bias = param(init.uniform((out_channels,), -bound, bound, dtype)) if bias else None

    def forward(self, x: Variable) -> Variable:
        options = self.stride, self.padding, self.dilation, self.groups
        return F.conv2d(x, self.weight, self.bias, *options)


class Conv1D(Conv2D):
    """Convolution of sequences ``[batch, in_channels, time]``, by a :class:`Conv2D` of height 1.

    The weight has shape ``[out_channels, in_channels / groups, kernel]``. Options are integers.
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel: int, stride: int = 1,
        padding: int | str = 0, dilation: int = 1, groups: int = 1, bias: bool = True,
        dtype: Any = "float32",
    ) -> None:  # fmt: skip
        check_sizes("Conv1D", kernel=kernel, stride=stride, dilation=dilation)
        pad = padding if padding == "same" else (0, *check_sizes("Conv1D", 0, padding=padding))
        options: Any = (1, kernel), (1, stride), pad, (1, dilation), groups, bias, dtype
        super().__init__(in_channels, out_channels, *options)
        self.weight = param(self.weight.data[:, :, 0])

    def forward(self, x: Variable) -> Variable:
        x = as_variable(x)
        least = max(self.dilation[1] * (self.kernel[1] - 1) + 1 - 2 * self.padding[1], 1)
        if x.ndim != 3 or x.shape[1] != self.in_channels or not len(x) or x.shape[2] < least:
            raise ValueError(
                f"Conv1D: expected x of shape [batch, {self.in_channels}, time] with batch > 0 and "
                f"time >= {least}, got {x.shape}"
            )
        options = self.bias, self.stride, self.padding, self.dilation, self.groups
        return F.squeeze(F.conv2d(F.expand_dims(x, 2), F.expand_dims(self.weight, 2), *options), 2)


class ConvTranspose2D(Conv2D):
    """Transposed convolution: the gradient of a :class:`Conv2D` with respect to its input.

    The input has shape ``[batch, in_channels, height, width]``. The result has shape ``[batch,
    out_channels, (height - 1) * stride - 2 * padding + dilation * (kernel - 1) + 1 +
    output_padding, ...]``. The weight has shape ``[in_channels, out_channels / groups, kernel
    height, kernel width]``. Arguments are in torch's order.

    Raises:
        ValueError: If ``output_padding`` is not below ``stride``, or as in :class:`Conv2D`.
    """

    _swaps = True

    def __init__(
        self, in_channels: int, out_channels: int, kernel: Pair, stride: Pair = 1,
        padding: Pair | str = 0, output_padding: Pair = 0, groups: int = 1, bias: bool = True,
        dilation: Pair = 1, dtype: Any = "float32",
    ) -> None:  # fmt: skip
        options = kernel, stride, padding, dilation, groups, bias, dtype
        super().__init__(in_channels, out_channels, *options)
        self.output_padding = more = as_two("ConvTranspose2D: output_padding", output_padding, 0)
        if more[0] >= self.stride[0] or more[1] >= self.stride[1]:
            stride = self.stride
            raise ValueError(f"ConvTranspose2D: output_padding must be below {stride=}, got {more}")

    def forward(self, x: Variable) -> Variable:
        options = self.stride, self.padding, self.dilation, self.groups, self.output_padding
        return convolution.conv_transpose2d(x, self.weight, self.bias, *options)


class Upsample(Plain):
    """Enlargement of ``[..., height, width]`` by ``scale``, a number or (down, across).

    ``mode="nearest"`` repeats pixels. ``mode="bilinear"`` interpolates between pixel centres, like
    torch with ``align_corners=False``.

    Raises:
        ValueError: If ``scale`` is below 1, if the mode is unknown, or, in a call, if the input has
            less than two dimensions.
    """

    def __init__(self, scale: Pair = 2, mode: str = "nearest") -> None:
        if mode not in ("nearest", "bilinear"):
            raise ValueError(f"Upsample: mode must be 'nearest' or 'bilinear', got {mode!r}")
        self.scale, self.mode = as_two("Upsample: scale", scale, 1), mode

    def forward(self, x: Variable) -> Variable:
        x = as_variable(x)
        if x.ndim < 2:
            raise ValueError(f"Upsample: expected x of shape [..., height, width], got {x.shape}")
        (*outer, height, width), (down, across) = x.shape, self.scale
        if self.mode == "bilinear":
            return _interpolated(_interpolated(as_floating(x), 1, across), 2, down)
        tiled = F.tile(F.reshape(x, (*outer, height, 1, width, 1)), (down, 1, across))
        return F.reshape(tiled, (*outer, height * down, width * across))


def _interpolated(x: Variable, axis: int, scale: int) -> Variable:
    """Enlarge dimension ``-axis`` of ``x`` by the factor ``scale``, with linear interpolation."""
    xp, size = array_module(x.data), x.shape[-axis]
    centres = ((xp.arange(size * scale) + 0.5) / scale - 0.5).clip(0)
    before = centres.astype("int64")
    share = (centres - before).astype(x.dtype).reshape(-1, *[1] * (axis - 1))
    rest = (slice(None),) * (axis - 1)
    after = (before + 1).clip(max=size - 1)
    first, second = F.index(x, (..., before, *rest)), F.index(x, (..., after, *rest))
    return F.add(F.mul(first, 1 - share), F.mul(second, share))


class Pool2D(Function):
    """The maximum or the mean of windows. See ``functions.pool2d`` for options and errors."""

    def __init__(
        self, kernel: Pair, stride: Pair | None = None, padding: Pair = 0, mode: str = "max"
    ) -> None:
        kernel, stride, padding = pool_options("Pool2D", kernel, stride, padding, mode)
        super().__init__(F.pool2d, kernel=kernel, stride=stride, padding=padding, mode=mode)
