"""Events that overlap, shared out to lanes in which they do not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, TypeVar

__all__ = ["in_lanes"]


class _Lasting(Protocol):
    @property
    def start(self) -> int: ...

    @property
    def end(self) -> int: ...


E = TypeVar("E", bound=_Lasting)


def in_lanes(events: Iterable[E], nested: bool) -> list[list[E]]:
    """Return as few lanes as the order of the starts allows, each in that order.

    Where ``nested``, an event may lie within another of its lane; else each begins after the last.
    """
    lanes: list[list[E]] = []
    open_ends: list[list[int]] = []  # of each lane, the outermost first
    for event in sorted(events, key=lambda event: (event.start, -event.end)):
        for lane, ends in zip(lanes, open_ends, strict=True):
            while ends and ends[-1] <= event.start:
                ends.pop()
            if not ends or (nested and event.end <= ends[-1]):
                lane.append(event)
                ends.append(event.end)
                break
        else:
            lanes.append([event])
            open_ends.append([event.end])
    return lanes
