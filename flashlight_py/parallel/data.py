"""A rank's share of data: of any sequence, of the samples of an epoch, or of global batches."""

from collections.abc import Iterator, Mapping
from typing import Any, SupportsIndex

import numpy as np

from flashlight_py.dataset.dataset import Dataset, Indices, Sample, contiguous_share, epoch_order
from flashlight_py.distributed import ProcessGroup, get_world_rank, get_world_size
from flashlight_py.distributed.internal import check_integer, group_or_world, in_step
from flashlight_py.errors import NotInitializedError
from flashlight_py.parallel.agreement import check_settings_agree


class Share:
    """Rank and size that the user passed or, if ``is_of_group``, in ``group`` (None: the world)."""

    def __init__(
        self, label: str, rank: int | None, size: int | None, group: ProcessGroup | None
    ) -> None:
        self._label, self.is_of_group, self.group = label, rank is None and size is None, group
        if self.is_of_group:
            members = group_or_world(group)
            if group is not None:
                members.backend()  # raises if the group is closed or does not contain this rank
            rank, size = members.rank, members.size
        elif rank is None or size is None or group is not None:
            raise ValueError(
                f"{label}: expected both rank and size, or neither and an optional group, got "
                f"rank={rank}, size={size}{' and a group' * bool(group)}"
            )
        self.rank = check_integer(label, "rank", rank)
        self.size = check_integer(label, "size", size)
        if self.rank >= self.size:
            raise ValueError(f"{label}: rank must be in [0, size), got rank={rank}, size={size}")

    def __getstate__(self) -> dict[str, Any]:
        """Return the share without its group, which cannot be pickled."""
        of_world = self.is_of_group and self.group is None
        return {**vars(self), "is_of_group": of_world, "group": None}

    def require_world(self) -> None:
        """Raise NotInitializedError if the world changed, GroupClosedError if the group is closed.

        Raise nothing if this process has no world now (after a shutdown, or in a forked process).
        """
        rank, size = get_world_rank(), get_world_size()
        if not self.is_of_group or size == 1:
            return
        if self.group is not None:
            self.group.backend()
        elif (rank, size) != (self.rank, self.size):
            raise NotInitializedError(
                f"{self._label}: expected the world in which it was created, as rank "
                f"{self.rank} of {self.size}, got rank {rank} of {size}. Make a new one after "
                "distributed_init"
            )


