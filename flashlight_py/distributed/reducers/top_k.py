"""Sending the largest values alone, and what was left out in later steps."""

from __future__ import annotations

import math

import numpy as np

from flashlight_py.device import Array, array_module, is_cupy
from flashlight_py.distributed.reducers.hook import Bucket, Compression
from flashlight_py.distributed.work import Done, Then, Work

# Looking for candidates among more values than these is faster than sorting all of them partly.
_SAMPLED_FROM = 1 << 16
_SAMPLES = 1 << 13


class TopKCompression(Compression):
    """Sends the values of largest magnitude of each array, with their indices.

    Values that a rank leaves out are added to its next gradient (error feedback), so that nothing
    is lost, only late: at any time the sum of what was sent and of what is left over is the sum of
    the gradients. Values are exact. Each rank chooses its own; all gather them all and add them up
    in rank order.

    Stich, Cordonnier, Jaggi: Sparsified SGD with Memory (2018). Lin, Han, Mao, Wang, Dally: Deep
    Gradient Compression (2018); its momentum correction is not here. Late values arrive in large
    pieces, and momentum pushes them further: with it, take a larger ratio or a smaller learning
    rate (docs/compression.md shows an example).

    A rank sends ``k * (itemsize + 4)`` bytes to each other one: with n ranks this pays while
    ``ratio`` is well below ``1 / n``. Takes memory for one more gradient. A gradient with NaN or
    infinities arrives as such on every rank, and the rest of that step is forgotten.

    Args:
        ratio: share of the values of each array that is sent, above 0, at most 1; at least one is.

    Raises:
        TypeError: ``ratio`` is no real number.
        ValueError: it is not above 0 and at most 1.

    Example:
        >>> hook = fl.TopKCompression(ratio=0.25)
        >>> gradient = np.array([0.1, -4.0, 2.0, 3.0])
        >>> reducer = fl.CoalescingReducer(scale=1.0, hook=hook)
        >>> reducer.add(gradient)
        >>> reducer.finalize()
        >>> gradient.tolist()
        [0.0, -4.0, 0.0, 0.0]
        >>> hook.state_dict()["residual.0"].tolist()
        [0.1, 0.0, 2.0, 3.0]
    """

    _remembers = ("residual",)

    def __init__(self, ratio: float = 0.01) -> None:
        super().__init__()
        if isinstance(ratio, bool) or not isinstance(ratio, (int, float, np.number)):
            raise TypeError(f"TopKCompression: ratio must be a number, got {type(ratio).__name__}")
        if not 0 < ratio <= 1:
            raise ValueError(
                f"TopKCompression: ratio must be above 0 and at most 1 (0.01 sends 1 % of the "
                f"values), got {ratio}"
            )
        self.ratio = float(ratio)

    def _start(self, bucket: Bucket) -> Work:
        flat, xp = bucket.flat, array_module(bucket.flat)
        if not flat.size:
            return Done(flat)
        residual = self._residual(bucket)
        flat += residual
        chosen = self._choose(bucket)
        # One row of 32-bit words: the values, then their indices.
        words = [flat[chosen].view(np.int32), chosen.view(np.int32)]
        message, end = xp.concatenate(words).reshape(1, -1), words[0].size
        self._count(bucket, message)

        def add_up(messages: Array) -> None:
            values = xp.ascontiguousarray(messages[:, :end]).view(flat.dtype)
            indices = xp.ascontiguousarray(messages[:, end:]).view(chosen.dtype)
            finite = xp.isfinite(values[bucket.group.rank]).all()
            residual[...] = flat if finite else 0
            residual[chosen] = 0
            flat[...] = 0
            for row, where in zip(values, indices, strict=True):
                flat[where] += row  # a row has no index twice
            xp.multiply(flat, flat.dtype.type(bucket.scale), out=flat)

        return Then(bucket.all_gather(message), add_up)

    def _choose(self, bucket: Bucket) -> Array:
        """Return the indices, in the bucket, of what is sent of its arrays."""
        chosen, start = [], 0
        for part in bucket.parts:
            if part.size:
                k = math.ceil(self.ratio * part.size)
                chosen.append(start + indices_of_largest(part.reshape(-1), k))
            start += part.size
        indices = array_module(bucket.flat).concatenate(chosen)
        return indices.astype(np.int32 if start <= 2**31 else np.int64)  # type: ignore[no-any-return]


def indices_of_largest(values: Array, k: int) -> Array:
    """Return where the ``k`` values of largest magnitude are, of an array of one dimension.

    NaN counts as largest. The same values give the same indices.
    """
    xp = array_module(values)
    magnitudes = xp.abs(values)
    among = None
    if not is_cupy(values) and values.size > _SAMPLED_FROM:
        among = _candidates(magnitudes, k)
        magnitudes = magnitudes[among]
    chosen = xp.argpartition(magnitudes, magnitudes.size - k)[magnitudes.size - k :]
    return chosen if among is None else among[chosen]  # type: ignore[no-any-return]


def _candidates(magnitudes: Array, k: int) -> Array:
    """Return some indices that hold the ``k`` largest, few if a sample is representative.

    The idea of Lin et al., section 3 ("hierarchically select the threshold"); exact here, for the
    sample decides how many are looked at again and not which are sent.
    """
    sample = magnitudes[:: magnitudes.size // _SAMPLES]
    above = min(sample.size, math.ceil(2 * k / magnitudes.size * sample.size) + 8)
    threshold = np.partition(sample, sample.size - above)[sample.size - above]
    found = np.flatnonzero(~(magnitudes < threshold))  # also NaN
    return found if found.size >= k else np.arange(magnitudes.size)
