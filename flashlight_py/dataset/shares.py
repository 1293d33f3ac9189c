"""Shares of the samples and their order, computed by each process for itself."""

import numpy as np

from flashlight_py.dataset.dataset import Indices


def contiguous_share(n: int, share: int, shares: int) -> range:
    """Return the positions, of ``n``, of one of ``shares`` neighbouring parts.

    Sizes differ by one at most; the longer parts come first.

    Example:
        >>> [list(contiguous_share(5, share, 3)) for share in range(3)]
        [[0, 1], [2, 3], [4]]
    """
    size, longer = divmod(n, shares)
    start = size * share + min(share, longer)
    return range(start, start + size + (share < longer))


def strided_share(n: int, share: int, shares: int, drop_last: bool = False) -> range:
    """Return every ``shares``-th position of ``n``, beginning with number ``share``.

    Sizes differ by one at most; with ``drop_last`` the last n % shares positions are left out, and
    all are equal. When each of s shares has taken k positions, they have consumed exactly the first
    s * k: if together they take ``batch`` per step, a multiple of s, step t covers [batch * t,
    batch * (t + 1)).

    Example:
        >>> [list(strided_share(5, share, 3)) for share in range(3)]
        [[0, 3], [1, 4], [2]]
    """
    return range(share, n - n % shares if drop_last else n, shares)


def count_batches(n: int, batch_size: int, drop_last: bool) -> int:
    """Return how many batches ``n`` samples make; without ``drop_last`` the last may be short."""
    return n // batch_size if drop_last else -(-n // batch_size)


def batch_positions(index: int, n: int, batch_size: int) -> range:
    """Return the positions, of ``n``, of batch ``index``."""
    return range(n)[index * batch_size : (index + 1) * batch_size]


def weight_of_part(part: int, whole: int, parts: int) -> float:
    """Return the factor of the mean over a part of a batch in the mean over the whole.

    With c samples in a part and C in all parts, the average over the parts of weight * mean,
    1 / parts * sum(c * parts / C * mean), is the sum over all samples divided by C.
    """
    return part * parts / whole


def partition_by_round_robin(
    n: int, partition: int, partitions: int, batch_size: int = 1, allow_empty: bool = False
) -> Indices:
    """Return the indices, of ``n`` samples, that belong to ``partition`` of ``partitions``.

    Batches of ``batch_size`` successive samples are dealt in turn. Samples that do not fill a last
    round are shared out evenly if they suffice for one each, and dropped otherwise: so every
    partition has the same number of batches, and processes that reduce something per batch stay
    together. With ``allow_empty`` nothing is dropped, and some partitions may have one batch less.
    The rule is that of flashlight's ``partitionByRoundRobin``. The result is a new int64 array with
    shape (samples of the partition,), ascending.

    Raises:
        ValueError: ``n`` < 0, ``batch_size`` < 1, or ``partition`` not in [0, partitions).
    """
    if n < 0 or batch_size < 1 or not 0 <= partition < partitions:
        raise ValueError(
            "expected n >= 0, batch_size >= 1 and partition in [0, partitions); got "
            f"n={n}, partition={partition}, partitions={partitions}, batch_size={batch_size}"
        )
    rounds, rest = divmod(n, partitions * batch_size)
    dealt = np.arange(n - rest).reshape(rounds, partitions, batch_size)[:, partition].ravel()
    if rest < partitions and not allow_empty:
        return dealt
    own = contiguous_share(rest, partition, partitions)
    return np.concatenate([dealt, np.arange(n - rest + own.start, n - rest + own.stop)])


def epoch_order(n: int, seed: int, epoch: int) -> Indices:
    """Return a permutation of ``n`` samples, int64 (n,), that ``seed`` and ``epoch`` alone decide.

    Each sample draws a key of 64 bits, its number is written into the lowest bits, and the keys are
    sorted. Only integers take part: those of PCG64 (O'Neill, 2014), whose stream NumPy guarantees
    for a fixed seed. So the permutation is the same on every platform and with every NumPy, which
    ``Generator.permutation`` does not promise.

    Example:
        >>> epoch_order(5, seed=0, epoch=0).tolist()
        [3, 1, 4, 2, 0]
    """
    # An epoch as spawn key gives a stream of its own; [seed, epoch] as entropy would not always:
    # the words of a large seed run into those of the epoch.
    seeds = np.random.SeedSequence(seed, spawn_key=(epoch,))
    keys = np.random.PCG64(seeds).random_raw(n)
    bits = n.bit_length()
    keys >>= bits
    keys <<= bits
    keys |= np.arange(n, dtype=np.uint64)
    keys.sort()  # a quarter of the time of an argsort
    keys &= (1 << bits) - 1
    order: Indices = keys.view(np.int64)
    return order
