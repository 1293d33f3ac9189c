"""Worlds that are made and left many times in the same processes, which must not grow."""

from pathlib import Path
from typing import Any

from tests.chaos.rounds import BACKENDS, start_together
from tests.distributed.rendezvous_helpers import Ranks

__all__ = ["BACKENDS", "growth"]

# Cycles in which caches fill and the allocator finds its size.
WARM = 15
SIZE = 3


def growth(ranks: Ranks, folder: Path, backend: str, cycles: int) -> dict[str, int]:
    """Return by how much the rank that grew most did: kilobytes, descriptors and threads.

    Raises:
        AssertionError: a rank failed.
    """
    plan: dict[str, Any] = {"part": "cycle", "cycles": WARM + cycles, "warm": WARM}
    started = start_together(ranks, folder, SIZE, backend, **plan)
    most: dict[str, int] = {}
    for rank in started:
        assert rank.await_event("ended", seconds=cycles)["code"] == 0, (folder / "log").read_text()
        warm, end = rank.events["computed"]["held"]
        for name in warm:
            most[name] = max(most.get(name, 0), end[name] - warm[name])
    return most
