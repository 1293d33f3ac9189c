"""Parts and orders of samples. Each process computes them without communication."""

import numpy as np

from flashlight_py.dataset.dataset import Indices


def contiguous_share(n: int, share: int, shares: int) -> range:
    """Return the positions of part ``share`` if [0, n) is divided into ``shares`` contiguous parts.

    Sizes differ by at most one, and the longer parts come first.

    Example:
        >>> [list(contiguous_share(5, share, 3)) for share in range(3)]
        [[0, 1], [2, 3], [4]]
    """
    size, longer = divmod(n, shares)
    start = size * share + min(share, longer)
    return range(start, start + size + (share < longer))


def strided_share(n: int, share: int, shares: int, drop_last: bool = False) -> range:
    """Return every ``shares``-th position in [0, n), starting at position ``share``.

    Sizes of shares differ by at most one. With ``drop_last`` the last n % shares positions are left
    out, and all sizes are equal. If each share uses its next k positions in every step, step t uses
    the positions [k * shares * t, k * shares * (t + 1)) of all shares together.

    Example:
        >>> [list(strided_share(5, share, 3)) for share in range(3)]
        [[0, 3], [1, 4], [2]]
    """
    return range(share, n - n % shares if drop_last else n, shares)


def partition_by_round_robin(
    n: int, partition: int, partitions: int, batch_size: int = 1, allow_empty: bool = False
) -> Indices:
    """Return the indices, in [0, n), of the samples that belong to partition ``partition``.

    Batches of ``batch_size`` consecutive samples are assigned to the partitions in turn. Remaining
    samples, too few for one more batch per partition, are divided evenly. If less than one sample
    per partition remains, these samples are dropped, so that all partitions have equally many
    batches. With ``allow_empty`` they are kept, and some partitions may have one batch fewer. The
    rule is flashlight's ``partitionByRoundRobin``. The result is a new ascending int64 array.

    Raises:
        ValueError: If ``n`` < 0, ``batch_size`` < 1, or ``partition`` is not in [0, partitions).
    """
    if n < 0 or batch_size < 1 or not 0 <= partition < partitions:
        raise ValueError(
            "expected n >= 0, batch_size >= 1 and partition in [0, partitions), got "
            f"n={n}, partition={partition}, partitions={partitions}, batch_size={batch_size}"
        )
    rounds, rest = divmod(n, partitions * batch_size)
    full_rounds = np.arange(n - rest).reshape(rounds, partitions, batch_size)[:, partition].ravel()
    if rest < partitions and not allow_empty:
        return full_rounds
    share = contiguous_share(rest, partition, partitions)
    return np.concatenate([full_rounds, np.arange(n - rest + share.start, n - rest + share.stop)])


def epoch_order(n: int, seed: int, epoch: int) -> Indices:
    """Return an int64 permutation of ``n`` samples that depends only on seed and epoch.

    Each sample gets a random key of 64 bits, with the sample's number in the lowest bits. The
    sorted keys give the order. The random bits are from PCG64 (O'Neill, 2014). NumPy guarantees
    them for a given seed, so the permutation is equal on every platform and with every NumPy
    version, unlike ``Generator.permutation``.

    Example:
        >>> epoch_order(5, seed=0, epoch=0).tolist()
        [3, 1, 4, 2, 0]
    """
    # With a spawn key, each epoch has its own random bits. With [seed, epoch] as entropy, a large
    # seed could give the bits of another seed and epoch.
    keys = np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(epoch,))).random_raw(n)
    bits = n.bit_length()
    keys >>= bits
    keys <<= bits
    keys |= np.arange(n, dtype=np.uint64)
    keys.sort()  # four times as fast as argsort
    keys &= (1 << bits) - 1
    order: Indices = keys.view(np.int64)
    return order
