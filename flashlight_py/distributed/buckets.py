"""Which arrays travel together: a pure function from sizes to a plan."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["plan_buckets"]


def plan_buckets(sizes: Sequence[int], limit: int) -> list[list[int]]:
    """Cut a sequence of arrays into runs of at most ``limit`` bytes.

    Args:
        sizes: bytes of each array, in the order in which they become ready.
        limit: bytes per bucket; an array larger than that is a bucket of its own.

    Returns:
        The buckets in order, each a list of consecutive indices. Arrays of zero bytes count.

    Raises:
        ValueError: ``limit`` is not positive or a size is negative.

    Example:
        >>> plan_buckets([6, 4, 3, 20, 1], limit=10)
        [[0, 1], [2], [3], [4]]
    """
    if limit <= 0 or any(size < 0 for size in sizes):
        raise ValueError(f"sizes must not be negative and limit must be positive: {limit}")
    buckets: list[list[int]] = []
    room = -1
    for index, size in enumerate(sizes):
        if size > room or not buckets:
            buckets.append([])
            room = limit
        buckets[-1].append(index)
        room -= size
    return buckets
