"""Batch normalization, over the batch of this process or of all ranks."""

from functools import partial

import numpy as np

from flashlight_py.autograd import Variable
from flashlight_py.autograd import functions as F
from flashlight_py.autograd.functions.normalization import few_values
from flashlight_py.device import array_module
from flashlight_py.distributed.internal import group_or_world, reject_together
from flashlight_py.nn.normalization import LocalBatchNorm
from flashlight_py.parallel.functional import all_reduce
from flashlight_py.structure import require


class BatchNorm(LocalBatchNorm):
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
        super().__init__(channels, momentum, eps, affine, track_statistics)
        self.sync = sync

    def forward(self, x: Variable) -> Variable:
        """Return ``x`` normalized; in training, running statistics are changed in place."""
        if not self.sync or (self.track_statistics and not self.training):
            return super().forward(x)
        with reject_together(group_or_world(None), "BatchNorm", arrays=[x], first=True):
            return self._synchronized(self._of_channels(x))

    def _synchronized(self, x: Variable) -> Variable:
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
        self._track(mean.data, variance.data, count)
        scale = 1 / F.sqrt(variance + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        out = deviation * F.reshape(scale, shape)
        out = out if self.bias is None else out + F.reshape(self.bias, shape)
        return out if out.dtype == x.dtype else F.astype(out, x.dtype)
