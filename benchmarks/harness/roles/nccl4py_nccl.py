"""NVIDIA's Python binding of NCCL, nccl4py, on CuPy arrays."""

import functools
import importlib
import sys
from importlib import metadata
from typing import Any

import cupy

from harness.role import Call, RankSetup
from harness.roles.cupy_nccl import CupyNccl

# The binding imports torch if it is installed, which takes seconds. Users of CuPy do not need
# torch.
sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
nccl: Any = importlib.import_module("nccl.core")


class Nccl4py(CupyNccl):
    """The public API of the binding, on the current stream."""

    def _join(self) -> Any:
        identity = self._of_rank_0(lambda: bytes(nccl.get_unique_id()))
        unique_id = nccl.UniqueId.from_bytes(identity)
        return nccl.Communicator.init(self.size, self.rank, unique_id)

    def facts(self) -> dict[str, str]:
        return {"nccl4py": metadata.version("nccl4py"), **super().facts()}

    def launcher(self, array: Any) -> Call:
        stream = cupy.cuda.get_current_stream().ptr
        return functools.partial(self._joined.allreduce, array, array, nccl.SUM, stream=stream)


def join(setup: RankSetup) -> Nccl4py:
    """Connect to the other ranks."""
    return Nccl4py(setup)