class DistributedDataContainer(Dataset):
    """This rank's share of ``data``, any object with ``[]`` and either ``len`` or ``shape``.

    A share is a contiguous run of elements. Sizes differ by at most one, and the longer shares come
    first. ``data`` may be a list, a dataset, or an array, which is divided along its first
    dimension. An element is read when it is used. If elements are tuples of arrays, the container
    can be batched and prefetched like any dataset.

    Not collective: ``data`` must have the same length on every rank. The samples of a step depend
    on the number of ranks; in :class:`flashlight_py.ShardedDataset` they do not.

    Args:
        data: Data to divide. Its length is read once.
        rank: Index of the share, in [0, size). Default: the rank in the group.
        size: Number of shares. Default: the size of the group. Pass both or neither.
        group: Process group, if ``rank`` and ``size`` are not passed. Default: the world.

    Raises:
        TypeError: If ``data`` has no length or no ``[]``, or is a mapping.
        ValueError: If ``rank`` is not in [0, size), only one of ``rank`` and ``size`` is passed,
            ``group`` is passed with them, or this process is not in the group.
        GroupClosedError: If the group is closed.

    Example:
        >>> share = DistributedDataContainer("abcde", rank=1, size=2)
        >>> len(share), share[0], share[-1], list(share)
        (2, 'd', 'e', ['d', 'e'])
    """

    def __init__(
        self, data: Any, rank: int | None = None, size: int | None = None, *,
        group: ProcessGroup | None = None,
    ) -> None:  # fmt: skip
        self._share = Share("DistributedDataContainer", rank, size, group)
        self._data = data
        if isinstance(data, Mapping):
            raise TypeError(
                "DistributedDataContainer: expected a sequence, an array or a Dataset, got the "
                f"mapping {type(data).__name__}. Pass, for example, "
                "TensorDataset(list(data.values()))"
            )
        problem = f"DistributedDataContainer: data must have [] and len, got {type(data).__name__}"
        if not hasattr(data, "__getitem__"):
            raise TypeError(f"{problem}, which has no []")
        try:
            # zarr arrays have no len(). The shape of a dataset may be the shape of one sample.
            length = len(data) if hasattr(data, "__len__") or not data.shape else data.shape[0]
        except TypeError as error:
            raise TypeError(f"{problem}, which has no length ({error})") from error
        self._positions = contiguous_share(length, self._share.rank, self._share.size)

    def __len__(self) -> int:
        """Return the number of elements in this rank's share."""
        return len(self._positions)

    def get(self, index: int) -> Any:
        """Return element ``index`` of the share. ``index`` must be in [0, len).

        Raises NotInitializedError if the world changed, GroupClosedError if the group is closed.
        """
        self._share.require_world()
        return self._data[self._positions[index]]

    def take(self, indices: Indices) -> Sample:
        """Return one batch of the share. If ``data`` is a dataset, its ``take`` makes the batch."""
        self._share.require_world()
        if isinstance(self._data, Dataset):
            return self._data.take(indices + self._positions.start)
        return super().take(indices)

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        """Return the element of the share at ``index``; for a slice, the result of ``data[slice]``.

        Raises:
            IndexError: If ``index`` is not in [-len, len).
            TypeError: If ``index`` is not an integer or a slice, or ``data`` has no slices.
            NotInitializedError: If the world has changed since the container was made.
        """
        if not isinstance(index, slice):
            return super().__getitem__(index)
        self._share.require_world()
        data, positions = self._data, self._positions[index]
        # With a negative step the range may stop at -1. In a slice, -1 means the last element.
        stop = positions.stop if positions.stop >= 0 else None
        try:
            return data[slice(positions.start, stop, positions.step) if positions else slice(0, 0)]
        except TypeError as error:
            raise TypeError(
                "DistributedDataContainer: expected data with slices, got "
                f"{type(data).__name__} ({error}). Use single indices"
            ) from error


def _ranks(arguments: dict[str, Any]) -> ProcessGroup | None:
    """Return the group in which the call is collective; None if rank and size were passed."""
    if share := getattr(arguments["self"], "_share", None):
        return group_or_world(share.group) if share.is_of_group else None
    group, *rank_and_size = map(arguments.get, ("group", "rank", "size"))
    return group_or_world(group) if group is not None or None in rank_and_size else None


