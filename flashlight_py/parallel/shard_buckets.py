"""Two buckets per rank, through which the gradients of a sharded module are summed.

While one is filled, the other is on its way: each rank of the host sums its part of it, where the
ranks' buckets lie, into the gradient that they have in common.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from flashlight_py.device import Array
from flashlight_py.distributed import ProcessGroup
from flashlight_py.distributed.work import Work
from flashlight_py.parallel.shard_layout import Chunk

# Of all ranks of a host together, and of one bucket.
ALL_BYTES = 16 << 20
LEAST_BYTES, MOST_BYTES = 256 << 10, 2 << 20
# Smaller messages take less time than to wake the thread that would carry them.
INLINE_BYTES = 64 << 10


def bucket_bytes(ranks: int) -> int:
    """Return how large a bucket of one of ``ranks`` ranks of a host may be.

    Example:
        >>> [bucket_bytes(ranks) >> 10 for ranks in (1, 4, 8, 64)]
        [2048, 2048, 1024, 256]
    """
    return min(max(ALL_BYTES // (2 * ranks), LEAST_BYTES), MOST_BYTES)


# Of this rank's part of a sum of earlier passes, in place; the chunk says where it lies.
Scaling = Callable[[Array, Chunk], None]


class Slot:
    """One bucket, what is on its way from it, and what to do when that has arrived."""

    def __init__(self, memory: Array) -> None:
        self.memory = memory
        self.work: Work | None = None
        self.then: Callable[[], None] | None = None

    def finish(self) -> None:
        """Block until what is on its way has arrived."""
        work, self.work = self.work, None
        then, self.then = self.then, None
        if work is not None:
            work.wait()
        if then is not None:
            then()


class Buckets:
    """The two buckets of this rank, filled in turn. Making them is collective.

    Args:
        local: the ranks of this host.
        nbytes: of one bucket.
        scale: the factor of the sums.
    """

    def __init__(self, local: ProcessGroup, nbytes: int, scale: float) -> None:
        self._local, self.scale = local, scale
        self._slots = [Slot(local.shared_empty(nbytes, np.uint8)) for _ in range(2)]
        self._turn = 0

    def next(self, chunk: Chunk, dtype: np.dtype[np.generic]) -> Array:
        """Return room for ``chunk``, once it is free."""
        self._turn ^= 1
        slot = self._slots[self._turn]
        slot.finish()
        nbytes = (chunk.stop - chunk.start) * dtype.itemsize
        room: Array = slot.memory[:nbytes].view(dtype)
        return room

    def send(self, bucket: Array, chunk: Chunk, total: Array, old: Scaling | None) -> None:
        """Sum ``bucket``, which ``next`` has returned, into its chunk of ``total``.

        Each rank writes its part. ``old``: what is there stays, scaled by this, and is added to.
        """
        slot, out = self._slots[self._turn], total[chunk.part_of(self._local.rank)]
        target = out if old is None else np.empty_like(out)
        background = bucket.nbytes > INLINE_BYTES
        work = self._local.reduce_scatter(bucket, scale=self.scale, out=target, async_op=background)
        slot.work = work if background else None
        slot.then = None if old is None else functools.partial(_add, out, chunk, target, old)
        if not background:
            slot.finish()

    def finish(self) -> None:
        """Block until everything has arrived; this rank's parts are then complete."""
        for slot in (self._slots[self._turn ^ 1], self._slots[self._turn]):
            slot.finish()

    def abandon(self) -> None:
        """Forget what is on its way; it cannot be called back."""
        for slot in self._slots:
            slot.work = slot.then = None


def _add(total: Array, chunk: Chunk, new: Array, scale_old: Scaling) -> None:
    scale_old(total, chunk)
    total += new
