"""Pure decisions of the launcher: which rank is where, and whether a job is started again."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

__all__ = ["Place", "counts_of_remaining", "may_restart", "places"]


class Place(NamedTuple):
    """A rank, its number on its host, how many are there, and which host it is."""

    rank: int
    local_rank: int
    local_size: int
    host: int


def places(counts: Sequence[int]) -> list[Place]:
    """Return the places of all ranks, where host h has ``counts[h]`` of them; maybe none."""
    found: list[Place] = []
    for host, count in enumerate(counts):
        found += [Place(len(found) + local, local, count, host) for local in range(count)]
    return [each._replace(rank=rank) for rank, each in enumerate(found)]


def counts_of_remaining(counts: Sequence[int], lost: Collection[int]) -> list[int]:
    """Return how many ranks each host has without those that are ``lost``."""
    remaining = [place.host for place in places(counts) if place.rank not in lost]
    return [remaining.count(host) for host in range(len(counts))]


def may_restart(restarts: int, most: int | None, remaining: int, least: int | None) -> bool:
    """Return whether a job that was started again ``restarts`` times may be so once more.

    At most ``most`` times; None: never, but as often as ranks can be lost where ``least`` says
    how many are enough. ``remaining`` is how many it would have.
    """
    if least is not None and remaining < least:
        return False
    return restarts < (most if most is not None else 0 if least is None else restarts + 1)