class InEpochs:
    """The order of ``n`` samples in each epoch, and the number of samples used so far.

    All ranks together have always used the first ``consumed`` samples of the epoch's order, so this
    number is valid for any number of ranks. ``_begin`` is the position in the order at which
    iterators start: 0, or ``consumed`` of a loaded state. ``_left`` is ``n - _begin``.
    """

    _label: str  # class name in error messages

    def __init__(
        self, n: int, shuffle: bool, seed: int, drop_last: bool, share: Share, **others: int
    ) -> None:
        self._share = share
        self._n = check_integer(self._label, "n", n)
        seed = check_integer(self._label, "seed", seed)
        self._settings = {"n": self._n, "shuffle": bool(shuffle), "seed": seed}
        self._drop_last = bool(drop_last)
        self._others = {**others, "drop_last": self._drop_last}
        self._agree(0)
        self._epoch = -1
        self._go_to(0, 0)

    @property
    def epoch(self) -> int:
        """Number of the current epoch, 0 at first."""
        return self._epoch

    @in_step(_ranks)
    def set_epoch(self, epoch: int) -> None:
        """Select the order of ``epoch``, before iterating.

        Collective and blocking, unless rank and size were passed. A new epoch starts at its first
        sample. If ``epoch`` is the current epoch, nothing changes, also after ``load_state_dict``.

        Raises:
            TypeError: If ``epoch`` is not an integer.
            ValueError: If ``epoch`` is negative.
            MismatchError: If the ranks pass different epochs. Every rank raises; nothing changes.
            NotInitializedError: If the world has changed since this object was made.
            DistributedError: As :func:`flashlight_py.all_reduce`.
        """
        epoch = check_integer(self._label, "epoch", epoch)
        self._agree(epoch)
        if epoch != self._epoch:
            self._go_to(epoch, 0)

    @property
    def consumed(self) -> int:
        """Number of samples of the epoch that all ranks together have used so far."""
        return self._consumed

    def set_consumed(self, samples: int) -> None:
        """Set the number of samples of the epoch that all ranks together have used. Not collective.

        Only ``state_dict`` uses this number; the positions of iterators do not change. The number
        is kept until the epoch changes, a state is loaded, or this method is called again.

        Raises:
            TypeError: If ``samples`` is not an integer.
            ValueError: If ``samples`` is not in [0, number of samples].
        """
        samples = check_integer(self._label, "samples", samples)
        if samples > self._n:
            raise ValueError(
                f"{self._label}: samples must be in [0, n], got {samples} for n={self._n}"
            )
        self._consumed, self._is_set = samples, True

    def state_dict(self) -> dict[str, int | bool]:
        """Return a dict of n, shuffle, seed, epoch and consumed, valid as JSON. Not collective.

        Ranks with the same progress return equal states, so one state can be loaded on all ranks.
        """
        return {**self._settings, "epoch": self._epoch, "consumed": self._consumed}

    @in_step(_ranks)
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the sample at which ``state`` was saved, with any number of ranks.

        Collective and blocking, unless rank and size were passed. Until ``set_epoch`` selects
        another epoch, only samples that were not consumed are used and counted by ``len``.
        ``DistributedSampler`` and ``ShardedDataset`` accept states of each other.

        Raises:
            ValueError: If ``state`` lacks an entry or has another n, shuffle or seed.
            TypeError: If an entry of ``state`` is not an integer.
            MismatchError: If the ranks load different states. Every rank raises; nothing changes.
            NotInitializedError: If the world has changed since this object was made.
            DistributedError: As :func:`flashlight_py.all_reduce`.
        """
        epoch, consumed = (self._number_in(state, name) for name in ("epoch", "consumed"))
        for name, value in self._settings.items():
            if self._number_in(state, name) != value:
                raise ValueError(
                    f"{self._label}: expected a state with {name}={value}, got {state[name]}. Make "
                    f"the {self._label} with the arguments of the saved run"
                )
        if consumed > self._n:
            raise ValueError(f"{self._label}: consumed must be in [0, {self._n}], got {consumed}")
        self._agree(epoch, consumed)
        self._go_to(epoch, consumed)

    def _count(self, used: int) -> None:
        if not self._is_set:
            self._consumed = self._begin + used

    def _at(self, positions: range) -> Indices:
        self._share.require_world()
        start, stop = self._begin + positions.start, self._begin + positions.stop
        if self._order is None:
            return np.arange(start, stop, positions.step, dtype=np.int64)
        return self._order[start : stop : positions.step]

    def _go_to(self, epoch: int, consumed: int) -> None:
        if epoch != self._epoch:
            n, shuffle, seed = self._settings.values()
            self._order = epoch_order(n, seed, epoch) if shuffle else None
        self._epoch, self._begin, self._consumed = epoch, consumed, consumed
        self._left = self._n - consumed
        self._is_set = False  # whether set_consumed() was called

    def _number_in(self, state: Mapping[str, Any], name: str) -> int:
        if name not in state:
            raise ValueError(
                f"{self._label}: expected a state with {name!r}, as state_dict() returns it, got "
                f"{sorted(state)}"
            )
        value = int(state[name]) if isinstance(state[name], bool) else state[name]  # shuffle
        return check_integer(self._label, f"the state's {name}", value)

    def _agree(self, epoch: int, consumed: int = 0) -> None:
        self._share.require_world()
        if self._share.is_of_group:
            settings = {**self._settings, **self._others, "epoch": epoch, "consumed": consumed}
            check_settings_agree(self._label, settings, self._share.group)


class DistributedSampler(InEpochs):
    """This rank's share of the indices of ``n`` samples, in a new order for each epoch.

    Rank r of s ranks gets the entries r, r + s, r + 2 s, ... of one permutation of all samples. If
    all ranks together use B samples per step, step t uses entries [B t, B (t + 1)), for any size.

    No sample occurs twice, and no sample is added as padding. Without ``drop_last``, every sample
    occurs once, as evaluation needs. The ranks' numbers of samples then differ by at most one, so
    ranks may end after different numbers of steps. With ``drop_last``, every rank gets the same
    number of samples, as training needs. The last n % size entries of the order are left out.

    The constructor, ``set_epoch`` and ``load_state_dict`` are collective in the group, unless rank
    and size are passed. They compare the arguments, the epoch and ``consumed`` of all ranks.
    Iterating is not collective. Each new iterator starts from the beginning of the share.
    ``consumed`` counts an index as used when the iterator returns it, and assumes that the other
    ranks have used as many. If a loader reads ahead, correct the number with ``set_consumed``.
    ``load_state_dict`` divides the remaining samples among the current ranks, each sample once.

    Args:
        n: Number of samples, the same on every rank.
        shuffle: Whether the order is random. Otherwise it is 0, 1, 2, ... in every epoch.
        seed: Seed of the order, at least 0, the same on every rank and every platform.
        drop_last: Whether every rank gets exactly n // size samples.
        rank, size, group: As in :class:`flashlight_py.DistributedDataContainer`.

    Raises:
        TypeError: If ``n``, ``seed``, ``rank`` or ``size`` is not an integer.
        ValueError: If ``n`` or ``seed`` is negative, or as ``DistributedDataContainer``.
        MismatchError: If the ranks pass different arguments, which the message contains.
        DistributedError: As :func:`flashlight_py.all_reduce`.

    Example:
        >>> [list(DistributedSampler(5, rank=rank, size=2)) for rank in range(2)]
        [[3, 4, 0], [1, 2]]
    """

    _label = "DistributedSampler"

    @in_step(_ranks)
    def __init__(
        self, n: int, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False,
        rank: int | None = None, size: int | None = None, group: ProcessGroup | None = None,
    ) -> None:  # fmt: skip
        super().__init__(n, shuffle, seed, drop_last, Share(self._label, rank, size, group))

    def __len__(self) -> int:
        """Return the number of samples that this rank has left in the epoch."""
        return len(self._positions())

    def __iter__(self) -> Iterator[int]:
        """Return an iterator over this rank's remaining indices.

        Raises NotInitializedError if the world changed, GroupClosedError if the group is closed.
        """
        return self._counting(self._at(self._positions()).tolist())

    def _positions(self) -> range:
        # In each step, the ranks together use adjacent positions.
        left, share = self._left, self._share
        return range(share.rank, left - left % share.size if self._drop_last else left, share.size)

    def _counting(self, indices: list[int]) -> Iterator[int]:
        """Yield ``indices``; update ``consumed`` as if every rank had used as many indices."""
        left, size = self._left, self._share.size
        end = left - left % size if self._drop_last else left
        for number, index in enumerate(indices, 1):
            used = number * size
            self._count(used if used < end else left)
            yield index
        self._count(left)


class ShardedDataset(InEpochs, Dataset):
    """This rank's part of each global batch. Item t is the part of batch t.

    Global batch t has the entries [B t, B (t + 1)) of the epoch's order. B is
    ``global_batch_size``. Batches do not depend on the number of ranks. Ranks get contiguous parts
    whose sizes differ by at most one. If a batch has fewer samples than ranks, some ranks get an
    empty part: arrays with zero rows. Multiply a part's mean loss by ``weight(t)``. Training then
    gives the same result for any number of ranks (up to rounding), even with a shorter last batch.

    The constructor, ``set_epoch`` and ``load_state_dict`` are collective, as in
    :class:`flashlight_py.DistributedSampler`. All other methods send nothing, and
    ``PrefetchDataset`` may call them in threads. ``consumed`` counts a batch as used when an
    iterator returns it, also an iterator of a ``PrefetchDataset``. ``dataset[t]`` does not change
    ``consumed``. Batches are new arrays that ``dataset.take`` makes: override ``take`` to pad
    samples of unequal shapes. ``load_state_dict`` divides the remaining samples of the epoch into
    new global batches, numbered from 0, also for another number of ranks or ``global_batch_size``.

    Args:
        dataset: Dataset with the same samples on every rank. Its length is read once.
        global_batch_size: Number of samples that all ranks use in a step, at least 1.
        shuffle: Whether each epoch has its own random order.
        seed: Seed of the orders, at least 0, the same on every rank and platform.
        drop_last: Whether an incomplete last batch is left out.
        rank, size, group: As in ``DistributedSampler``.

    Raises:
        TypeError: If ``dataset`` is not a Dataset, or an integer argument has another type.
        ValueError: If ``global_batch_size`` < 1, or as ``DistributedSampler``.
        MismatchError: If the ranks pass different arguments, which the message contains.
        DistributedError: As :func:`flashlight_py.all_reduce`.

    Example:
        >>> rows = fl.dataset.TensorDataset([np.arange(5)])
        >>> parts = ShardedDataset(rows, 3, shuffle=False, rank=1, size=2)
        >>> [(x.tolist(), parts.weight(t)) for t, (x,) in enumerate(parts)]
        [([2], 0.6666666666666666), ([4], 1.0)]
    """

    _label = "ShardedDataset"

    @in_step(_ranks)
    def __init__(
        self, dataset: Dataset, global_batch_size: int, *, shuffle: bool = True, seed: int = 0,
        drop_last: bool = False, rank: int | None = None, size: int | None = None,
        group: ProcessGroup | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(dataset, Dataset):
            raise TypeError(
                f"{self._label}: expected a flashlight_py.dataset.Dataset, got "
                f"{type(dataset).__name__}. Pass arrays as TensorDataset([...])"
            )
        batch = check_integer(self._label, "global_batch_size", global_batch_size, least=1)
        share = Share(self._label, rank, size, group)
        super().__init__(len(dataset), shuffle, seed, drop_last, share, global_batch_size=batch)
        self._dataset = dataset
        self._batch_size = batch

    def __len__(self) -> int:
        """Return the number of global batches left in the epoch, the same on every rank."""
        left, size = self._left, self._batch_size
        return left // size if self._drop_last else -(-left // size)

    def __iter__(self) -> Iterator[Sample]:
        """Yield this rank's parts, counting the samples of each global batch as used."""
        for index in range(len(self)):
            part = self.get(index)
            self.handed_out(index)
            yield part

    def handed_out(self, index: int) -> None:
        """Count all batches up to ``index`` as used, because an iterator has returned ``index``."""
        self._count(self._left if index + 1 >= len(self) else (index + 1) * self._batch_size)

    def get(self, index: int) -> Sample:
        """Return this rank's part of global batch ``index``: arrays of shape (part, ...).

        Raises NotInitializedError if the world changed, GroupClosedError if the group is closed.
        """
        batch, part = self._part(index)
        if part:
            return self._dataset.take(self._at(part))
        # Read one row for dtypes and shapes: a user's dataset may not support empty indices.
        return tuple([field[:0] for field in self._dataset.take(self._at(batch[:1]))])

    def weight(self, index: SupportsIndex) -> float:
        """Return the weight of this rank's part of global batch ``index``; 0 if the part is empty.

        The weight is (rows of the part) * (number of ranks) / (rows of the batch). The average over
        ranks of weight * (mean over the part) is the mean over the batch. Multiply the loss by the
        weight if gradients are averaged, as by ``distribute_module_grads`` or
        ``all_reduce_gradients(module, 1 / size)``.

        Raises:
            IndexError: If ``index`` is not in [-len, len).
            TypeError: If ``index`` is not an integer.
        """
        try:
            position = range(len(self))[index]
        except IndexError:
            raise IndexError(
                f"weight: index must be in [-len, len), got {index} for {len(self)} batch(es)"
            ) from None
        batch, part = self._part(position)
        return len(part) * self._share.size / len(batch)

    def _part(self, index: int) -> tuple[range, range]:
        """Return the positions in the order, from 0, of global batch ``index`` and of this part."""
        batch = range(self._left)[index * self._batch_size : (index + 1) * self._batch_size]
        share = contiguous_share(len(batch), self._share.rank, self._share.size)
        return batch, batch[share.start : share.stop]
