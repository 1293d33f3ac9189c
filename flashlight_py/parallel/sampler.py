"""The indices of this rank's samples, in an order that all ranks share."""

from __future__ import annotations

from collections.abc import Iterator

from flashlight_py.dataset.shares import strided_share
from flashlight_py.parallel.epochs import InEpochs
from flashlight_py.parallel.place import find_place


class DistributedSampler(InEpochs):
    """This rank's indices of ``n`` samples, in a new order for each epoch.

    One permutation of all samples, the same on every rank, is dealt out like cards: rank r of s
    gets its entries r, r + s, r + 2 s, ... So what the ranks have consumed when each took k
    samples are the permutation's first s k entries: if together they take B samples per step (B
    a multiple of s, B / s each), step t covers its entries [B t, B (t + 1)), whatever s is.
    Contiguous shares have no such property, and a seed of one's own for each rank gives shares
    that overlap.

    No sample comes twice and none is padded. Without ``drop_last`` every sample comes once, for
    evaluation: numbers of samples differ by one at most, so ranks may end after different
    numbers of steps. With ``drop_last`` every rank gets the same number, as training needs: the
    last n % size of the order are left out, if shuffled other ones in each epoch.

    Making one, ``set_epoch`` and ``load_state_dict`` are collective, unless rank and size are
    given: all ranks then compare n, shuffle, seed, drop_last, epoch and what is consumed.
    Iterating is not, and communicates nothing: it may happen in a thread or on one rank only. It
    begins anew each time, in the epoch's order. An index counts as used when it is handed out, and
    the other ranks are taken to be as far as this one; for loaders that read ahead, such as one
    that is given ``list(sampler)``, ``set_consumed`` corrects the count.

    ``state_dict`` returns the epoch and how many of its samples all ranks have consumed, and
    ``load_state_dict`` goes on from there, on any number of ranks: what is left of the epoch is
    dealt out again, so that each sample comes once.

    Args:
        n: number of samples, the same on every rank.
        shuffle: whether the order is a random one; else it is 0, 1, 2, ... in every epoch.
        seed: at least 0, the same on every rank. With the epoch it decides the order, on every
            platform alike.
        drop_last: whether every rank gets n // size samples.
        rank: which share, in [0, size); default that of the world.
        size: how many shares; default the size of the world. Pass both or neither; those passed
            are not compared with other ranks.

    Raises:
        TypeError: an argument that must be an integer is none.
        ValueError: ``n`` or ``seed`` is negative, ``rank`` is not in [0, size), or one of both
            is missing.
        MismatchError: ranks differ in an argument; on every rank, naming ranks and values.
        DistributedError: as :func:`flashlight_py.all_reduce`.

    Example:
        >>> [list(DistributedSampler(5, rank=rank, size=2)) for rank in range(2)]
        [[3, 4, 0], [1, 2]]
    """

    def __init__(
        self,
        n: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        size: int | None = None,
    ) -> None:
        what, self._drop_last = "DistributedSampler", bool(drop_last)
        place = find_place(what, rank, size)
        super().__init__(what, place, n, shuffle, seed, drop_last=self._drop_last)

    def __len__(self) -> int:
        """Return the number of this rank's samples that are left of the epoch."""
        return len(self._positions())

    def __iter__(self) -> Iterator[int]:
        """Go through this rank's indices.

        Raises:
            NotInitializedError: the world is another one than when the sampler was made.
        """
        return self._counting(self._at(self._positions()).tolist())

    def _positions(self) -> range:
        place = self._place
        return strided_share(self._left, place.rank, place.size, self._drop_last)

    def _counting(self, indices: list[int]) -> Iterator[int]:
        """Hand out ``indices``; with each, every rank is taken to be one further."""
        left, size = self._left, self._place.size
        end = left - left % size if self._drop_last else left
        for number, index in enumerate(indices, 1):
            used = number * size
            self._count(used if used < end else left)
            yield index
        self._count(left)
