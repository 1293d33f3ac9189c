"""This rank's GPU, if there is one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from flashlight_py.distributed.start.hosts import host_identity
from flashlight_py.errors import BackendUnavailableError


@dataclass(frozen=True)
class DeviceRule:
    """A rank's place, from which its device follows.

    With ``max_per_node`` it is flashlight's rule, ``rank % MAX_DEVICE_PER_NODE``. Without, it is
    the rank among those of the host, modulo the number of visible devices: a launcher may have
    given each rank a device of its own, which then is number 0 for all of them.
    """

    rank: int = 0
    local_rank: int = 0
    max_per_node: int | None = None

    def index(self, count: int) -> int:
        """Return the device's index among ``count`` visible ones, at least one.

        Raises:
            BackendUnavailableError: the rule names a device that is not there.
        """
        if self.max_per_node is None:
            return self.local_rank % count
        index = self.rank % self.max_per_node
        if index >= count:
            raise BackendUnavailableError(
                f"rank {self.rank} is to use CUDA device {index} (rank % MAX_DEVICE_PER_NODE, "
                f"which is {self.max_per_node}), and {count} are visible; lower it, or leave it out"
            )
        return index


def cuda() -> tuple[Any, int]:
    """Return CuPy, and how many CUDA devices it sees: at least one.

    Raises:
        BackendUnavailableError: CuPy is missing, or finds no device.
    """
    try:
        import cupy
    except ImportError as error:
        raise BackendUnavailableError(
            f"CuPy, which holds arrays on a GPU, cannot be imported ({error}). Install it: "
            "pip install 'flashlight-py[cuda12]' (or [cuda13])"
        ) from error
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise BackendUnavailableError(
            f"CUDA finds no GPU here ({error}). NCCL joins GPUs only: use NumPy arrays, or run "
            "where nvidia-smi lists a device"
        ) from error
    return cupy, count


def gpu_identity(cupy: Any, index: int) -> str:
    """Return a text that two ranks share exactly if NCCL takes their GPUs for one and the same.

    NCCL compares host and PCI address, and believes NCCL_HOSTID. From 2.30 on
    NCCL_MULTI_RANK_GPU_ENABLE=1 allows several ranks on one GPU: then none is another's.
    """
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
        return ""
    host = os.environ.get("NCCL_HOSTID") or host_identity().decode()
    return f"{host} {cupy.cuda.Device(index).pci_bus_id}"
