"""Ranks in a Cartesian grid, and their neighbours. Arithmetic only: nothing is sent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count, takewhile

import numpy as np

from flashlight_py.checks import as_integer
from flashlight_py.distributed.calls.checks import check_rank


@dataclass(frozen=True)
class Grid:
    """The ranks of a group as a grid, numbered row by row like in MPI_Cart_create.

    Attributes:
        rank: Rank of this process in the group.
        shape: Length of each dimension. The product is the size of the group.
        periodic: For each dimension, True if the first and the last rank are neighbours.
    """

    rank: int
    shape: tuple[int, ...]
    periodic: tuple[bool, ...]

    @property
    def coords(self) -> tuple[int, ...]:
        """Coordinates of this rank."""
        return self.coords_of(self.rank)

    def coords_of(self, rank: int) -> tuple[int, ...]:
        """Return the coordinates of ``rank``: one integer from 0 for each dimension.

        Raises:
            ValueError: If ``rank`` is no rank of the group.
        """
        rank = check_rank(math.prod(self.shape), "Grid.coords_of", "rank", rank)
        return tuple(map(int, np.unravel_index(rank, self.shape)))

    def rank_of(self, coords: Sequence[int]) -> int | None:
        """Return the rank at ``coords``. Beyond the edge of a dimension, return None.

        In a periodic dimension, coordinates beyond the edge continue at the other edge.

        Raises:
            ValueError: If ``coords`` does not have one number for each dimension.
        """
        if len(coords) != (dims := len(self.shape)):
            raise ValueError(f"Grid.rank_of: coords must have {dims} numbers, got {tuple(coords)}")
        rank = 0
        for coord, extent, wraps in zip(coords, self.shape, self.periodic, strict=True):
            if not wraps and not 0 <= coord < extent:
                return None
            rank = rank * extent + int(coord) % extent
        return rank

    def shift(self, dim: int, steps: int = 1) -> tuple[int | None, int | None]:
        """Return the ranks ``(src, dst)`` of a shift along ``dim``, like MPI_Cart_shift.

        ``dst`` is ``steps`` positions after this rank, and ``src`` is ``steps`` positions before
        it. A position beyond an edge gives None.

        Raises:
            ValueError: If the grid has no dimension ``dim``.
        """
        if not -len(self.shape) <= dim < len(self.shape):
            raise ValueError(f"Grid.shift: dim must be a dimension of {self.shape}, got {dim}")
        ends = [list(self.coords), list(self.coords)]
        ends[0][dim] -= steps
        ends[1][dim] += steps
        return self.rank_of(ends[0]), self.rank_of(ends[1])


def extents_of(shape: int | Iterable[int | None], size: int) -> tuple[int, ...]:
    values: list[int | None] = list(shape) if isinstance(shape, Iterable) else [shape]
    extents = [as_integer(extent) for extent in values if extent is not None and extent != -1]
    if any(extent is None or extent < 1 for extent in extents):
        raise ValueError(f"grid: shape must have positive integers, None or -1, got {shape!r}")
    product = math.prod(filter(None, extents))
    unknown = len(values) - len(extents)
    if size % product or (not unknown and product != size):
        raise ValueError(
            f"grid: the product of shape must be {size}, the number of ranks, or a divisor of it, "
            f"got {product} for shape {tuple(values)}. Pass None for a length to be computed."
        )
    computed = iter(_balanced(size // product, unknown))
    return tuple(next(computed) if extent in (None, -1) else int(extent) for extent in values)


def _balanced(size: int, dims: int) -> list[int]:
    """Return ``dims`` integers of similar size with product ``size``, larger ones first."""
    if dims < 2:
        return [size] * dims
    small = takewhile(lambda number: number**dims <= size, count(1))
    least = max(number for number in small if size % number == 0)
    return sorted([*_balanced(size // least, dims - 1), least], reverse=True)
