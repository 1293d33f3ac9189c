"""Reducers, which sum arrays over the ranks, and the plan of buckets."""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from typing import Any

from flashlight_py.device import Array, array_module, device_of, is_cupy
from flashlight_py.distributed.api import all_reduce, all_reduce_multiple
from flashlight_py.distributed.api.group import ProcessGroup
from flashlight_py.distributed.api.verb_call import reject_together
from flashlight_py.distributed.calls.arrays import as_array, as_packed
from flashlight_py.distributed.calls.checks import OverlapCheck
from flashlight_py.distributed.calls.kinds import kind_of
from flashlight_py.distributed.constants import DistributedConstants
from flashlight_py.distributed.reducers.hook import Bucket, CommunicationHook, check_hook, views
from flashlight_py.distributed.start.world import group_or_world
from flashlight_py.distributed.work import Then, Work
from flashlight_py.structure import HoldsState


class Filling:
    """A bucket of at most ``limit`` bytes that is being filled. A larger item fills it alone."""

    def __init__(self, limit: int) -> None:
        if limit <= 0:
            raise ValueError(f"bucket_bytes must be positive, got {limit}")
        self._limit, self._bytes = limit, 0
        self._kind: object = None
        self._items: list[Any] = []

    def add(self, item: Any, size: int, kind: object = None) -> list[Any]:
        """Add an item of ``size`` bytes. Return the items of the bucket that it closes, or [].

        An item closes the previous bucket if it does not fit, or if its ``kind`` differs.
        """
        ends = self._items and (kind != self._kind or self._bytes + size > self._limit)
        ended = self.take() if ends else []
        self._items.append(item)
        self._bytes, self._kind = self._bytes + size, kind
        return ended

    @property
    def is_full(self) -> bool:
        """Whether only an item of zero bytes would still fit."""
        return self._bytes >= self._limit

    def take(self) -> list[Any]:
        """Return the items of the bucket, and empty it."""
        items, self._items, self._bytes = self._items, [], 0
        return items


def plan_buckets(
    sizes: Sequence[int], limit: int, kinds: Sequence[object] | None = None
) -> list[list[int]]:
    """Cut a sequence of arrays into buckets of at most ``limit`` bytes, the same on every rank.

    ``sizes`` are the bytes of each array, in the order in which the arrays become ready. An array
    above ``limit`` has its own bucket. Arrays of different ``kinds`` do not share a bucket. Returns
    the buckets in order, each a list of consecutive indices. Arrays of zero bytes are included.

    Example:
        >>> plan_buckets([6, 4, 3, 20, 1], limit=10)
        [[0, 1], [2], [3], [4]]
    """
    filling = Filling(limit)
    kinds = kinds or [None] * len(sizes)
    ended = [filling.add(i, *item) for i, item in enumerate(zip(sizes, kinds, strict=True))]
    return [bucket for bucket in (*ended, filling.take()) if bucket]


# Maximum bytes of an array that is reduced without a thread. A thread costs some 100 us while
# Python computes. In shared memory, the reduction of 1 MB takes less.
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
        """Drop arrays that were added and not sent, after a failed backward pass."""


class InlineReducer(Reducer):
    """Reduces each array when it is added, blocking.

    Args:
        scale: Factor of every sum, such as 1 / world size for the mean.
        group: Group whose ranks reduce. Default: the world.
    """

    def add(self, array: Any) -> None:
        """Reduce ``array`` in place, any shape; blocks.

        Raises:
            TypeError, ValueError, DistributedError: As in :func:`flashlight_py.all_reduce`.
        """
        if not kind_of(array).is_filled:  # all_reduce would return a new array
            with reject_together(group_or_world(self.group), "InlineReducer.add"):
                as_array("InlineReducer.add", array)
        all_reduce(array, self.scale, group=self.group)

    def finalize(self) -> None:
        """Return at once: nothing is ever pending."""


