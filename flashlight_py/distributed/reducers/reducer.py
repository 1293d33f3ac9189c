"""Reducers, which sum arrays over the ranks, and the division of arrays into buckets."""

import abc
import math
from collections.abc import Sequence
from typing import Any

from flashlight_py.device import Array, array_module, as_packed, device_of, is_cupy
from flashlight_py.distributed.api import all_reduce, all_reduce_multiple
from flashlight_py.distributed.api.group import ProcessGroup
from flashlight_py.distributed.api.verb_call import reject_together
from flashlight_py.distributed.calls.arrays import as_array
from flashlight_py.distributed.calls.checks import OverlapCheck
from flashlight_py.distributed.calls.combining import store_each, views
from flashlight_py.distributed.constants import DistributedConstants
from flashlight_py.distributed.reducers.hook import Bucket, CommunicationHook, check_hook
from flashlight_py.distributed.start.world import group_or_world
from flashlight_py.distributed.work import Then, Work
from flashlight_py.kinds import kind_of
from flashlight_py.structure import HoldsState


class Filling:
    """Collects items in a bucket of at most ``limit`` bytes. A larger item gets its own bucket."""

    def __init__(self, limit: int) -> None:
        if limit <= 0:
            raise ValueError(f"bucket_bytes must be positive, got {limit}")
        self._limit, self._bytes = limit, 0
        self._kind: object = None
        self._items: list[Any] = []

    def add(self, item: Any, size: int, kind: object = None) -> list[Any]:
        """Add an item of ``size`` bytes. If it starts a bucket, return the old items, else []."""
        ends = self._items and (kind != self._kind or self._bytes + size > self._limit)
        ended = self.take() if ends else []
        self._items.append(item)
        self._bytes, self._kind = self._bytes + size, kind
        return ended

    @property
    def is_full(self) -> bool:
        return self._bytes >= self._limit

    def take(self) -> list[Any]:
        items, self._items, self._bytes = self._items, [], 0
        return items


def plan_buckets(
    sizes: Sequence[int], limit: int, kinds: Sequence[object] | None = None
) -> list[list[int]]:
    """Split a sequence of arrays into buckets of at most ``limit`` bytes, the same on every rank.

    ``sizes`` has the bytes of each array, in the order in which the arrays become ready. A larger
    array gets its own bucket. Arrays of different ``kinds`` are not in one bucket. Returns the
    buckets in order, each as a list of consecutive indices.

    Example:
        >>> plan_buckets([6, 4, 3, 20, 1], limit=10)
        [[0, 1], [2], [3], [4]]
    """
    filling = Filling(limit)
    kinds = kinds or [None] * len(sizes)
    ended = [filling.add(i, *item) for i, item in enumerate(zip(sizes, kinds, strict=True))]
    return [bucket for bucket in (*ended, filling.take()) if bucket]


# Maximum bytes of an array that is reduced without a thread. A thread takes some 100 us if Python
# computes meanwhile. In shared memory, the reduction of 1 MB takes less time.
INLINE_BYTES = 1 << 20


class Reducer(HoldsState, abc.ABC):
    """Sums arrays over the ranks of ``group`` (None: the world) and multiplies by ``scale``."""

    def __init__(self, scale: float, *, group: ProcessGroup | None = None) -> None:
        self.scale = float(scale)
        self.group = group

    @abc.abstractmethod
    def add(self, array: Any) -> None:
        """Add an array of any shape. After :meth:`finalize`, it contains the reduced values."""

    @abc.abstractmethod
    def finalize(self) -> None:
        """Block until every added array contains the reduced values."""

    def abandon(self) -> None:
        """Drop the added arrays after a failed backward pass. Running operations continue."""


class InlineReducer(Reducer):
    """Reduces each array when it is added. ``add`` blocks.

    Args:
        scale: Factor of every sum, such as 1 / world size for the mean.
        group: The group of the ranks. Default: the world.
    """

    def add(self, array: Any) -> None:
        """Reduce ``array`` of any shape, in place. Blocks.

        Raises:
            TypeError, ValueError, DistributedError: As in :func:`flashlight_py.all_reduce`.
        """
        if not kind_of(array).is_filled:  # all_reduce would return a new array
            with reject_together(group_or_world(self.group), "InlineReducer.add"):
                as_array("InlineReducer.add", array)
        all_reduce(array, self.scale, group=self.group)

    def finalize(self) -> None:
        """Do nothing: no operation is pending."""


class _Pending(Reducer):
    """A reducer that starts operations in ``add`` and waits for them in :meth:`finalize`."""

    def __init__(
        self, scale: float, hook: CommunicationHook | None, group: ProcessGroup | None
    ) -> None:
        super().__init__(scale, group=group)
        self._hook = hook
        _Pending.abandon(self)  # not ``self``: the subclass is not initialised yet

    def finalize(self) -> None:
        """Block until all added arrays have been reduced. Raises the errors of ``all_reduce``."""
        works = self._works
        self.abandon()
        for work in works:
            work.wait()

    def abandon(self) -> None:
        self._works: list[Work] = []
        self._apart = OverlapCheck(f"{type(self).__name__}.add")
        self._hook_calls = 0  # number of buckets passed to the hook
        self._in_background = False  # True: the hook started messages that do not block

    def _call_hook(self, flat: Array, parts: Sequence[Array], inline_bytes: float) -> Work:
        assert self._hook is not None
        group = group_or_world(self.group)
        bucket = Bucket(self._hook_calls, flat, parts, self.scale, group, inline_bytes)
        work = self._hook(bucket)
        if not isinstance(work, Work):
            raise TypeError(
                f"rank {group.rank} of {group.size}: a communication hook must return a Work, such "
                f"as that of bucket.all_reduce(bucket.flat), got {type(work).__name__}"
            )
        self._hook_calls += 1
        self._in_background |= bucket.in_background
        return work


