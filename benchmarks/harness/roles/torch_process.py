"""What every role that uses torch needs: the start, and what to report of it."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist

from harness.role import Place

__all__ = ["facts", "initialise"]


def initialise(place: Place) -> None:
    """Meet the other ranks through a file; all are on this machine, so by its loopback."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    meeting = (Path(place.folder) / "meet").as_uri()
    dist.init_process_group("gloo", init_method=meeting, rank=place.rank, world_size=place.size)


def facts() -> dict[str, str]:
    """Return the version."""
    return {"torch": str(torch.__version__)}
