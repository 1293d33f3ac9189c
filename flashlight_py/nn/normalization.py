"""Layers that normalize, with the names and shapes of torch's parameters.

``eps`` is added to the variance or mean square.
"""

from collections.abc import Sequence
from functools import partial
from importlib import import_module

import numpy as np

from flashlight_py.autograd import Variable, param
from flashlight_py.autograd import functions as F
from flashlight_py.autograd.functions.elementwise import as_variable
from flashlight_py.autograd.functions.normalization import batch_norm_with_moments, few_values
from flashlight_py.autograd.variable import Input
from flashlight_py.device import Array, array_module
from flashlight_py.nn.layers import Plain, check_sizes
from flashlight_py.structure import require


class _Affine(Plain):
    """A layer with a weight of ones and a bias of zeros, or without them."""

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


class LayerNorm(_Affine):
    """Normalization over the last dimensions, of the given ``shape``; see ``functions.layer_norm``.

    Raises:
        ValueError: a size is below 1; when called: the input does not end with the shape.
    """

    def __init__(self, shape: int | Sequence[int], eps: float = 1e-5, bias: bool = True) -> None:
        sizes = (shape,) if isinstance(shape, (int, np.integer)) else shape
        self.shape = check_sizes("LayerNorm", **{f"shape[{i}]": n for i, n in enumerate(sizes)})
        super().__init__(self.shape, True, bias, eps)

    def forward(self, x: Variable) -> Variable:
        return F.layer_norm(x, self.weight, self.bias, self.eps)


class RMSNorm(_Affine):
    """Division by the root of the mean square of the last dimension; see ``functions.rms_norm``.

    Raises:
        ValueError: ``size`` is below 1; when called: the input's last dimension differs.
    """

    def __init__(self, size: int, eps: float = 1e-5) -> None:
        (self.size,) = shape = check_sizes("RMSNorm", size=size)
        super().__init__(shape, True, False, eps)

    def forward(self, x: Variable) -> Variable:
        return F.rms_norm(x, self.weight, self.eps)


class GroupNorm(_Affine):
    """Groups of ``channels``, dimension 1, of each sample normalized; see ``functions.group_norm``.

    Raises:
        ValueError: the channels are not divisible by ``groups``; when called: the input has others.
    """

    def __init__(self, groups: int, channels: int, eps: float = 1e-5) -> None:
        groups, channels = check_sizes("GroupNorm", groups=groups, channels=channels)
        self.groups, self.channels = groups, channels
        super().__init__((channels,), True, True, eps)
        if channels % groups:
            raise ValueError(f"GroupNorm: {channels} channels are not divisible by {groups} groups")

    def forward(self, x: Variable) -> Variable:
        return F.group_norm(self._of_channels(x), self.groups, self.weight, self.bias, self.eps)


class BatchNorm(_Affine):
    """Each channel normalized over the batch; see ``functions.batch_norm``.

    In evaluation by ``running_mean`` and ``running_var`` instead: ``(1 - momentum) * running +
    momentum * new`` of each batch in training, the variance divided by ``n - 1``, from 0 and 1.

    Args:
        channels: the size of the input's second dimension.
        momentum: see above.
        affine: whether there are a weight and a bias.
        track_statistics: whether there are running statistics.
        sync: whether a batch is what all ranks of the world have, together: each call in training
            and its backward pass are collective.

    Raises:
        ValueError: a size is below 1; when called: the input has another number of channels, or
            in training one value per channel only.
    """

    def __init__(
        self, channels: int, momentum: float = 0.1, eps: float = 1e-5, affine: bool = True,
        track_statistics: bool = True, sync: bool = False,
    ) -> None:  # fmt: skip
        (channels,) = shape = check_sizes("BatchNorm", channels=channels)
        self.channels, self.momentum = channels, momentum
        super().__init__(shape, affine, affine, eps)
        self.track_statistics, self.sync = track_statistics, sync
        if track_statistics:
            self.add_buffer("running_mean", np.zeros(channels, np.float32))
            self.add_buffer("running_var", np.ones(channels, np.float32))
        if sync:  # by its name: this package lies below that of collectives, and most need none
            import_module("flashlight_py.parallel.functional")

    running_mean: Array
    running_var: Array

    def forward(self, x: Variable) -> Variable:
        """Return ``x`` normalized; in training, running statistics are changed in place."""
        if self.sync and (self.training or not self.track_statistics):
            calls = import_module("flashlight_py.distributed.api.verb_call")
            with calls.refusing(calls.of(None), "BatchNorm", given=[x], first=True):
                return self._synchronized(self._of_channels(x))
        x = self._of_channels(x)
        if not self.training and self.track_statistics:
            running = self.running_mean, self.running_var
            return F.batch_norm(x, self.weight, self.bias, *running, self.eps)
        given = x, self.weight, self.bias, None, None
        out, mean, variance = batch_norm_with_moments(*given, self.eps)
        count = x.size // self.channels
        self._track(mean, variance * (count / (count - 1)))
        return out

    def _synchronized(self, x: Variable) -> Variable:
        all_reduce = import_module("flashlight_py.parallel.functional").all_reduce
        xp, axes = array_module(x.data), (0, *range(2, x.ndim))
        wide = x if x.data.dtype.char in "fd" else F.astype(x, np.float32)
        own = x.size // self.channels
        count = xp.full(1, own, wide.dtype)
        sums = all_reduce(F.concatenate([F.sum(wide, axes), count]))
        count = sums.data[-1:]
        if own < 2:  # else all ranks have enough values together
            require(count > 1, count, partial(few_values, "BatchNorm", x.shape))
        shape = (1, -1, *[1] * (x.ndim - 2))
        mean = sums[: self.channels] / count
        deviation = wide - F.reshape(mean, shape)
        variance = all_reduce(F.sum(deviation * deviation, axes)) / count
        self._track(mean.data, variance.data * (count / (count - 1)))
        scale = 1 / F.sqrt(variance + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        out = deviation * F.reshape(scale, shape)
        out = out if self.bias is None else out + F.reshape(self.bias, shape)
        return out if out.dtype == x.dtype else F.astype(out, x.dtype)

    def _track(self, mean: Array, variance: Array) -> None:
        if self.track_statistics:
            for running, new in ((self.running_mean, mean), (self.running_var, variance)):
                running[...] = running * (1 - self.momentum) + new * self.momentum
