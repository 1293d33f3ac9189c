"""Common code for roles of torch: the start, and the facts for the report."""

import importlib
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from harness.environments import ROOT
from harness.role import RankSetup, Role

__all__ = ["Rank", "facts", "initialise"]


def initialise(setup: RankSetup) -> None:
    """Connect to the other ranks through a file; if all ranks run on this machine, use the loopback
    interface.

    The option ``backend`` defaults to gloo.
    """
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    backend = setup.options.get("backend", "gloo")
    if backend == "flashlight":
        sys.path.append(str(ROOT))  # torch's environment does not have this package
        importlib.import_module("flashlight_py.torch")
    meeting = (Path(setup.folder) / "meet").as_uri()
    dist.init_process_group(backend, init_method=meeting, rank=setup.rank, world_size=setup.size)


def facts() -> dict[str, str]:
    """Return the version."""
    return {"torch": str(torch.__version__)}


class Rank(Role):
    """One thread per rank; no process group if there is one rank."""

    def __init__(self, setup: RankSetup) -> None:
        self.rank, self.size = setup.rank, setup.size
        torch.set_num_threads(1)
        if self.size > 1:
            initialise(setup)

    def facts(self) -> dict[str, str]:
        return facts()

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def leave(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()