class _Pending(Reducer):
    """A reducer whose operations run until :meth:`finalize`."""

    def __init__(
        self, scale: float, hook: CommunicationHook | None, group: ProcessGroup | None
    ) -> None:
        super().__init__(scale, group=group)
        self._hook = hook
        _Pending.abandon(self)  # a subclass is not initialised yet

    def finalize(self) -> None:
        """Block until all added arrays have been reduced; raises the errors of ``all_reduce``."""
        works = self._works
        self.abandon()
        for work in works:
            work.wait()

    def abandon(self) -> None:
        """Drop the added arrays. Operations that have started still run."""
        self._works: list[Work] = []
        self._apart = OverlapCheck(f"{type(self).__name__}.add")
        self._hook_calls = 0  # number of buckets passed to the hook
        self._in_background = False  # True: the hook started messages that do not block

    def _call_hook(self, flat: Array, parts: Sequence[Array], inline_bytes: float) -> Work:
        """Call the hook for the next bucket and return its Work."""
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

    Small NumPy arrays are reduced at once, blocking, unless larger arrays are in progress: a thread
    for small arrays costs more time than it saves. CuPy arrays always overlap, without a thread.

    A ``hook`` reduces the arrays, which must be flat. ``parts`` are the views into each array, in
    the order of ``add``. Raises TypeError if ``hook`` is not callable, or rejects the dtype.
    """

    def __init__(
        self,
        scale: float,
        *,
        hook: CommunicationHook | None = None,
        parts: Sequence[Sequence[Array]] = (),
        group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(scale, hook, group)
        if hook is not None:
            check_hook(hook, parts)
        self._parts, self._inline_bytes = parts, INLINE_BYTES

    def add(self, array: Any) -> None:
        """Start reducing ``array`` in place, any shape; do not use it until ``finalize``.

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
    """Collects arrays and reduces them together, in buckets, while the caller continues.

    Args:
        scale: Factor of every sum, such as 1 / world size for the mean.
        async_op: True to start full buckets without waiting; ``finalize`` waits for them.
        contiguous: True to pack each bucket into one transfer per dtype.
        bucket_bytes: Maximum bytes of a bucket (default 20 MiB, as in flashlight). A bucket is sent
            when it is full, or the next array does not fit. A larger array is sent alone at once.
        hook: Hook that reduces the buckets, such as ``Float16Compression()``. A bucket then has one
            dtype and one device. Buckets are numbered from 0 after each ``finalize``: add the same
            arrays in the same order in every step.
        group: Group whose ranks reduce. Default: the world.

    Raises:
        ValueError: If ``bucket_bytes`` is not positive, or a hook has ``contiguous=False``.
        TypeError: If ``hook`` is not callable.
    """

    def __init__(
        self,
        scale: float,
        async_op: bool = True,
        contiguous: bool = True,
        *,
        bucket_bytes: int = DistributedConstants.COALESCE_CACHE_SIZE,
        hook: CommunicationHook | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        self._filling = Filling(bucket_bytes)
        super().__init__(scale, hook, group)
        if hook is not None:
            check_hook(hook)
            if not contiguous:
                raise ValueError("CoalescingReducer: contiguous must be True with hook, got False")
        self._async, self._contiguous = async_op, contiguous

    def add(self, array: Any) -> None:
        """Add an array of any shape; do not use it until ``finalize``. Sends a full bucket.

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
        """Drop the collected arrays. Operations that have started still run."""
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
        """Pass ``arrays``, of one dtype on one device, to the hook as one bucket.

        They are copied into one array, and the results are copied back when the caller waits. A
        single contiguous array is used directly.
        """
        is_packed = len(arrays) == 1 and as_packed(arrays[0]) is arrays[0]
        pieces = [as_packed(array).reshape(-1) for array in arrays]
        flat = pieces[0] if is_packed else array_module(pieces[0]).concatenate(pieces)
        parts = views(flat, [array.shape for array in arrays])
        work = self._call_hook(flat, parts, 0 if self._async else math.inf)

        def copy_back(_: Any) -> None:
            for array, part in zip(arrays, parts, strict=True):
                array[...] = part

        return work if is_packed else Then(work, copy_back)


def reduce_all(arrays: Sequence[Array], scale: float, group: ProcessGroup | None) -> None:
    """Sum arrays over the ranks and multiply by ``scale``, in place. Collective, blocking."""
    # One bucket cannot overlap with another bucket, and a thread would only cost time.
    is_large = sum(array.nbytes for array in arrays) > DistributedConstants.COALESCE_CACHE_SIZE
    reducer = CoalescingReducer(scale, async_op=is_large, group=group)
    for array in arrays:
        reducer.add(array)
    reducer.finalize()
