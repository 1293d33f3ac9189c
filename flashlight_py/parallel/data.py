"""A rank's share: of any data, of the samples of each epoch, or of global batches."""

from collections.abc import Iterator, Mapping
from typing import Any, SupportsIndex

import numpy as np

from flashlight_py.dataset import Dataset, shares
from flashlight_py.dataset.dataset import Indices, Sample
from flashlight_py.distributed import ProcessGroup, get_world_rank, get_world_size
from flashlight_py.distributed.internal import check_integer, group_or_world, in_step
from flashlight_py.errors import NotInitializedError
from flashlight_py.parallel.agreement import check_settings_agree


class Share:
    """A share for ``what``; ``rank`` and ``size`` are those of ``group`` if ``is_of_group``."""

    def __init__(
        self, what: str, rank: int | None, size: int | None, group: ProcessGroup | None
    ) -> None:
        self._what, self.is_of_group, self.group = what, rank is None and size is None, group
        if self.is_of_group:
            members = group_or_world(group)
            if group is not None:
                members.backend()  # raises if the group is closed or does not contain this rank
            rank, size = members.rank, members.size
        elif rank is None or size is None or group is not None:
            raise ValueError(
                f"{what}: pass both rank and size, or neither of them and a group (default: the "
                f"world); got rank={rank}, size={size}{' and a group' * bool(group)}"
            )
        self.rank, self.size = check_integer(what, "rank", rank), check_integer(what, "size", size)
        if self.rank >= self.size:
            raise ValueError(f"{what}: rank must be in [0, size), got rank={rank}, size={size}")

    def __getstate__(self) -> dict[str, Any]:
        """Return the share of this rank and size without the group, which cannot be pickled."""
        of_world = self.is_of_group and self.group is None
        return {**vars(self), "is_of_group": of_world, "group": None}

    def require_world(self) -> None:
        """Raise a NotInitializedError if the share is of another world than the current one.

        Raises a GroupClosedError if its group is closed. A process that is alone now (after a
        shutdown, or forked by a rank to load data) may keep its share.
        """
        rank, size = get_world_rank(), get_world_size()
        if not self.is_of_group or size == 1:
            return
        if self.group is not None:
            self.group.backend()
        elif (rank, size) != (self.rank, self.size):
            raise NotInitializedError(
                f"rank {rank} of {size}: this {self._what} was made as rank {self.rank} of "
                f"{self.size}, for a world that is no more; make it anew, after distributed_init"
            )


class DistributedDataContainer(Dataset):
    """This rank's share of ``data``, which is anything with ``len`` or ``shape``, and ``[]``.

    A share is a run of neighbouring elements. Sizes differ by at most one, and the longer shares
    come first. Lists, arrays (by their first dimension) and datasets are ``data``; an element is
    read when it is used. If elements are tuples of arrays, the container can be batched and
    prefetched like any dataset.

    Not collective: ``data`` must have the same length on every rank. The samples of a step depend
    on the number of ranks; with :class:`flashlight_py.ShardedDataset` they do not.

    Args:
        data: its length is asked for once.
        rank: which share, in [0, size); default the rank in the group.
        size: how many shares; default the size of the group. Pass both or neither.
        group: the process group, default the world; not with ``rank`` and ``size``.

    Raises:
        TypeError: ``data`` has no length or no ``[]``, or is a mapping.
        ValueError: ``rank`` is not in [0, size), one of both is missing, both are passed with a
            group, or this process is not in the group.
        GroupClosedError: the group is closed.

    Example:
        >>> share = DistributedDataContainer("abcde", rank=1, size=2)
        >>> len(share), share[0], share[-1], list(share)
        (2, 'd', 'e', ['d', 'e'])
    """

    def __init__(
        self,
        data: Any,
        rank: int | None = None,
        size: int | None = None,
        *,
        group: ProcessGroup | None = None,
    ) -> None:
        self._share = Share("DistributedDataContainer", rank, size, group)
        self._data = data
        if isinstance(data, Mapping):
            raise TypeError(
                f"DistributedDataContainer: the keys of a {type(data).__name__} are no positions "
                "to be shared out; pass a sequence, an array or a Dataset, such as "
                "TensorDataset(list(data.values()))"
            )
        what = f"DistributedDataContainer: data of type {type(data).__name__}"
        if not hasattr(data, "__getitem__"):
            raise TypeError(f"{what} cannot be indexed by []")
        try:
            # Arrays of zarr have no len; and what has one may have the shape of a sample.
            length = len(data) if hasattr(data, "__len__") or not data.shape else data.shape[0]
        except TypeError as error:
            raise TypeError(f"{what} has no length ({error})") from error
        self._positions = shares.contiguous_share(length, self._share.rank, self._share.size)

    def __len__(self) -> int:
        """Return the number of elements in this rank's share."""
        return len(self._positions)

    def get(self, index: int) -> Any:
        """Return element ``index`` of the share, which is in [0, len).

        Raises:
            NotInitializedError: the world is another one than when the container was made.
            GroupClosedError: its group is closed.
        """
        self._share.require_world()
        return self._data[self._positions[index]]

    def take(self, indices: Indices) -> Sample:
        """Return one batch of the share, as ``data`` makes it where it is a dataset."""
        self._share.require_world()
        if isinstance(self._data, Dataset):
            return self._data.take(indices + self._positions.start)
        return super().take(indices)

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        """Return an element of the share, or those of a slice as ``data`` returns them.

        Raises:
            IndexError: ``index`` is not in [-len, len).
            TypeError: ``index`` is neither an integer nor a slice, or ``data`` takes no slice.
            NotInitializedError: as ``get``.
        """
        if not isinstance(index, slice):
            return super().__getitem__(index)
        self._share.require_world()
        data, here = self._data, self._positions[index]
        # Going down, the range may stop at -1, which a slice would take for the last element.
        stop = here.stop if here.stop >= 0 else None
        try:
            return data[slice(here.start, stop, here.step) if here else slice(0, 0)]
        except TypeError as error:
            raise TypeError(
                f"DistributedDataContainer: its data, of type {type(data).__name__}, has no "
                f"slices ({error}); take single elements"
            ) from error


