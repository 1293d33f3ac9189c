"""Any Python object that can be pickled, between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from flashlight_py.distributed.api._world import of
from flashlight_py.distributed.group import ProcessGroup

__all__ = ["all_gather_object", "broadcast_object", "gather_object", "scatter_object"]

T = TypeVar("T")


def broadcast_object(obj: Any = None, root: int = 0, group: ProcessGroup | None = None) -> Any:
    """Return rank ``root``'s ``obj``, on every rank; the others' is not looked at.

    Collective, blocking. On ``root`` it is the object itself, elsewhere a copy, made by pickle:
    the ranks of a group trust each other (docs/sharp-bits.md).

    Raises:
        ValueError: ``root`` is no rank of the group.
        TypeError: the object cannot be pickled; raised on every rank, and nobody is given
            anything. What unpickling raises is raised where it does, with a note that names the
            ranks.
        DistributedError: as for :func:`all_reduce`.
    """
    return of(group).broadcast_object(obj, root)


def all_gather_object(obj: T, group: ProcessGroup | None = None) -> list[T]:
    """Return the list of all ranks' objects, in rank order. Collective, blocking.

    The own one is the object itself, the others are copies, made by pickle.

    Raises:
        TypeError: a rank's object cannot be pickled; raised on every rank, names the rank, and
            nobody is given anything.
        DistributedError: as for :func:`all_reduce`.

    Example:
        >>> fl.all_gather_object(7)
        [7]
    """
    return of(group).all_gather_object(obj)


def gather_object(obj: T, root: int = 0, group: ProcessGroup | None = None) -> list[T] | None:
    """Return the list of all ranks' objects on rank ``root``, None elsewhere.

    Collective, blocking; as :func:`all_gather_object`.

    Raises:
        ValueError: ``root`` is no rank of the group.
        TypeError, DistributedError: as for :func:`all_gather_object`.
    """
    return of(group).gather_object(obj, root)


def scatter_object(
    objs: Sequence[Any] | None = None, root: int = 0, group: ProcessGroup | None = None
) -> Any:
    """Return this rank's one of the objects that rank ``root`` gives, one per rank.

    Collective, blocking; as :func:`broadcast_object`.

    Raises:
        ValueError: ``root`` is no rank of the group, or has not one object for each rank.
        TypeError, DistributedError: as for :func:`broadcast_object`.
    """
    return of(group).scatter_object(objs, root)
