"""Ranks that may not use any more memory: an exception on the ranks that lack it, and no signal."""

import contextlib
import resource
from pathlib import Path

import pytest

import flashlight_py as fl
from flashlight_py.errors import DistributedError
from tests.distributed.harness import run_ranks

MOST_GROUPS = 400


def make_groups(rank: int, size: int, more: int) -> tuple[int, str]:
    """Make groups until ``more`` bytes of addresses are used; return how many, and the error."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    groups: list[fl.ProcessGroup | None] = []
    try:
        while len(groups) < MOST_GROUPS:
            groups.append(fl.split(0))
    except (MemoryError, OSError, DistributedError) as error:
        with contextlib.suppress(DistributedError):  # another rank may be in its next split
            fl.distributed_shutdown()
        return len(groups), str(error)
    return len(groups), ""


@pytest.mark.parametrize("more", [60, 120, 180], ids="{} MiB".format)
@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_groups_beyond_the_memory_are_an_exception(backend: str, more: int) -> None:
    params = {"BACKEND": backend, "TIMEOUT": "5"}
    results = run_ranks(make_groups, 2, more << 20, deadline=30.0, params=params)
    first = min(results)
    assert first[0] < MOST_GROUPS
    assert "memory" in first[1], results
