"""Reducers: arrays in, reduced arrays out; and the plan of the arrays that travel together."""

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
    """A bucket of at most ``limit`` bytes that is being filled; a larger item has its own."""

    def __init__(self, limit: int) -> None:
        if limit <= 0:
            raise ValueError(f"bucket_bytes must be positive, got {limit}")
        self._limit, self._bytes = limit, 0
        self._kind: object = None
        self._items: list[Any] = []

    def add(self, item: Any, size: int, kind: object = None) -> list[Any]:
        """Take an item of ``size`` bytes; return the bucket that it closes, or an empty list.

        An item closes the bucket if it does not fit, or if the bucket's items are of another kind.
        """
        ends = self._items and (kind != self._kind or self._bytes + size > self._limit)
        ended = self.take() if ends else []
        self._items.append(item)
        self._bytes, self._kind = self._bytes + size, kind
        return ended

    @property
    def is_full(self) -> bool:
        """Whether nothing but an item of no bytes would fit."""
        return self._bytes >= self._limit

    def take(self) -> list[Any]:
        """Return the items of the bucket, which is empty afterwards."""
        items, self._items, self._bytes = self._items, [], 0
        return items


def plan_buckets(
    sizes: Sequence[int], limit: int, kinds: Sequence[object] | None = None
) -> list[list[int]]:
    """Cut a sequence of arrays into buckets of at most ``limit`` bytes, the same on every rank.

    ``sizes`` are the bytes of each array, in the order in which they become ready. A larger array
    is a bucket of its own; arrays of different ``kinds`` do not share one. Returns the buckets in
    order, each a list of consecutive indices. Arrays of zero bytes count.

    Example:
        >>> plan_buckets([6, 4, 3, 20, 1], limit=10)
        [[0, 1], [2], [3], [4]]
    """
    filling = Filling(limit)
    kinds = kinds or [None] * len(sizes)
    ended = [filling.add(i, *each) for i, each in enumerate(zip(sizes, kinds, strict=True))]
    return [bucket for bucket in (*ended, filling.take()) if bucket]


# Handing an operation to a thread and notifying of its end takes some 100 us while Python computes;
# in shared memory 1 MB takes less.
INLINE_BYTES = 1 << 20


class Reducer(HoldsState, abc.ABC):
    """Sums arrays over the ranks of ``group`` (None: the world) and multiplies by ``scale``."""

    def __init__(self, scale: float, *, group: ProcessGroup | None = None) -> None:
        self.scale = float(scale)
        self.group = group

    @abc.abstractmethod
    def add(self, array: Any) -> None:
        """Take an array (any shape), to be reduced in place by the end of :meth:`finalize`."""

    @abc.abstractmethod
    def finalize(self) -> None:
        """Block until every array that was added holds the reduced values."""

    def abandon(self) -> None:
        """Forget what was added and not yet sent: the pass that added it has failed."""


class InlineReducer(Reducer):
    """Reduces each array as soon as it is added, blocking.

    Args:
        scale: factor of every sum, such as 1 / world size for the mean.
        group: the process group, default the world.
    """

    def add(self, array: Any) -> None:
        """Reduce ``array`` in place, any shape; blocks.

        Raises:
            TypeError, ValueError, DistributedError: as :func:`flashlight_py.all_reduce`.
        """
        if not kind_of(array).is_filled:  # all_reduce would return another one
            with reject_together(group_or_world(self.group), "InlineReducer.add"):
                as_array("InlineReducer.add", array)
        all_reduce(array, self.scale, group=self.group)

    def finalize(self) -> None:
        """Return at once: nothing is ever pending."""


class _Pending(Reducer):
    """A reducer whose operations go on until :meth:`finalize`."""

    def __init__(
        self, scale: float, hook: CommunicationHook | None, group: ProcessGroup | None
    ) -> None:
        super().__init__(scale, group=group)
        self._hook = hook
        _Pending.abandon(self)  # subclasses extend it, and are not ready yet

    def finalize(self) -> None:
        """Block until everything that was added has been reduced; raises as ``all_reduce``."""
        works = self._works
        self.abandon()
        for work in works:
            work.wait()

    def abandon(self) -> None:
        """Forget what was added. Operations that have started cannot be called back."""
        self._works: list[Work] = []
        self._apart = OverlapCheck(f"{type(self).__name__}.add")
        self._hooked = 0  # buckets that the hook was given
        self._in_background = False  # whether it has started messages that do not block

    def _call_hook(self, flat: Array, parts: Sequence[Array], inline_bytes: float) -> Work:
        """Return the Work that the hook starts for the next bucket."""
        assert self._hook is not None
        group = group_or_world(self.group)
        bucket = Bucket(self._hooked, flat, parts, self.scale, group, inline_bytes)
        work = self._hook(bucket)
        if not isinstance(work, Work):
            raise TypeError(
                f"rank {group.rank} of {group.size}: a communication hook must return a Work, such "
                f"as bucket.all_reduce(bucket.flat) does; got {type(work).__name__}"
            )
        self._hooked += 1
        self._in_background |= bucket.in_background
        return work


