"""Layers that normalize, with the names and shapes of torch's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

import numpy as np

from flashlight_py.autograd import Variable, param
from flashlight_py.autograd import functions as F
from flashlight_py.autograd.functions.normalization import batch_norm_with_moments
from flashlight_py.device import Array, array_module
from flashlight_py.nn.layers import check_sizes
from flashlight_py.nn.module import Module


class _Affine(Module):
    """A layer with a weight of ones and a bias of zeros, or without them."""

    def __init__(self, shape: Sequence[int], weight: bool, bias: bool, eps: float) -> None:
        check_sizes(type(self).__name__, **{f"size {i}": n for i, n in enumerate(shape)})
        self.weight = param(np.ones(shape, np.float32)) if weight else None
        self.bias = param(np.zeros(shape, np.float32)) if bias else None
        self.eps = eps

    def __repr__(self) -> str:
        shape = () if self.weight is None else self.weight.shape
        return f"{type(self).__name__}({', '.join(map(str, shape))})"


class LayerNorm(_Affine):
    """Each position less its mean, and divided by its deviation; see ``functions.layer_norm``.

    Args:
        shape: of the last dimensions, those that are normalized; a number for one.
        eps: what is added to the variance.
        bias: whether there is a bias.

    Raises:
        ValueError: a size is below 1; when called: the input does not end with the shape.
    """

    def __init__(self, shape: int | Sequence[int], eps: float = 1e-5, bias: bool = True) -> None:
        super().__init__((shape,) if isinstance(shape, int) else tuple(shape), True, bias, eps)

    def forward(self, x: Variable) -> Variable:
        return F.layer_norm(x, self.weight, self.bias, self.eps)


class RMSNorm(_Affine):
    """Each position divided by the root of its mean square; see ``functions.rms_norm``.

    Args:
        size: of the last dimension.
        eps: what is added to the mean square.

    Raises:
        ValueError: the size is below 1; when called: the input's last dimension differs.
    """

    def __init__(self, size: int, eps: float = 1e-5) -> None:
        super().__init__((size,), True, False, eps)

    def forward(self, x: Variable) -> Variable:
        return F.rms_norm(x, self.weight, self.eps)


class GroupNorm(_Affine):
    """Groups of channels of each sample, normalized; see ``functions.group_norm``.

    Args:
        groups: how many groups the channels are divided into.
        channels: the size of the input's second dimension, a multiple of ``groups``.
        eps: what is added to the variance.

    Raises:
        ValueError: the channels are not divisible by ``groups``; when called: the input has others.
    """

    def __init__(self, groups: int, channels: int, eps: float = 1e-5) -> None:
        check_sizes("GroupNorm", groups=groups)
        super().__init__((channels,), True, True, eps)
        if channels % groups:
            raise ValueError(f"GroupNorm: {channels} channels are not divisible by {groups} groups")
        self.groups = groups

    def forward(self, x: Variable) -> Variable:
        return F.group_norm(x, self.groups, self.weight, self.bias, self.eps)

    def __repr__(self) -> str:
        return f"GroupNorm({self.groups}, {self.weight.shape[0]})"  # type: ignore[union-attr]


class BatchNorm(_Affine):
    """Each channel normalized over the batch; see ``functions.batch_norm``.

    In evaluation by ``running_mean`` and ``running_var`` instead: ``(1 - momentum) * running +
    momentum * new`` of each batch in training, the variance divided by ``n - 1``, from 0 and 1.

    Args:
        channels: the size of the input's second dimension.
        momentum: see above.
        eps: what is added to the variance.
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
        super().__init__((channels,), affine, affine, eps)
        self.channels, self.momentum, self.track_statistics = channels, momentum, track_statistics
        if track_statistics:
            self.add_buffer("running_mean", np.zeros(channels, np.float32))
            self.add_buffer("running_var", np.ones(channels, np.float32))
        # By its name: this package lies below that of collectives, and most layers need none.
        self.sync = sync
        if sync:
            import_module("flashlight_py.parallel.functional")

    running_mean: Array
    running_var: Array

    def forward(self, x: Variable) -> Variable:
        """Return ``x`` normalized; in training, running statistics are changed in place.

        Raises:
            ValueError: another number of channels, or in training one value per channel only.
        """
        if x.ndim < 2 or x.shape[1] != self.channels:
            raise ValueError(
                f"BatchNorm: expected input of shape [N, {self.channels}, ...], got {x.shape}"
            )
        if not self.training and self.track_statistics:
            given = self.running_mean, self.running_var
            return F.batch_norm(x, self.weight, self.bias, *given, self.eps)
        if self.sync:
            return self._synchronized(x)
        out, mean, variance = batch_norm_with_moments(
            x, self.weight, self.bias, None, None, self.eps
        )
        count = x.size // self.channels
        self._track(mean, variance * (count / (count - 1)))
        return out

    def _synchronized(self, x: Variable) -> Variable:
        all_reduce = import_module("flashlight_py.parallel.functional").all_reduce
        xp, axes = array_module(x.data), (0, *range(2, x.ndim))
        wide = x if x.data.dtype.char in "fd" else F.astype(x, np.float32)
        own = x.size // self.channels
        # Not by the sum of all ranks' counts, which a captured step could not look at.
        if own + import_module("flashlight_py.distributed").get_world_size() < 3:
            raise ValueError(
                f"BatchNorm: needs more than one value per channel, got input of shape {x.shape}; "
                "train with larger batches, or call eval() on the module"
            )
        count = xp.full(1, own, wide.dtype)
        sums = all_reduce(F.concatenate([F.sum(wide, axes), count]))
        count = sums.data[-1:]
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
        if not self.track_statistics:
            return
        for running, new in ((self.running_mean, mean), (self.running_var, variance)):
            running[...] = running * (1 - self.momentum) + new * self.momentum

    def __repr__(self) -> str:
        return f"BatchNorm({self.channels})"