def _ranks(arguments: dict[str, Any]) -> ProcessGroup | None:
    """Return the group; None if rank and size were passed, so that nothing is compared."""
    if share := getattr(arguments["self"], "_share", None):
        return group_or_world(share.group) if share.is_of_group else None
    group, *place = map(arguments.get, ("group", "rank", "size"))
    return group_or_world(group) if group is not None or None in place else None


class InEpochs:
    """``n`` samples in an order for each epoch, which is 0 at first, and how much of it is used.

    All ranks together have always used a beginning of the epoch's order, so its length,
    ``consumed``, describes it for any number of ranks. ``_begin`` is where the epoch begins here:
    0, or what was consumed when its state was saved; ``_left`` samples follow.
    """

    _what: str  # what messages call it

    def __init__(
        self, n: int, shuffle: bool, seed: int, drop_last: bool, share: Share, **others: int
    ) -> None:
        self._share = share
        self._n = check_integer(self._what, "n", n)
        seed = check_integer(self._what, "seed", seed)
        self._settings = {"n": self._n, "shuffle": bool(shuffle), "seed": seed}
        self._drop_last = bool(drop_last)
        self._others = {**others, "drop_last": self._drop_last}
        self._agree(0)
        self._epoch = -1
        self._go_to(0, 0)

    @property
    def epoch(self) -> int:
        """The current epoch, 0 at first."""
        return self._epoch

    @in_step(_ranks)
    def set_epoch(self, epoch: int) -> None:
        """Go to the order of ``epoch``, before iterating; blocking.

        Collective, unless rank and size were given. Another epoch than the current one begins with
        its first sample. The current one stays as it is, also where ``load_state_dict`` went on in
        the middle of it.

        Raises:
            TypeError: ``epoch`` is not an integer.
            ValueError: ``epoch`` is negative.
            MismatchError: ranks go to different epochs; on every rank, and the epoch stays.
            NotInitializedError: the world is another one than when this was made.
            DistributedError: as :func:`flashlight_py.all_reduce`.
        """
        epoch = check_integer(self._what, "epoch", epoch)
        self._agree(epoch)
        if epoch != self._epoch:
            self._go_to(epoch, 0)

    @property
    def consumed(self) -> int:
        """How many samples of the epoch all ranks have used together; iterating counts."""
        return self._consumed

    def set_consumed(self, samples: int) -> None:
        """Set how many samples of the epoch all ranks have used together. Not collective.

        Iterating does not begin elsewhere by it. It holds until the epoch changes, a state is
        loaded or this is called again.

        Raises:
            TypeError: ``samples`` is not an integer.
            ValueError: ``samples`` is not in [0, number of samples].
        """
        samples = check_integer(self._what, "samples", samples)
        if samples > self._n:
            raise ValueError(
                f"{self._what}: at most n={self._n} samples can be consumed, got {samples}"
            )
        self._consumed, self._is_set = samples, True

    def state_dict(self) -> dict[str, int | bool]:
        """Return where this run is: n, shuffle, seed, epoch and consumed. Not collective.

        Equal on ranks that are equally far, so the state of one serves all. JSON can hold it.
        """
        return {**self._settings, "epoch": self._epoch, "consumed": self._consumed}

    @in_step(_ranks)
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state`` was taken, on any number of ranks; blocking.

        Collective, unless rank and size were given. Until ``set_epoch`` goes to another epoch, this
        has the samples that were not consumed, and ``len`` counts what is left. A state of a
        ``DistributedSampler`` serves a ``ShardedDataset`` as well, and the other way round.

        Raises:
            ValueError: ``state`` is none of these, or n, shuffle or seed are others.
            TypeError: something in ``state`` is no integer.
            MismatchError: ranks load different states; on every rank, and nothing changes.
            NotInitializedError: the world is another one than when this was made.
            DistributedError: as :func:`flashlight_py.all_reduce`.
        """
        epoch, consumed = (self._number_in(state, name) for name in ("epoch", "consumed"))
        for name, value in self._settings.items():
            if self._number_in(state, name) != value:
                raise ValueError(
                    f"{self._what}: the state was taken with {name}={state[name]}, this one has "
                    f"{value}, and another order; make it with the arguments of that run"
                )
        if consumed > self._n:
            raise ValueError(f"{self._what}: a state with {consumed} of {self._n} samples consumed")
        self._agree(epoch, consumed)
        self._go_to(epoch, consumed)

    def _count(self, used: int) -> None:
        """Note that of the samples left all ranks together have used the first ``used``."""
        if not self._is_set:
            self._consumed = self._begin + used

    def _at(self, positions: range) -> Indices:
        """Return the indices of the samples left at ``positions``, in the world of before."""
        self._share.require_world()
        start, stop = self._begin + positions.start, self._begin + positions.stop
        if self._order is None:
            return np.arange(start, stop, positions.step, dtype=np.int64)
        return self._order[start : stop : positions.step]

    def _go_to(self, epoch: int, consumed: int) -> None:
        if epoch != self._epoch:
            n, shuffle, seed = self._settings.values()
            self._order = shares.epoch_order(n, seed, epoch) if shuffle else None
        self._epoch, self._begin, self._consumed = epoch, consumed, consumed
        self._left = self._n - consumed
        self._is_set = False  # by the user

    def _number_in(self, state: Mapping[str, Any], name: str) -> int:
        if name not in state:
            raise ValueError(
                f"{self._what}: expected a state with {name!r}, as state_dict() returns it; it "
                f"has {sorted(state)}"
            )
        value = int(state[name]) if isinstance(state[name], bool) else state[name]  # of shuffle
        return check_integer(self._what, f"the state's {name}", value)

    def _agree(self, epoch: int, consumed: int = 0) -> None:
        self._share.require_world()
        if self._share.is_of_group:
            settings = {**self._settings, **self._others, "epoch": epoch, "consumed": consumed}
            check_settings_agree(self._what, settings, self._share.group)


class DistributedSampler(InEpochs):
    """This rank's indices of ``n`` samples, in a new order for each epoch.

    Rank r of s gets the entries r, r + s, r + 2 s, ... of one permutation of all samples. If the
    ranks together take B samples per step, B / s each, step t covers the entries
    [B t, B (t + 1)) for every number of ranks s.

    No sample comes twice and none is padded. Without ``drop_last`` every sample comes once, for
    evaluation: numbers of samples differ by one at most, so ranks may end after different
    numbers of steps. With ``drop_last`` every rank gets the same number, as training needs: the
    last n % size of the order are left out, if shuffled other ones in each epoch.

    Making one, ``set_epoch`` and ``load_state_dict`` are collective in the group, unless rank and
    size are given: its ranks compare all arguments, the epoch and what is consumed. Iterating sends
    nothing and begins anew each time. An index counts as used when it is handed out, and the other
    ranks are taken to be as far as this one; for loaders that read ahead ``set_consumed`` corrects
    the count. After ``load_state_dict``, on any number of ranks, the rest of the epoch is dealt out
    again, so that each sample comes once.

    Args:
        n: number of samples, the same on every rank.
        shuffle: whether the order is a random one; else it is 0, 1, 2, ... in every epoch.
        seed: at least 0, the same on every rank. With the epoch it decides the order, on every
            platform alike.
        drop_last: whether every rank gets n // size samples.
        rank, size, group: as of :class:`flashlight_py.DistributedDataContainer`.

    Raises:
        TypeError: an argument that must be an integer is none.
        ValueError: ``n`` or ``seed`` is negative, or as of ``DistributedDataContainer``.
        MismatchError: ranks differ in an argument; on every rank, naming ranks and values.
        DistributedError: as :func:`flashlight_py.all_reduce`.

    Example:
        >>> [list(DistributedSampler(5, rank=rank, size=2)) for rank in range(2)]
        [[3, 4, 0], [1, 2]]
    """

    _what = "DistributedSampler"

    @in_step(_ranks)
    def __init__(
        self,
        n: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        size: int | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(n, shuffle, seed, drop_last, Share(self._what, rank, size, group))

    def __len__(self) -> int:
        """Return the number of this rank's samples that are left of the epoch."""
        return len(self._positions())

    def __iter__(self) -> Iterator[int]:
        """Go through this rank's indices.

        Raises:
            NotInitializedError: the world is another one than when the sampler was made.
            GroupClosedError: its group is closed.
        """
        return self._counting(self._at(self._positions()).tolist())

    def _positions(self) -> range:
        share = self._share
        return shares.strided_share(self._left, share.rank, share.size, self._drop_last)

    def _counting(self, indices: list[int]) -> Iterator[int]:
        """Hand out ``indices``; with each, every rank is taken to be one further."""
        left, size = self._left, self._share.size
        end = left - left % size if self._drop_last else left
        for number, index in enumerate(indices, 1):
            used = number * size
            self._count(used if used < end else left)
            yield index
        self._count(left)


