"""This package's all_reduce of CuPy arrays."""

import functools
from typing import Any

import cupy

import flashlight_py as fl
from harness.gpu import nccl_files, share_gpus
from harness.role import Call, RankSetup
from harness.roles.cuda import CudaRole
from harness.roles.flashlight import RankRole


class FlashlightCuda(RankRole, CudaRole):
    """The public function, called asynchronously."""

    def __init__(self, setup: RankSetup) -> None:
        share_gpus(setup.rank, setup.size, cupy.cuda.runtime.getDeviceCount())
        super().__init__(setup)
        fl.distributed.use_local_device()

    def facts(self) -> dict[str, str]:
        return {**super().facts(), "CuPy": cupy.__version__, "NCCL": nccl_files()}

    def zeros(self, count: int, dtype: str) -> Any:
        return cupy.zeros(count, dtype)

    def launcher(self, array: Any) -> Call:
        return functools.partial(fl.all_reduce, array, async_op=True)

    def synchronize(self) -> None:
        cupy.cuda.Device().synchronize()


def join(setup: RankSetup) -> FlashlightCuda:
    """Connect to the other ranks."""
    return FlashlightCuda(setup)
