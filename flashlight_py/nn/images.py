"""Layers of images: convolution and pooling."""

from __future__ import annotations

import math
from typing import Any

from flashlight_py.autograd import Variable, param
from flashlight_py.autograd import functions as F
from flashlight_py.autograd.functions.convolution import Pair, as_two, check_mode, pad_of
from flashlight_py.nn import init
from flashlight_py.nn.layers import Plain, check_sizes
from flashlight_py.nn.module import Module


class Conv2D(Module):
    """Convolution of images ``[batch, in_channels, height, width]``: see ``functions.conv2d``.

    The weight ``[out_channels, in_channels / groups, kernel height, kernel width]`` starts uniform
    within ``sqrt(3 / fan_in)`` of 0, the bias ``[out_channels]`` uniform within
    ``1 / sqrt(fan_in)``, as in flashlight; ``fan_in`` is how many elements an output is made of.

    Args:
        in_channels: of the input, at least 1.
        out_channels: of the result, at least 1.
        kernel: the size of windows in pixels; a number or a pair (down, across).
        bias: whether there is a bias.
        dtype: of the parameters.

    Other arguments are those of the function.

    Raises:
        ValueError: a size is too small, or ``groups`` does not divide the channels; when called:
            the input does not fit.
        TypeError: a size is not an integer.
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel: Pair, stride: Pair = 1,
        padding: Pair | str = 0, dilation: Pair = 1, groups: int = 1, bias: bool = True,
        dtype: Any = "float32",
    ) -> None:  # fmt: skip
        sizes = {"in_channels": in_channels, "out_channels": out_channels, "groups": groups}
        in_channels, out_channels, groups = check_sizes("Conv2D", **sizes)
        if in_channels % groups or out_channels % groups:
            raise ValueError(
                f"Conv2D: groups must divide in_channels ({in_channels}) and out_channels "
                f"({out_channels}), got {groups}"
            )
        size = as_two("Conv2D: kernel", kernel, 1)
        self.stride = as_two("Conv2D: stride", stride, 1)
        self.dilation = as_two("Conv2D: dilation", dilation, 1)
        self.padding: tuple[int, int] = pad_of("Conv2D", padding, size, self.stride, self.dilation)
        self.groups = groups
        shape = (out_channels, in_channels // groups, *size)
        fan_in = math.prod(shape[1:])
        bound = fan_in**-0.5
        self.weight = param(init.kaiming_uniform(shape, fan_in, dtype))
        self.bias = param(init.uniform(shape[:1], -bound, bound, dtype)) if bias else None

    def forward(self, x: Variable) -> Variable:
        options = self.stride, self.padding, self.dilation, self.groups
        return F.conv2d(x, self.weight, self.bias, *options)

    def __repr__(self) -> str:
        out_channels, in_group, *kernel = self.weight.shape
        return (
            f"Conv2D({in_group * self.groups}, {out_channels}, {tuple(kernel)}, {self.stride}, "
            f"{self.padding}, {self.dilation}, {self.groups}, bias={self.bias is not None})"
        )


class Pool2D(Plain):
    """The largest element or the mean of windows: see ``functions.pool2d``, also for arguments.

    Raises:
        ValueError: a size is out of range, or an unknown mode; when called: the input does not fit.
        TypeError: a size is not an integer.
    """

    def __init__(
        self, kernel: Pair, stride: Pair | None = None, padding: Pair = 0, mode: str = "max"
    ) -> None:
        check_mode("Pool2D", mode)
        self.kernel = as_two("Pool2D: kernel", kernel, 1)
        self.stride = self.kernel if stride is None else as_two("Pool2D: stride", stride, 1)
        self.padding = as_two("Pool2D: padding", padding, 0)
        self.mode = mode

    def forward(self, x: Variable) -> Variable:
        return F.pool2d(x, self.kernel, self.stride, self.padding, self.mode)
