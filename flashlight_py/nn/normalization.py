"""Normalization layers, with the names and shapes of torch's parameters.

``eps`` is added to the variance or mean square.
"""

from collections.abc import Sequence

import numpy as np

from flashlight_py.autograd import Variable, param
from flashlight_py.autograd import functions as F
from flashlight_py.autograd.functions.elementwise import as_variable
from flashlight_py.autograd.functions.normalization import batch_norm_with_moments
from flashlight_py.autograd.variable import Input
from flashlight_py.device import Array
from flashlight_py.nn.layers import Plain, check_sizes


class Affine(Plain):
    """A layer with an optional weight of ones and an optional bias of zeros."""

    channels: int

    def __init__(self, shape: Sequence[int], weight: bool, bias: bool, eps: float) -> None:
        self.weight = param(np.ones(shape, np.float32)) if weight else None
        self.bias = param(np.zeros(shape, np.float32)) if bias else None
        self.eps = eps

    def _of_channels(self, x: Input) -> Variable:
        x = as_variable(x)
        if x.ndim < 2 or x.shape[1] != self.channels:
            raise ValueError(
                f"{type(self).__name__}: expected input of shape [N, {self.channels}, ...], got "
                f"{x.shape}"
            )
        return x


class LayerNorm(Affine):
    """Normalization over the last dimensions, of sizes ``shape``. See ``functions.layer_norm``.

    Raises ValueError if a size is below 1, or, in a call, if the input does not fit.
    """

    def __init__(self, shape: int | Sequence[int], eps: float = 1e-5, bias: bool = True) -> None:
        sizes = (shape,) if isinstance(shape, (int, np.integer)) else shape
        self.shape = check_sizes("LayerNorm", **{f"shape[{i}]": n for i, n in enumerate(sizes)})
        super().__init__(self.shape, True, bias, eps)

    def forward(self, x: Variable) -> Variable:
        return F.layer_norm(x, self.weight, self.bias, self.eps)


class RMSNorm(Affine):
    """Division by the root mean square of the last dimension. See ``functions.rms_norm``.

    Raises ValueError if ``size`` is below 1, or, in a call, if the last dimension is not ``size``.
    """

    def __init__(self, size: int, eps: float = 1e-5) -> None:
        (self.size,) = shape = check_sizes("RMSNorm", size=size)
        super().__init__(shape, True, False, eps)

    def forward(self, x: Variable) -> Variable:
        return F.rms_norm(x, self.weight, self.eps)


class GroupNorm(Affine):
    """Normalization of groups of channels. See ``functions.group_norm``.

    Raises:
        ValueError: If ``groups`` does not divide ``channels``, or, in a call, if dimension 1 of
            the input is not ``channels``.
    """

    def __init__(self, groups: int, channels: int, eps: float = 1e-5) -> None:
        groups, channels = check_sizes("GroupNorm", groups=groups, channels=channels)
        self.groups, self.channels = groups, channels
        super().__init__((channels,), True, True, eps)
        if channels % groups:
            raise ValueError(f"GroupNorm: groups must divide {channels} channels, got {groups}")

    def forward(self, x: Variable) -> Variable:
        return F.group_norm(self._of_channels(x), self.groups, self.weight, self.bias, self.eps)


class LocalBatchNorm(Affine):
    """Batch normalization over the batch of this process. ``parallel.batch_norm`` extends it."""

    running_mean: Array
    running_var: Array

    def __init__(
        self, channels: int, momentum: float, eps: float, affine: bool, track_statistics: bool
    ) -> None:
        (channels,) = shape = check_sizes("BatchNorm", channels=channels)
        self.channels, self.momentum = channels, momentum
        super().__init__(shape, affine, affine, eps)
        self.track_statistics = track_statistics
        if track_statistics:
            self.add_buffer("running_mean", np.zeros(channels, np.float32))
            self.add_buffer("running_var", np.ones(channels, np.float32))

    def forward(self, x: Variable) -> Variable:
        x = self._of_channels(x)
        if not self.training and self.track_statistics:
            running = self.running_mean, self.running_var
            return F.batch_norm(x, self.weight, self.bias, *running, self.eps)
        arguments = x, self.weight, self.bias, None, None
        out, mean, variance = batch_norm_with_moments(*arguments, self.eps)
        self._track(mean, variance, x.size // self.channels)
        return out

    def _track(self, mean: Array, variance: Array, count: int | Array) -> None:
        """Update running statistics in place, from statistics of ``count`` values per channel."""
        if self.track_statistics:
            variance = variance * (count / (count - 1))
            for running, new in ((self.running_mean, mean), (self.running_var, variance)):
                running[...] = running * (1 - self.momentum) + new * self.momentum
