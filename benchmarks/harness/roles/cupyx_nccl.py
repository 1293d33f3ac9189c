"""cupyx.distributed's all_reduce, which calls NCCL through CuPy's binding."""

from __future__ import annotations

import functools
import socket
from pathlib import Path
from typing import Any

import cupy
from cupyx.distributed import init_process_group

from flashlight_py.distributed.rendezvous.file_store import FileStore
from harness.gpu import nccl_files, share_gpus
from harness.role import Call, Place
from harness.roles.cuda import CudaRole

SECONDS = 60.0


class CupyxNccl(CudaRole):
    """As its users call it, on the stream that is current."""

    def __init__(self, place: Place) -> None:
        gpus = cupy.cuda.runtime.getDeviceCount()
        share_gpus(place.rank, place.size, gpus)
        self.rank, self.size = place.rank, place.size
        cupy.cuda.Device(self.rank % gpus).use()
        self._store = FileStore(str(Path(place.folder) / "meet"), self.rank, self.size, SECONDS)
        mine = str(_free_port()).encode() if self.rank == 0 else b""
        port = int(self._store.exchange(mine)[0])
        self._group = init_process_group(self.size, self.rank, port=port)

    def facts(self) -> dict[str, str]:
        return {"CuPy": cupy.__version__, "NCCL": nccl_files()}

    def barrier(self) -> None:
        self.synchronize()
        self._store.exchange(b"")

    def leave(self) -> None:
        self._group.stop()
        self._store.close()

    def zeros(self, count: int, dtype: str) -> Any:
        return cupy.zeros(count, dtype)

    def launcher(self, array: Any) -> Call:
        return functools.partial(self._group.all_reduce, array, array)

    def synchronize(self) -> None:
        cupy.cuda.Device().synchronize()


def _free_port() -> int:
    """Return a port that is free now; the library takes no socket."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def join(place: Place) -> CupyxNccl:
    """Meet the other ranks."""
    return CupyxNccl(place)