class ShardedDataset(InEpochs, Dataset):
    """Item t is this rank's part of global batch t; every rank has as many items.

    Global batch t are the entries [B t, B (t + 1)) of the epoch's order, where B is
    ``global_batch_size``: no number of ranks comes into it. Its samples are shared out in
    neighbouring parts whose sizes differ by one at most. A batch of fewer samples than ranks
    leaves some rank an empty part: arrays of zero rows. ``weight(t)`` makes the mean over a part
    count for what it is worth, so that training gives the same for any number of ranks (but for
    rounding), also with a shorter last batch.

    Making one, ``set_epoch`` and ``load_state_dict`` are collective as those of
    :class:`flashlight_py.DistributedSampler`. Everything else sends nothing, and
    ``PrefetchDataset`` may do it in threads. A batch counts as used when iterating hands it out,
    also by a ``PrefetchDataset``; ``dataset[t]`` does not count. Batches are new arrays, as
    ``take`` of ``dataset`` makes them: define it to pad samples of unequal shapes. After
    ``load_state_dict``, on any number of ranks and with any batch size, the items are the batches
    of the samples that are left, counted from 0.

    Args:
        dataset: the same samples on every rank; its length is asked for once.
        global_batch_size: number of samples that all ranks take together in a step, at least 1.
        shuffle: whether each epoch has a random order of its own.
        seed: at least 0, the same on every rank; decides the orders, on every platform alike.
        drop_last: whether a last batch of fewer samples is left out.
        rank, size, group: as of ``DistributedSampler``.

    Raises:
        TypeError: ``dataset`` is no Dataset, or an argument that must be an integer is none.
        ValueError: ``global_batch_size`` < 1, or as of ``DistributedSampler``.
        MismatchError: ranks differ in an argument; on every rank, naming ranks and values.
        DistributedError: as :func:`flashlight_py.all_reduce`.

    Example:
        >>> rows = fl.dataset.TensorDataset([np.arange(5)])
        >>> parts = ShardedDataset(rows, 3, shuffle=False, rank=1, size=2)
        >>> [(x.tolist(), parts.weight(t)) for t, (x,) in enumerate(parts)]
        [([2], 0.6666666666666666), ([4], 1.0)]
    """

    _what = "ShardedDataset"

    @in_step(_ranks)
    def __init__(
        self,
        dataset: Dataset,
        global_batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        rank: int | None = None,
        size: int | None = None,
        group: ProcessGroup | None = None,
    ) -> None:
        if not isinstance(dataset, Dataset):
            raise TypeError(
                f"{self._what}: expected a flashlight_py.dataset.Dataset, got "
                f"{type(dataset).__name__}; arrays become one by TensorDataset([...])"
            )
        batch = check_integer(self._what, "global_batch_size", global_batch_size, least=1)
        share = Share(self._what, rank, size, group)
        super().__init__(len(dataset), shuffle, seed, drop_last, share, global_batch_size=batch)
        self._dataset = dataset
        self._batch_size = batch

    def __len__(self) -> int:
        """Return the number of global batches left of the epoch, the same on every rank."""
        return shares.count_batches(self._left, self._batch_size, self._drop_last)

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
            GroupClosedError: its group is closed.
        """
        batch, part = self._part(index)
        if part:
            return self._dataset.take(self._at(part))
        # A dataset of one's own can show what no rows look like by a row only.
        one = self._dataset.take(self._at(batch[:1]))
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
        batch, part = self._part(position)
        return shares.weight_of_part(len(part), len(batch), self._share.size)

    def _part(self, index: int) -> tuple[range, range]:
        """Return the positions of global batch ``index``, and those of this rank's part."""
        batch = shares.batch_positions(index, self._left, self._batch_size)
        share = shares.contiguous_share(len(batch), self._share.rank, self._share.size)
        return batch, batch[share.start : share.stop]
