"""Sets of times as lists of (from, to), in order and apart."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Intervals", "intersection", "length", "union"]

Intervals = list[tuple[int, int]]


def union(intervals: Iterable[tuple[int, int]]) -> Intervals:
    """Return the times that are in any of ``intervals``.

    Example:
        >>> union([(5, 8), (0, 2), (1, 3)])
        [(0, 3), (5, 8)]
    """
    joined: Intervals = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def intersection(one: Intervals, other: Intervals) -> Intervals:
    """Return the times that are in both.

    Example:
        >>> intersection([(0, 3), (5, 8)], [(2, 6)])
        [(2, 3), (5, 6)]
    """
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            found.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def length(intervals: Intervals) -> int:
    """Return how long they are together."""
    return sum(end - start for start, end in intervals)
