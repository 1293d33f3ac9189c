"""CuPy's own binding of NCCL, on the stream that is current."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy
from cupy.cuda import nccl

from flashlight_py.distributed.rendezvous.stores import FileStore
from harness.gpu import nccl_files, share_gpus
from harness.role import Call, RankSetup
from harness.roles.cuda import CudaRole

SECONDS = 60.0


class CupyNccl(CudaRole):
    """The plain library on the current stream, without groups, checks and events."""

    def __init__(self, setup: RankSetup) -> None:
        gpus = cupy.cuda.runtime.getDeviceCount()
        share_gpus(setup.rank, setup.size, gpus)
        self.rank, self.size = setup.rank, setup.size
        cupy.cuda.Device(self.rank % gpus).use()
        self._store = FileStore(str(Path(setup.folder) / "meet"), self.rank, self.size, SECONDS)
        self._joined = self._join()

    def _join(self) -> Any:
        unique_id = self._of_rank_0(nccl.get_unique_id)  # a tuple up to CuPy 13, then bytes
        return nccl.NcclCommunicator(self.size, unique_id, self.rank)

    def _of_rank_0(self, make: Callable[[], Any]) -> Any:
        data = pickle.dumps(make()) if self.rank == 0 else b""
        return pickle.loads(self._store.exchange(data)[0])

    def facts(self) -> dict[str, str]:
        return {"CuPy": cupy.__version__, "NCCL": nccl_files()}

    def barrier(self) -> None:
        self.synchronize()
        self._store.exchange(b"")

    def leave(self) -> None:
        self._joined.destroy()
        self._store.close()

    def zeros(self, count: int, dtype: str) -> Any:
        return cupy.zeros(count, dtype)

    def launcher(self, array: Any) -> Call:
        kinds = {"float32": nccl.NCCL_FLOAT32, "float64": nccl.NCCL_FLOAT64}
        all_reduce, pointer = self._joined.allReduce, array.data.ptr
        count, kind, stream = array.size, kinds[array.dtype.name], cupy.cuda.get_current_stream()

        def launch() -> None:
            all_reduce(pointer, pointer, count, kind, nccl.NCCL_SUM, stream.ptr)

        return launch

    def synchronize(self) -> None:
        cupy.cuda.Device().synchronize()


def join(setup: RankSetup) -> CupyNccl:
    """Connect to the other ranks."""
    return CupyNccl(setup)
