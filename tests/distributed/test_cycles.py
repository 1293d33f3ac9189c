"""Repeated init and shutdown keep no memory, no descriptor and no thread."""

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.distributed.conformance import two_hosts
from tests.distributed.harness import run_ranks

CYCLES = int(os.environ.get("CYCLES", "12"))
# Cycles until caches are filled and the allocator has its final size.
WARM = 15
# Kilobytes by which the allocator may still grow.
SLACK = 1500


def holdings() -> dict[str, int]:
    """Return kilobytes of memory, descriptors and threads of this process."""
    gc.collect()
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    memory, threads = (int(fields[name].split()[0]) for name in ("RssAnon", "Threads"))
    return {"memory": memory, "threads": threads, "descriptors": len(os.listdir("/proc/self/fd"))}


def growth(rank: int, size: int, params: dict[str, Any]) -> dict[str, int]:
    """Return the growth of this process in ``CYCLES`` cycles."""
    held = {}
    for number in range(1, WARM + CYCLES + 1):
        fl.distributed_init(fl.DistributedInit.FILE_SYSTEM, rank, size, params)
        fl.all_reduce(np.ones(1000, np.float32))
        fl.distributed_shutdown()
        if number == WARM:
            held = holdings()
    return {name: end - held[name] for name, end in holdings().items()}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", "shm", "hierarchical"])
def test_init_and_shutdown_release_resources(tmp_path: Path, backend: str) -> None:
    params: dict[str, Any] = {"FILE_PATH": str(tmp_path / "meeting")}
    if backend != "hierarchical":
        params["BACKEND"] = backend
    env = two_hosts if backend == "hierarchical" else None
    for grown in run_ranks(growth, 3, params, init=None, env=env, deadline=60.0 + CYCLES):
        assert grown["descriptors"] <= 0
        assert grown["threads"] <= 0
        assert grown["memory"] < max(SLACK, CYCLES)
    assert list(tmp_path.iterdir()) == []
