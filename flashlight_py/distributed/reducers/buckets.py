"""The one rule by which arrays travel together, for plans and for arrays that arrive singly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class Filling(Generic[T]):
    """A bucket of at most ``limit`` bytes that is being filled; a larger item is one of its own.

    Raises:
        ValueError: ``limit`` is not positive.
    """

    def __init__(self, limit: int) -> None:
        if limit <= 0:
            raise ValueError(f"the limit of a bucket must be positive, got {limit} bytes")
        self._limit, self._bytes = limit, 0
        self._kind: object = None
        self._items: list[T] = []

    def add(self, item: T, size: int, kind: object = None) -> list[T]:
        """Take an item of ``size`` bytes; return the bucket that it ends, empty if it ends none.

        It ends one into which it does not fit, or whose items are of another ``kind``.

        Raises:
            ValueError: ``size`` is negative.
        """
        if size < 0:
            raise ValueError(f"the size of an array must not be negative, got {size} bytes")
        ends = self._items and (kind != self._kind or self._bytes + size > self._limit)
        ended = self.take() if ends else []
        self._items.append(item)
        self._bytes, self._kind = self._bytes + size, kind
        return ended

    @property
    def is_full(self) -> bool:
        """Whether nothing but an item of no bytes would fit."""
        return self._bytes >= self._limit

    def take(self) -> list[T]:
        """Return the items of the bucket, which is empty afterwards."""
        items, self._items, self._bytes = self._items, [], 0
        return items


def plan_buckets(
    sizes: Sequence[int], limit: int, kinds: Sequence[object] | None = None
) -> list[list[int]]:
    """Cut a sequence of arrays into runs of at most ``limit`` bytes.

    Args:
        sizes: bytes of each array, in the order in which they become ready.
        limit: bytes per bucket; an array larger than that is a bucket of its own.
        kinds: of each array; those of different kinds do not share a bucket. None: all may.

    Returns:
        The buckets in order, each a list of consecutive indices. Arrays of zero bytes count.

    Raises:
        ValueError: ``limit`` is not positive or a size is negative.

    Example:
        >>> plan_buckets([6, 4, 3, 20, 1], limit=10)
        [[0, 1], [2], [3], [4]]
    """
    filling = Filling[int](limit)
    kinds = kinds or [None] * len(sizes)
    ended = [filling.add(i, *each) for i, each in enumerate(zip(sizes, kinds, strict=True))]
    return [bucket for bucket in (*ended, filling.take()) if bucket]
