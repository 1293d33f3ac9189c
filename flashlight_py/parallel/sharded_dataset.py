"""This rank's part of every global batch: the same batches for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import SupportsIndex

from flashlight_py.dataset import Dataset
from flashlight_py.dataset.dataset import Sample
from flashlight_py.dataset.shares import (
    batch_positions,
    contiguous_share,
    count_batches,
    weight_of_part,
)
from flashlight_py.distributed.calls.checks import whole_number
from flashlight_py.parallel.epochs import InEpochs
from flashlight_py.parallel.place import find_place


class ShardedDataset(InEpochs, Dataset):
    """Item t is this rank's part of global batch t; every rank has as many items.

    Global batch t are the entries [B t, B (t + 1)) of the epoch's order, where B is
    ``global_batch_size``: no number of ranks comes into it. Its samples are shared out in
    neighbouring parts whose sizes differ by one at most. A batch of fewer samples than ranks
    leaves some rank an empty part: arrays of zero rows. ``weight(t)`` makes the mean over a part
    count for what it is worth, so that training gives the same for any number of ranks (but for
    rounding), also with a shorter last batch.

    Making one, ``set_epoch`` and ``load_state_dict`` are collective, unless rank and size are
    given: all ranks then compare their arguments, the number of samples, the epoch and what is
    consumed. Everything else communicates nothing, and ``PrefetchDataset`` may do it in threads.
    A batch counts as used when iterating hands it out, also by a ``PrefetchDataset``;
    ``dataset[t]`` does not count.
    Batches are new arrays, as ``take`` of ``dataset`` makes them: define it to pad samples of
    unequal shapes.

    ``state_dict`` returns the epoch and how many of its samples are consumed. After
    ``load_state_dict``, on any number of ranks and with any batch size, the items are the
    batches of the samples that are left, counted from 0.

    Args:
        dataset: the same samples on every rank; its length is asked for once.
        global_batch_size: number of samples that all ranks take together in a step, at least 1.
        shuffle: whether each epoch has a random order of its own.
        seed: at least 0, the same on every rank; decides the orders, on every platform alike.
        drop_last: whether a last batch of fewer samples is left out.
        rank: whose parts, in [0, size); default that of the world.
        size: how many parts; default the size of the world. Pass both or neither; those are
            not compared with other ranks.

    Raises:
        TypeError: ``dataset`` is no Dataset, or an argument that must be an integer is none.
        ValueError: ``global_batch_size`` < 1, ``seed`` is negative, ``rank`` is not in
            [0, size), or one of both is missing.
        MismatchError: ranks differ in an argument; on every rank, naming ranks and values.
        DistributedError: as :func:`flashlight_py.all_reduce`.

    Example:
        >>> rows = fl.dataset.TensorDataset([np.arange(5)])
        >>> parts = ShardedDataset(rows, 3, shuffle=False, rank=1, size=2)
        >>> [(x.tolist(), parts.weight(t)) for t, (x,) in enumerate(parts)]
        [([2], 0.6666666666666666), ([4], 1.0)]
    """

    def __init__(
        self,
        dataset: Dataset,
        global_batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        size: int | None = None,
    ) -> None:
        what, drop_last = "ShardedDataset", bool(drop_last)
        if not isinstance(dataset, Dataset):
            raise TypeError(
                f"{what}: expected a flashlight_py.dataset.Dataset, got {type(dataset).__name__}; "
                "arrays become one by TensorDataset([...])"
            )
        batch = whole_number(what, "global_batch_size", global_batch_size, least=1)
        super().__init__(
            what,
            find_place(what, rank, size),
            len(dataset),
            shuffle,
            seed,
            global_batch_size=batch,
            drop_last=drop_last,
        )
        self._dataset = dataset
        self._batch_size = batch
        self._drop_last = drop_last

    def __len__(self) -> int:
        """Return the number of global batches left of the epoch, the same on every rank."""
        return count_batches(self._left, self._batch_size, self._drop_last)

    def __iter__(self) -> Iterator[Sample]:
        """Go through the batches, counting the samples that are used."""
        for index in range(len(self)):
            part = self.get(index)
            self.handed_out(index)
            yield part

    def handed_out(self, index: int) -> None:
        """Count batch ``index`` as used, and with it those before; the last one ends the epoch."""
        is_last = index + 1 >= len(self)
        self._count(self._left if is_last else (index + 1) * self._batch_size)

    def get(self, index: int) -> Sample:
        """Return this rank's part of global batch ``index``: arrays of shape (part, ...).

        Raises:
            NotInitializedError: the world is another one than when this was made.
        """
        part = self._part(index)
        if part:
            return self._dataset.take(self._at(part))
        # A dataset of one's own can show what no rows look like by a row only.
        one = self._dataset.take(self._at(self._batch(index)[:1]))
        return tuple([field[:0] for field in one])

    def weight(self, index: SupportsIndex) -> float:
        """Return the weight of this rank's part of global batch ``index``; 0 if it is empty.

        It is rows of the part * size / rows of the batch: the average over ranks of weight *
        (mean over the part) is the mean over the whole batch. ``distribute_module_grads`` and
        ``all_reduce_gradients(module, 1 / size)`` take that average, so multiply the loss by it.

        Raises:
            IndexError: ``index`` is not in [-len, len).
            TypeError: ``index`` is no integer.
        """
        try:
            position = range(len(self))[index]
        except IndexError:
            raise IndexError(
                f"ShardedDataset holds {len(self)} batch(es); index {index} is out of range"
            ) from None
        return weight_of_part(
            len(self._part(position)), len(self._batch(position)), self._place.size
        )

    def _batch(self, index: int) -> range:
        return batch_positions(index, self._left, self._batch_size)

    def _part(self, index: int) -> range:
        batch = self._batch(index)
        share = contiguous_share(len(batch), self._place.rank, self._place.size)
        return batch[share.start : share.stop]