class EagerReducer(_Pending):
    """Starts to reduce each array when it is added, and waits in ``finalize``.

    ``add`` blocks only for a NumPy array of at most 1 MiB while no earlier array is in progress,
    because a thread would take longer.

    If a ``hook`` reduces the arrays, each array must be flat. ``parts`` then has one entry for each
    ``add``, in order: the list of views into the added array. Raises TypeError if ``hook`` is not
    callable, or rejects the dtype.
    """

    def __init__(
        self, scale: float, *, hook: CommunicationHook | None = None,
        parts: Sequence[Sequence[Array]] = (), group: ProcessGroup | None = None,
    ) -> None:  # fmt: skip
        super().__init__(scale, hook, group)
        if hook is not None:
            check_hook(hook, parts)
        self._parts, self._inline_bytes = parts, INLINE_BYTES

    def add(self, array: Any) -> None:
        """Start to reduce ``array`` of any shape, in place. Do not use it until ``finalize``.

        Raises the errors of ``all_reduce`` or of the hook; ValueError if arrays share memory.
        """
        if self._hook is not None:
            inline = 0 if self._in_background else self._inline_bytes
            self._works.append(self._call_hook(array, self._parts[self._hook_calls], inline))
            return
        self._apart.add(as_array("EagerReducer.add", array))
        if array.nbytes <= self._inline_bytes and not self._works and not is_cupy(array):
            all_reduce(array, self.scale, group=self.group)
        else:
            self._works.append(all_reduce(array, self.scale, group=self.group, async_op=True))


class CoalescingReducer(_Pending):
    """Collects arrays in buckets, and reduces all arrays of a bucket together.

    Args:
        scale: Factor of every sum, such as 1 / world size for the mean.
        async_op: True to start a full bucket without waiting. ``finalize`` then waits.
        contiguous: True to copy the arrays of a bucket into one array per dtype, and send this
            array.
        bucket_bytes: Maximum bytes of a bucket (default 20 MiB, as in flashlight). A bucket is sent
            when it is full, or the next array does not fit. A larger array is sent alone, without
            delay.
        hook: Hook that reduces the buckets, such as ``Float16Compression()``. A bucket then has one
            dtype and one device. Buckets are numbered from 0 after each ``finalize``, so add the
            same arrays in the same order in every step.
        group: The group of the ranks. Default: the world.

    Raises:
        ValueError: If ``bucket_bytes`` is not positive, or a hook has ``contiguous=False``.
        TypeError: If ``hook`` is not callable.
    """

    def __init__(
        self, scale: float, async_op: bool = True, contiguous: bool = True, *,
        bucket_bytes: int = DistributedConstants.COALESCE_CACHE_SIZE,
        hook: CommunicationHook | None = None, group: ProcessGroup | None = None,
    ) -> None:  # fmt: skip
        self._filling = Filling(bucket_bytes)
        super().__init__(scale, hook, group)
        if hook is not None:
            check_hook(hook)
            if not contiguous:
                raise ValueError("CoalescingReducer: a hook needs contiguous=True, got False")
        self._async, self._contiguous = async_op, contiguous

    def add(self, array: Any) -> None:
        """Add an array of any shape. Do not use it until ``finalize``. Sends full buckets.

        Raises:
            ValueError: If the array shares memory with an array that was added before.
            TypeError, ValueError, DistributedError: As in :func:`flashlight_py.all_reduce`.
        """
        with reject_together(group_or_world(self.group), "CoalescingReducer.add", arrays=[array]):
            array = as_array("CoalescingReducer.add", array)
            if self._hook is not None:
                check_hook(self._hook, [[array]])
            self._apart.add(array)
        kind = None if self._hook is None else (array.dtype.name, device_of(array))
        self._send(self._filling.add(array, array.nbytes, kind))
        if self._filling.is_full:
            self._send(self._filling.take())

    def finalize(self) -> None:
        """Send the last bucket, and block until all arrays have been reduced.

        Raises:
            DistributedError: As in :func:`flashlight_py.all_reduce`.
        """
        self._send(self._filling.take())
        super().finalize()

    def abandon(self) -> None:
        self._filling.take()
        super().abandon()

    def _send(self, bucket: list[Array]) -> None:
        if not bucket:
            return
        if self._hook is None:
            options: Any = {"async_op": self._async, "contiguous": self._contiguous}
            work = all_reduce_multiple(bucket, self.scale, **options, group=self.group)
        else:
            work = self._send_by_hook(bucket)
        if self._async:
            self._works.append(work)
        elif self._hook is not None:
            work.wait()

    def _send_by_hook(self, arrays: Sequence[Array]) -> Work:
        """Pass ``arrays``, of one dtype and on one device, to the hook as one bucket."""
        is_packed = len(arrays) == 1 and as_packed(arrays[0]) is arrays[0]
        pieces = [as_packed(array).reshape(-1) for array in arrays]
        flat = pieces[0] if is_packed else array_module(pieces[0]).concatenate(pieces)
        parts = views(flat, [array.shape for array in arrays])
        work = self._call_hook(flat, parts, 0 if self._async else math.inf)
        return work if is_packed else Then(work, lambda _: store_each(arrays, parts))


def reduce_all(arrays: Sequence[Array], scale: float, group: ProcessGroup | None) -> None:
    # With only one bucket, nothing runs at the same time, so a thread would only take time.
    is_large = sum(array.nbytes for array in arrays) > DistributedConstants.COALESCE_CACHE_SIZE
    reducer = CoalescingReducer(scale, async_op=is_large, group=group)
    for array in arrays:
        reducer.add(array)
    reducer.finalize()
