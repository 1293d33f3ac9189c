"""Groups of some ranks."""

from __future__ import annotations

from collections.abc import Sequence

from flashlight_py.distributed.api._world import of
from flashlight_py.distributed.group import ProcessGroup

__all__ = ["new_group", "split"]


def new_group(
    ranks: Sequence[int], group: ProcessGroup | None = None, timeout: float | None = None
) -> ProcessGroup:
    """Make a group of some ranks of the world, or of ``group``.

    Collective over the world (or ``group``), blocking: every rank calls it, with the same list,
    also those that are not in it. The group has connections of its own, so its collectives may
    be in flight together with those of other groups. ``with`` closes it, as does ``close()``,
    and the end of the world.

    Args:
        ranks: ranks in the world (or ``group``), each once; their order is that of the new ranks.
        group: the group that they belong to, default the world.
        timeout: seconds that each collective and message of the new group may take, default those
            of the group that it is made of; the same on every rank.

    Returns:
        The group; on a rank that is not in it one with ``is_member`` False and ``rank`` -1, whose
        verbs raise ValueError.

    Raises:
        ValueError: a rank is out of range or twice in the list, the list is empty, or ``timeout``
            is no positive number.
        MismatchError: the ranks passed different lists or timeouts; raised on every rank.
        DistributedError: as for :func:`all_reduce` and :func:`distributed_init`.
    """
    return of(group).new_group(ranks, timeout)


def split(
    color: int | None,
    key: int = 0,
    group: ProcessGroup | None = None,
    timeout: float | None = None,
) -> ProcessGroup:
    """Make one group of all ranks that give the same ``color``, for each color.

    Collective over the world (or ``group``), blocking, as MPI_Comm_split. Ranks of a new group are
    in the order of ``key``, then of their old ranks.

    Args:
        color: any integer; None: this rank joins none, and gets a group that it is not in.
        key: any integer.
        group: the group that is split, default the world.
        timeout: in seconds, as for :func:`new_group`; the same on every rank.

    Returns:
        This rank's new group; see :func:`new_group`.

    Raises:
        ValueError: ``color`` or ``key`` is no integer, or ``timeout`` no positive number.
        DistributedError: as for :func:`new_group`.
    """
    return of(group).split(color, key, timeout)
