"""The layout of a sharded module's parameters, and the elements that each rank steps: pure.

All parameters of a dtype lie in one flat array, and their gradients in another of the same order.
The flat array is cut into chunks, no larger than a bucket; rank r of a host sums, and steps, the
r-th part of each. A unit is what is sent at a time: a large parameter, in several chunks, or small
ones that share a chunk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

LINE = 64  # bytes of a cache line, at which the parts of ranks begin


@dataclass(frozen=True)
class Chunk:
    """Elements ``start`` to ``stop`` of the flat array, in parts of ``part``, one for each rank.

    The last chunk of a unit may have room that no parameter uses.
    """

    start: int
    stop: int
    part: int

    def part_of(self, rank: int) -> slice:
        """Return the elements of ``rank``, in the flat array."""
        return slice(self.start + rank * self.part, self.start + (rank + 1) * self.part)


@dataclass(eq=False)
class UnitPlan:
    """Parameters, by number, that are sent together, and where each begins in the flat array."""

    numbers: list[int]
    starts: list[int]
    sizes: list[int]
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def is_large(self) -> bool:
        """Whether it is one parameter alone, whose gradient need not exist as a whole."""
        return len(self.numbers) == 1


@dataclass(frozen=True)
class Layout:
    """The units of one flat array in the order in which they are sent, and its length."""

    units: list[UnitPlan]
    length: int


def plan(
    shapes: Sequence[Sequence[int]],
    itemsize: int,
    ranks: int,
    bucket_bytes: int,
    hosts: Sequence[int] = (1,),
) -> Layout:
    """Return where parameters of ``shapes`` lie, which are in the order of their gradients.

    A host has ``ranks`` ranks; ``hosts``: how many all hosts have, so that things lie at the same
    places on each.

    Example:
        >>> layout = plan([(100, 40), (40,), (3,)], 4, ranks=2, bucket_bytes=8192)
        >>> [(unit.numbers, unit.starts) for unit in layout.units]
        [([0], [0]), ([1, 2], [4000, 4040])]
        >>> [(chunk.start, chunk.stop, chunk.part) for chunk in layout.units[0].chunks]
        [(0, 1920, 960), (1920, 3840, 960), (3840, 4000, 80)]
    """
    line = max(1, LINE // itemsize)
    grain = line * math.lcm(ranks, *hosts)
    room = max(bucket_bytes // itemsize // grain, 1) * grain
    units: list[UnitPlan] = []
    small: list[int] = []
    sizes = [math.prod(shape) for shape in shapes]
    for number, size in enumerate(sizes):
        if size * 4 > room:
            units.append(UnitPlan([number], [], [size]))
            continue
        if sum(sizes[other] for other in small) + size > room:
            units.append(UnitPlan(small, [], [sizes[other] for other in small]))
            small = []
        small = [*small, number]
    if small:
        units.append(UnitPlan(small, [], [sizes[other] for other in small]))
    length = 0
    for unit in units:
        length = _place(unit, length, shapes, grain, room, ranks)
    return Layout(units, length)


def _place(
    unit: UnitPlan,
    start: int,
    shapes: Sequence[Sequence[int]],
    grain: int,
    room: int,
    ranks: int,
) -> int:
    """Give ``unit`` its place from ``start`` on; return where the next one begins."""
    at = start
    for size in unit.sizes:
        unit.starts.append(at)
        at += size
    end = start + -(-(at - start) // grain) * grain
    step = _step(shapes[unit.numbers[0]], grain, room) if unit.is_large else room
    for begin in range(start, max(end, start + 1), step):
        if begin < end:
            stop = min(begin + step, end)
            unit.chunks.append(Chunk(begin, stop, (stop - begin) // ranks))
    return end


def _step(shape: Sequence[int], grain: int, room: int) -> int:
    """Return how many elements of a large parameter a chunk has: whole rows where they fit."""
    row = math.prod(shape[1:])
    rows = math.lcm(row, grain) if row else grain
    return room // rows * rows or room


def pieces_of(
    unit: UnitPlan, position: int, rank: int, within: slice | None = None
) -> Iterator[slice]:
    """Yield the elements of the unit's parameter ``position`` that ``rank`` steps.

    They count from the parameter's first element; ``within``: of the flat array only these.
    """
    start, size = unit.starts[position], unit.sizes[position]
    for chunk in unit.chunks:
        part = chunk.part_of(rank)
        low, high = max(part.start, start), min(part.stop, start + size)
        if within is not None:
            low, high = max(low, within.start), min(high, within.stop)
        if low < high:
            yield slice(low - start, high - start)
