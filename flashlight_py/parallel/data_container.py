"""This rank's share of some data, as if it were all there is."""

from collections.abc import Mapping
from typing import Any, SupportsIndex

from flashlight_py.dataset import Dataset
from flashlight_py.dataset.dataset import Indices, Sample
from flashlight_py.dataset.shares import contiguous_share
from flashlight_py.distributed import ProcessGroup, get_world_rank, get_world_size
from flashlight_py.distributed.calls.checks import whole_number
from flashlight_py.distributed.start.world import group_or_world
from flashlight_py.errors import NotInitializedError


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
        self.rank, self.size = whole_number(what, "rank", rank), whole_number(what, "size", size)
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
        self._positions = contiguous_share(length, self._share.rank, self._share.size)

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
