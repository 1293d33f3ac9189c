"""Ranks in a Cartesian grid, and who is whose neighbour: arithmetic, nothing is sent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count, takewhile

import numpy as np

from flashlight_py.distributed.calls.checks import check_rank, whole


@dataclass(frozen=True)
class Grid:
    """The places of a group's ranks in a grid, as MPI_Cart_create numbers them: row by row.

    Attributes:
        rank: this process's rank in the group.
        shape: the extent of each dimension; their product is the size of the group.
        periodic: of each dimension, whether its ends are neighbours.
    """

    rank: int
    shape: tuple[int, ...]
    periodic: tuple[bool, ...]

    @property
    def coords(self) -> tuple[int, ...]:
        """The place of this rank."""
        return self.coords_of(self.rank)

    def coords_of(self, rank: int) -> tuple[int, ...]:
        """Return the place of ``rank``, one number from 0 on for each dimension.

        Raises:
            ValueError: ``rank`` is no rank of the group.
        """
        rank = check_rank(math.prod(self.shape), "Grid.coords_of", "rank", rank)
        return tuple(map(int, np.unravel_index(rank, self.shape)))

    def rank_of(self, coords: Sequence[int]) -> int | None:
        """Return the rank at ``coords``; None, nobody, where a dimension has ended.

        Raises:
            ValueError: ``coords`` has not one number for each dimension.
        """
        if len(coords) != (dims := len(self.shape)):
            raise ValueError(f"Grid.rank_of: coords must have {dims} numbers, got {tuple(coords)}")
        rank = 0
        for place, extent, wraps in zip(coords, self.shape, self.periodic, strict=True):
            if not wraps and not 0 <= place < extent:
                return None
            rank = rank * extent + int(place) % extent
        return rank

    def shift(self, dim: int, steps: int = 1) -> tuple[int | None, int | None]:
        """Return ``(src, dst)`` of a move along ``dim``, as MPI_Cart_shift does.

        ``dst`` is ``steps`` places further (back, if negative) and ``src`` as many before; or None.

        Raises:
            ValueError: the grid has no dimension ``dim``.
        """
        if not -len(self.shape) <= dim < len(self.shape):
            raise ValueError(f"Grid.shift: shape {self.shape} has no dimension {dim}")
        ends = [list(self.coords), list(self.coords)]
        ends[0][dim] -= steps
        ends[1][dim] += steps
        return self.rank_of(ends[0]), self.rank_of(ends[1])


def extents_of(shape: int | Iterable[int | None], size: int) -> tuple[int, ...]:
    """Return ``shape`` for ``size`` ranks, with numbers for the extents that are None or -1."""
    given: list[int | None] = list(shape) if isinstance(shape, Iterable) else [shape]
    known = [whole(extent) for extent in given if extent is not None and extent != -1]
    if any(extent is None or extent < 1 for extent in known):
        raise ValueError(f"grid: extents are whole numbers from 1 on, or None; got {shape!r}")
    places = math.prod(filter(None, known))
    unknown = len(given) - len(known)
    if size % places or (not unknown and places != size):
        raise ValueError(
            f"grid: shape {tuple(given)} has {'a multiple of ' * bool(unknown)}{places} places, "
            f"and this group has {size} ranks; every rank needs one place. None in place of an "
            "extent works it out"
        )
    found = iter(_balanced(size // places, unknown))
    return tuple(next(found) if extent in (None, -1) else int(extent) for extent in given)


def _balanced(size: int, dims: int) -> list[int]:
    """Return ``dims`` numbers near each other, larger ones first, whose product is ``size``."""
    if dims < 2:
        return [size] * dims
    small = takewhile(lambda number: number**dims <= size, count(1))
    least = max(number for number in small if size % number == 0)
    return sorted([*_balanced(size // least, dims - 1), least], reverse=True)