class EagerReducer(_Pending):
    """Starts each array when it is added, without waiting, and waits in ``finalize``.

    Small NumPy arrays are reduced at once, blocking, unless larger ones have been started before:
    a thread for them costs more time than it saves. CuPy arrays always overlap, without a thread.

    A ``hook`` reduces the arrays, which are flat then; ``parts`` are the views into each of them,
    in their order. Raises TypeError if ``hook`` is not callable, or cannot compress the dtype.
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
        """Start reducing ``array`` in place, any shape; it must not be used until ``finalize``.

        Raises what ``all_reduce`` or the hook raises; ValueError if arrays share memory.
        """
        if self._hook is not None:
            inline = 0 if self._in_background else self._inline_bytes
            self._works.append(self._call_hook(array, self._parts[self._hooked], inline))
            return
        self._apart.add(as_array("EagerReducer.add", array))
        if array.nbytes <= self._inline_bytes and not self._works and not is_cupy(array):
            all_reduce(array, self.scale, group=self.group)
        else:
            self._works.append(all_reduce(array, self.scale, group=self.group, async_op=True))


class CoalescingReducer(_Pending):
    """Collects arrays and reduces them together, in buckets, while the caller goes on.

    Args:
        scale: factor of every sum, such as 1 / world size for the mean.
        async_op: start full buckets without waiting; they end in ``finalize``.
        contiguous: pack each bucket into one transfer per dtype.
        bucket_bytes: a bucket is sent when it is full or the next array would make it larger
            than this (default 20 MiB, flashlight's); a larger array is sent at once and alone.
        hook: reduces the buckets, such as ``Float16Compression()``. They then hold one dtype on one
            device each, and are numbered from 0 after each ``finalize``: add the same arrays in the
            same order in every step.
        group: the process group, default the world.

    Raises:
        ValueError: ``bucket_bytes`` is not positive, or there is a hook and not ``contiguous``.
        TypeError: ``hook`` is not callable.
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
                raise ValueError("CoalescingReducer: a hook needs buckets that are contiguous")
        self._async, self._contiguous = async_op, contiguous

    def add(self, array: Any) -> None:
        """Take an array of any shape, not to be used until ``finalize``; send a full bucket.

        Raises:
            ValueError: it shares memory with one that was added before.
            TypeError, ValueError, DistributedError: as :func:`flashlight_py.all_reduce`.
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
        """Send the last bucket and block until everything has been reduced.

        Raises:
            DistributedError: as :func:`flashlight_py.all_reduce`.
        """
        self._send(self._filling.take())
        super().finalize()

    def abandon(self) -> None:
        """Forget what was collected. Operations that have started cannot be called back."""
        self._filling.take()
        super().abandon()

    def _send(self, bucket: list[Array]) -> None:
        if not bucket:
            return
        if self._hook is None:
            how: Any = {"async_op": self._async, "contiguous": self._contiguous}
            work = all_reduce_multiple(bucket, self.scale, **how, group=self.group)
        else:
            work = self._send_by_hook(bucket)
        if self._async:
            self._works.append(work)
        elif self._hook is not None:
            work.wait()

    def _send_by_hook(self, arrays: Sequence[Array]) -> Work:
        """Give the hook ``arrays``, of one dtype on one device, as one bucket.

        They are copied together, and the results back when the Work is waited for; a single array
        that is contiguous is used as it is.
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
    # One bucket leaves nothing to overlap; then a thread would only cost.
    several = sum(array.nbytes for array in arrays) > DistributedConstants.COALESCE_CACHE_SIZE
    reducer = CoalescingReducer(scale, async_op=several, group=group)
    for array in arrays:
        reducer.add(array)
    reducer.finalize()
