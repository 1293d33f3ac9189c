"""Two buckets per rank, through which the gradients of a sharded module are summed.

All ranks of a host read them where they lie. When all have filled one, each adds up its part of
those elements, in the order of the ranks. A bucket is filled again only after the next one was full
on all ranks: by then all have added up the first, so that each bucket takes one barrier.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from flashlight_py.device import Array
from flashlight_py.distributed import ProcessGroup
from flashlight_py.distributed.calls.arrays import scale_in_place
from flashlight_py.distributed.memory.host_memory import add_up, map_zeros, meet
from flashlight_py.parallel.shard_layout import Chunk

# What ranks compare where they meet: one may be in another pass, or in a step.
BACKWARD = "backward of a sharded module"
# Of all ranks of a host together, and of one bucket.
ALL_BYTES = 16 << 20
LEAST_BYTES, MOST_BYTES = 256 << 10, 2 << 20

# Of this rank's part of a sum of earlier passes, in place; the chunk says where it lies.
Scaling = Callable[[Array, Chunk], None]


def bucket_bytes(ranks: int) -> int:
    """Return how large a bucket of one of ``ranks`` ranks of a host may be.

    Example:
        >>> [bucket_bytes(ranks) >> 10 for ranks in (1, 4, 8, 64)]
        [2048, 2048, 1024, 256]
    """
    return min(max(ALL_BYTES // (2 * ranks), LEAST_BYTES), MOST_BYTES)


class Buckets:
    """The buckets of all ranks of a host. Making them is collective, and blocks.

    Args:
        local: the ranks of this host.
        nbytes: of one bucket.
        scale: the factor of the sums.
        keeps: sums are kept, so that a rank which is alone on its host needs no bucket.
    """

    def __init__(self, local: ProcessGroup, nbytes: int, scale: float, keeps: bool) -> None:
        self._local, self._scale = local, scale
        self._alone = keeps and local.size == 1
        nbytes = -(-nbytes // 4096) * 4096
        self._memory = map_zeros(local, local.size * 2 * nbytes).reshape(local.size, 2, nbytes)
        self._turn = 0

    def next(self, chunk: Chunk, total: Array, adds: bool) -> Array:
        """Return room for what this rank has of ``chunk``, which goes into ``total``.

        A rank that is alone on its host has it in ``total`` itself, unless that is added to.
        """
        if self._alone and not adds:
            return total[chunk.start : chunk.stop]
        self._turn ^= 1
        return self.of_ranks(chunk, total.dtype)[self._local.rank]

    def of_ranks(self, chunk: Chunk, dtype: np.dtype[np.generic]) -> list[Array]:
        """Return every rank's room for ``chunk``, for which ``next`` was called last."""
        nbytes = (chunk.stop - chunk.start) * dtype.itemsize
        rooms: list[Array] = [rank[self._turn, :nbytes].view(dtype) for rank in self._memory]
        return rooms

    def send(self, chunk: Chunk, total: Array, old: Scaling | None) -> None:
        """Sum what ranks have in their rooms into this rank's part of ``total``. Collective.

        Blocks. ``old``: what is there stays, scaled by this, and is added to.
        """
        part = chunk.part_of(self._local.rank)
        if self._alone and old is None:
            scale_in_place(total[part], self._scale)
            return
        meet(self._local, BACKWARD)
        place = slice(part.start - chunk.start, part.stop - chunk.start)
        own = [room[place] for room in self.of_ranks(chunk, total.dtype)]
        if old is None:
            add_up(own, self._scale, total[part])
            return
        old(total[part], chunk)
        total[part] += add_up(own, self._scale, np.empty_like(total[part]))
