"""Batch normalization over the batch of this process or of all ranks."""

from functools import partial

import numpy as np

from flashlight_py.autograd import Variable
from flashlight_py.autograd import functions as F
from flashlight_py.autograd.functions.normalization import few_values
from flashlight_py.device import array_module
from flashlight_py.distributed.internal import group_or_world, reject_together
from flashlight_py.nn.layers import LocalBatchNorm
from flashlight_py.parallel.functional import all_reduce
from flashlight_py.structure import require_all


class BatchNorm(LocalBatchNorm):
    """Normalization of each channel over the batch; see ``functions.batch_norm``.

    Evaluation uses ``running_mean`` and ``running_var``, which start at 0 and 1. Each training
    batch sets them to ``(1 - momentum) * running + momentum * new``; ``new`` is the mean or the
    variance of the batch. For this variance, the sum of squared deviations is divided by ``n - 1``,
    where n is the number of values of a channel.

    Args:
        channels: Size of the second dimension of the input.
        momentum: Weight of a new batch in the running statistics.
        affine: Whether the module has a weight and a bias.
        track_statistics: Whether the module has running statistics.
        sync: Whether statistics cover the batches of all ranks of the world. Calls in training and
            their backward passes are then collective.

    Raises:
        ValueError: If ``channels`` is below 1. A call raises it if the second dimension of the
            input is not ``channels`` or, in training, if the input has only one value per channel.
    """

    def __init__(
        self, channels: int, momentum: float = 0.1, eps: float = 1e-5, affine: bool = True,
        track_statistics: bool = True, sync: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(channels, momentum, eps, affine, track_statistics)
        self.sync = sync

    def forward(self, x: Variable) -> Variable:
        """Return ``x`` normalized, a new variable. Training updates running statistics."""
        if not self.sync or (self.track_statistics and not self.training):
            return super().forward(x)
        with reject_together(group_or_world(None), "BatchNorm", arrays=[x], first=True):
            return self._synchronized(self._of_channels(x))

    def _synchronized(self, x: Variable) -> Variable:
        xp, axes = array_module(x.data), (0, *range(2, x.ndim))
        wide = x if x.data.dtype.char in "fd" else F.astype(x, np.float32)
        local_count = x.size // self.channels
        count = xp.full(1, local_count, wide.dtype)
        sums = all_reduce(F.concatenate([F.sum(wide, axes), count]))
        count = sums.data[-1:]
        if local_count < 2:  # with at least 2 values here, all ranks together have enough
            require_all(count > 1, count, partial(few_values, "BatchNorm", x.shape))
        shape = (1, -1, *[1] * (x.ndim - 2))
        mean = sums[: self.channels] / count
        deviation = wide - F.reshape(mean, shape)
        variance = all_reduce(F.sum(deviation * deviation, axes)) / count
        self._track(mean.data, variance.data, count)
        scale = 1 / F.sqrt(variance + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        out = deviation * F.reshape(scale, shape)
        out = out if self.bias is None else out + F.reshape(self.bias, shape)
        return out if out.dtype == x.dtype else F.astype(out, x.dtype)
