"""How much of the communication a program waited for, and how much ran beside its computing."""

from __future__ import annotations

from collections.abc import Iterable

from flashlight_py.trace.intervals import intersection, length, union

__all__ = ["summarise"]


def summarise(
    moving: Iterable[tuple[int, int]], blocked: Iterable[tuple[int, int]]
) -> dict[str, float]:
    """Return microseconds of communication, of blocking, and of communication beside the program.

    ``moving`` are the times of all operations, ``blocked`` those at which the program could not go
    on, each as (from, to) in nanoseconds.

    Example:
        >>> summarise([(0, 4000)], [(3000, 5000)])
        {'communication_us': 4.0, 'blocked_us': 2.0, 'overlapped_us': 3.0}
    """
    moves, blocks = union(moving), union(blocked)
    exposed = length(intersection(moves, blocks))
    return {
        "communication_us": length(moves) / 1e3,
        "blocked_us": length(blocks) / 1e3,
        "overlapped_us": (length(moves) - exposed) / 1e3,
    }
