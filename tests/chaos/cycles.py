"""Worlds that are made and left many times in the same processes, which must not grow."""

from pathlib import Path
from typing import Any

from tests.chaos.rounds import BACKENDS
from tests.distributed import conformance
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
    params = {"TIMEOUT": 20.0} | ({} if backend == "hierarchical" else {"BACKEND": backend})
    plan: dict[str, Any] = {"part": "cycle", "init": "file", "cycles": WARM + cycles, "warm": WARM}
    place = {"path": str(folder / "meeting"), "log": str(folder / "log"), "params": params}
    several = backend == "hierarchical"
    envs = [conformance.two_hosts(rank) if several else {} for rank in range(SIZE)]
    started = [ranks.start(rank, SIZE, env=envs[rank], **plan, **place) for rank in range(SIZE)]
    most: dict[str, int] = {}
    for rank in started:
        assert rank.await_event("ended", seconds=cycles)["code"] == 0, (folder / "log").read_text()
        warm, end = rank.events["computed"]["held"]
        for name in warm:
            most[name] = max(most.get(name, 0), end[name] - warm[name])
    return most
