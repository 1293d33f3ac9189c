"""The order of an epoch: one permutation that every process can compute for itself."""

from __future__ import annotations

import numpy as np

from flashlight_py.dataset.dataset import Indices


def epoch_order(n: int, seed: int, epoch: int) -> Indices:
    """Return a permutation of ``n`` samples that ``seed`` and ``epoch`` alone decide.

    Each sample draws a key of 64 bits, and the keys are sorted; equal ones stay in the order of
    the samples. Only integers take part: those of PCG64 (O'Neill 2014, "PCG: A Family of Simple
    Fast Space-Efficient Statistically Good Algorithms for Random Number Generation"), whose
    stream NumPy guarantees for a fixed seed. So the permutation is the same on every platform
    and with every NumPy, which ``Generator.permutation`` does not promise.

    Returns:
        A new int64 array of shape (n,).

    Example:
        >>> epoch_order(5, seed=0, epoch=0).tolist()
        [3, 1, 4, 2, 0]
    """
    # An epoch as spawn key gives a stream of its own; [seed, epoch] as entropy would not always:
    # the words of a large seed run into those of the epoch.
    seeds = np.random.SeedSequence(seed, spawn_key=(epoch,))
    keys = np.random.PCG64(seeds).random_raw(n)
    order: Indices = np.argsort(keys, kind="stable").astype(np.int64, copy=False)
    return order
