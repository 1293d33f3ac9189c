"""Arrays from memory to memory, as bytes: by the library's collectives, or by pairs of messages.

Pairs move more than 2 GB, and memory of a GPU, which not all libraries take in non-blocking
collectives. All ranks choose by numbers that all of them know.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from flashlight_py.device import Array, array_module, is_cupy
from flashlight_py.distributed.calls.combining import cut

# The largest count of MPI-3's functions. MPI-4 has larger ones, not every library has MPI-4, and
# pieces of 2 GB cost nothing.
LARGEST_BYTES = 2**31 - 1
# The tag of the parts of collectives, below those of messages, and the largest that MPI promises.
_OF_PARTS, _LARGEST_TAG = 0, 32767

Steps: TypeAlias = Generator[None, None, Any]  # of an operation, between which it has to wait
Until: TypeAlias = Callable[[Iterable[partial[Any]]], Steps]  # ``Progress.until``


def chunks(flat: Array) -> list[Array]:
    """Cut ``flat`` into pieces that one MPI call each can move; an empty array is one piece."""
    step = max(1, LARGEST_BYTES // flat.itemsize)
    return [flat[start : start + step] for start in range(0, max(flat.size, 1), step)]


def settle(array: Array | None) -> None:
    """Wait until ``array``, if it is on a GPU, holds what the current stream computes."""
    if is_cupy(array):
        array_module(array).cuda.get_current_stream().synchronize()


def on_device(array: Any, steps: Steps) -> Steps:
    """Return ``steps``, each taken with the GPU of ``array``, if it is on one, as the current one.

    Any thread may take a step: MPI and CuPy both go by the thread's current device.
    """
    if not is_cupy(array):
        return (yield from steps)
    device = array_module(array).cuda.Device(array.device.id)
    try:
        while True:
            with device:
                try:
                    next(steps)
                except StopIteration as end:
                    return end.value
            yield
    finally:
        steps.close()


class Movement:
    """Moves flat arrays of bytes between the ranks of ``comm``. Counts are in bytes."""

    def __init__(self, comm: Any, until: Until) -> None:
        self._comm, self._until = comm, until
        self._rank, self._size = int(comm.Get_rank()), int(comm.Get_size())

    def shares(self, count: int) -> list[int]:
        """Return how many of ``count`` elements each rank gets, or combines."""
        ends = [count * i // self._size for i in range(self._size + 1)]
        return [end - start for start, end in itertools.pairwise(ends)]

    def broadcast(self, data: Array, root: int) -> Steps:
        """Make ``data`` equal to ``root``'s."""
        if self._needs_pairs(data, 0):
            # Each rank gets a part, then joins the parts (van de Geijn): 2 sizes on every link.
            counts = self.shares(data.size)
            parts = _by_rank(data, counts)
            mine = parts[self._rank]
            yield from self.swap(parts if self._rank == root else {}, {root: mine})
            yield from self.gather(mine, data, counts)
        else:
            yield from self._until(partial(self._comm.Ibcast, c, root) for c in chunks(data))

    def gather(
        self, mine: Array, whole: Array | None, counts: Sequence[int], root: int | None = None
    ) -> Steps:
        """Fill ``whole`` with every rank's ``mine``: on all of them, or on ``root`` alone."""
        comm, taken = self._comm, None if whole is None else [whole, counts]
        if self._needs_pairs(mine, sum(counts)):
            takers = range(self._size) if root is None else [root]
            yield from self.swap(dict.fromkeys(takers, mine), _by_rank(whole, counts))
        elif root is not None:
            yield from self._until([partial(comm.Igatherv, mine, taken, root)])
        elif len(set(counts)) == 1:
            yield from self._until([partial(comm.Iallgather, mine, whole)])
        else:
            yield from self._until([partial(comm.Iallgatherv, mine, taken)])

    def scatter(self, whole: Array | None, part: Array, root: int) -> Steps:
        """Fill ``part`` with this rank's equal part of ``whole``, which ``root`` alone has."""
        if self._needs_pairs(part, part.size * self._size):
            gives = _by_rank(whole, [part.size] * self._size)
            yield from self.swap(gives, {root: part})
        else:
            yield from self._until([partial(self._comm.Iscatter, whole, part, root)])

    def all_to_all(
        self,
        given: Array,
        taken: Array,
        gives: Sequence[int] | None = None,
        takes: Sequence[int] | None = None,
        most: int = 0,
    ) -> Steps:
        """Give ``gives[r]`` bytes of ``given`` to rank r, and take ``takes[r]`` from it.

        Without them it is an equal part. Else no rank's bytes exceed ``most``, either way, a number
        that all ranks know.
        """
        if self._needs_pairs(given, most or given.size):
            even = [given.size // self._size] * self._size
            yield from self.swap(_by_rank(given, gives or even), _by_rank(taken, takes or even))
        elif gives is None:
            yield from self._until([partial(self._comm.Ialltoall, given, taken)])
        else:
            both = [given, gives], [taken, takes]
            yield from self._until([partial(self._comm.Ialltoallv, *both)])

    def swap(
        self, gives: Mapping[int, Array], takes: Mapping[int, Array], number: int | None = None
    ) -> Steps:
        """Send and receive what is for or of each rank; what is this rank's own is copied.

        All at once; those between two ranks keep their order. ``number`` is a message's of users.
        """
        comm, me = self._comm, self._rank
        tag = _OF_PARTS if number is None else 1 + number % _LARGEST_TAG
        if me in gives and me in takes and takes[me] is not gives[me]:
            takes[me][...] = gives[me]
            settle(takes[me])
        yield from self._until(
            partial(method, c, rank, tag)
            for method, parts in ((comm.Irecv, takes), (comm.Isend, gives))
            for rank, part in parts.items()
            if rank != me
            for c in chunks(part)
        )

    def _needs_pairs(self, data: Array, total: int) -> bool:
        return total > LARGEST_BYTES or is_cupy(data)


def _by_rank(data: Array | None, counts: Sequence[int]) -> dict[int, Array]:
    """Return the part of each rank; none where there is nothing."""
    return {} if data is None else dict(enumerate(cut(data, counts)))
