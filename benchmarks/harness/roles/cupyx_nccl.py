"""cupyx.distributed's all_reduce, which calls NCCL through CuPy's binding."""

import functools
import socket
import sys
from typing import Any

from harness.role import Call, RankSetup
from harness.roles.cupy_nccl import CupyNccl

# CuPy imports mpi4py if it is installed, and fails if mpi4py finds no MPI. MPI is not needed here.
sys.modules.setdefault("mpi4py", None)  # type: ignore[arg-type]
from cupyx.distributed import init_process_group  # noqa: E402


class CupyxNccl(CupyNccl):
    """The public function on the current stream."""

    def _join(self) -> Any:
        return init_process_group(self.size, self.rank, port=self._of_rank_0(_free_port))

    def leave(self) -> None:
        self._joined.stop()
        self._store.close()

    def launcher(self, array: Any) -> Call:
        return functools.partial(self._joined.all_reduce, array, array)


def _free_port() -> int:
    """Return a free port, because the library does not accept an open socket."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def join(setup: RankSetup) -> CupyxNccl:
    """Connect to the other ranks."""
    return CupyxNccl(setup)
