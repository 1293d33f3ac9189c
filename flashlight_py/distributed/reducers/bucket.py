"""The contract of a communication hook, on one screen: its bucket, and what it returns."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from flashlight_py.device import Array, is_cupy
from flashlight_py.distributed.groups.group import ProcessGroup
from flashlight_py.distributed.verbs import ALL_REDUCE
from flashlight_py.distributed.work import Done, Work


class Bucket:
    """Arrays that are reduced together, such as the gradients of several parameters.

    Args:
        index: the bucket's number in the step, from 0. The arrays that have it are the same ones
            in every step and on every rank, so a hook may keep state by it.
        flat: all of them as one array: one dimension, C-contiguous, one dtype, on one device.
        parts: the arrays one by one, as views into ``flat`` with their own shapes.
        scale: factor of the sums.
        group: the ranks.
        inline_bytes: messages of at most so many bytes block, which costs less than handing them
            to a thread; larger ones are started.

    Until the hook's Work has ended ``flat`` belongs to the hook, which may compute in it.
    """

    __slots__ = ("flat", "group", "in_background", "index", "inline_bytes", "parts", "scale")

    def __init__(
        self,
        index: int,
        flat: Array,
        parts: Sequence[Array],
        scale: float,
        group: ProcessGroup,
        inline_bytes: float = 0,
    ) -> None:
        self.index = index
        self.flat = flat
        self.parts = tuple(parts)
        self.scale = scale
        self.group = group
        self.inline_bytes = inline_bytes
        self.in_background = False  # whether a message was started that did not block

    def all_reduce(self, array: Array, blocking: bool = False) -> Work:
        """Sum an array of any shape and dtype over the ranks, times ``scale``, in place."""
        if not (blocking or self._pays_inline(array)):
            return self.group.all_reduce(array, self.scale, async_op=True)
        done = self.group.native(ALL_REDUCE.code, array, None, "sum", self.scale, 0, 0, False)
        if done is not array:
            self.group.all_reduce(array, self.scale)
        return Done(array)

    def all_gather(self, array: Array) -> Work:
        """Join the ranks' arrays (any shape and dtype) along the first dimension; a new array."""
        if self._pays_inline(array):
            return Done(self.group.all_gather(array))
        return self.group.all_gather(array, async_op=True)

    def _pays_inline(self, array: Array) -> bool:
        inline = array.nbytes <= self.inline_bytes and not is_cupy(array)
        self.in_background |= not inline
        return inline


# A hook starts the reduction of a bucket and returns its Work. Once that has been waited for,
# bucket.flat holds the sum over the ranks times bucket.scale, or what the hook puts in its place:
# the same bits on every rank. A hook is called on every rank for the same buckets in the same
# order, while the backward pass goes on, and calls the same collectives on every rank. Its Works
# are waited for in the order in which it returned them; what it does then may communicate, too.
CommunicationHook: TypeAlias = Callable[[Bucket], Work]


def call_hook(hook: CommunicationHook, bucket: Bucket) -> Work:
    """Return the Work that ``hook`` starts for ``bucket``.

    Raises:
        TypeError: it returned something else.
    """
    work = hook(bucket)
    if not isinstance(work, Work):
        raise TypeError(
            f"rank {bucket.group.rank} of {bucket.group.size}: a communication hook must return a "
            f"Work, such as bucket.all_reduce(bucket.flat) does; got {type(work).__name__}"
        )
    return work


def views(flat: Array, shapes: Iterable[tuple[int, ...]]) -> list[Array]:
    """Cut an array of one dimension into views of these shapes, one after the other."""
    shapes = list(shapes)
    ends = list(itertools.accumulate(math.prod(shape) for shape in shapes))
    starts = [0, *ends]
    return [
        flat[start:end].reshape(shape)
        for start, end, shape in zip(starts, ends, shapes, strict=False)
    ]
