"""Who gets which positions of an order of samples: pure arithmetic, the same in every process.

A share is a ``range`` of positions. All arguments are checked by those who call.
"""

from __future__ import annotations


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

    Positions [s * t, s * t + s) are the t-th of the s shares, one each. So what the shares have
    consumed when each has taken k is exactly the first s * k positions: if together they take
    ``batch`` per step, a multiple of s, step t covers [batch * t, batch * (t + 1)), whatever s
    is. Sizes differ by one at most; with ``drop_last`` the last n % shares positions are left
    out, and all are equal.

    Example:
        >>> [list(strided_share(5, share, 3)) for share in range(3)]
        [[0, 3], [1, 4], [2]]
    """
    return range(share, n - n % shares if drop_last else n, shares)


def count_batches(n: int, batch_size: int, drop_last: bool) -> int:
    """Return how many batches ``n`` samples give; without ``drop_last`` the last may be short."""
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
