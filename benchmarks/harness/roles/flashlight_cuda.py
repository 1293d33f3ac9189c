"""This package's all_reduce of CuPy arrays."""

from __future__ import annotations

import functools
from typing import Any

import cupy

import flashlight_py as fl
from harness.gpu import nccl_files, share_gpus
from harness.role import Call, Place
from harness.roles import flashlight
from harness.roles.cuda import CudaRole


class FlashlightCuda(CudaRole):
    """As a user calls it, asynchronously."""

    def __init__(self, place: Place) -> None:
        share_gpus(place.rank, place.size, cupy.cuda.runtime.getDeviceCount())
        flashlight.initialise(place)
        self.rank, self.size = fl.get_world_rank(), fl.get_world_size()
        fl.distributed.use_local_device()

    def facts(self) -> dict[str, str]:
        return {**flashlight.facts(), "CuPy": cupy.__version__, "NCCL": nccl_files()}

    def barrier(self) -> None:
        fl.barrier()

    def leave(self) -> None:
        fl.distributed_shutdown()

    def zeros(self, count: int, dtype: str) -> Any:
        return cupy.zeros(count, dtype)

    def launcher(self, array: Any) -> Call:
        return functools.partial(fl.all_reduce, array, async_op=True)

    def synchronize(self) -> None:
        cupy.cuda.Device().synchronize()


def join(place: Place) -> FlashlightCuda:
    """Meet the other ranks."""
    return FlashlightCuda(place)
