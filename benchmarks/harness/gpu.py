"""Checks of every GPU benchmark: whether there is a GPU, and whether ranks share it."""

import os
from collections.abc import Sequence
from pathlib import Path

from harness.statistics import Measurement

__all__ = ["NO_GPU", "nccl_files", "require_all", "require_gpu", "share_gpus", "shares_gpu"]

NO_GPU = 77  # exit status of a benchmark without a GPU


def require_gpu() -> None:
    """Return if CuPy detects a CUDA device.

    Raises:
        SystemExit: If there is no device, with the status NO_GPU. The reason is printed.
    """
    try:
        import cupy
    except ImportError as error:
        reason = str(error)
    else:
        try:
            cupy.cuda.runtime.getDeviceCount()
        except cupy.cuda.runtime.CUDARuntimeError as error:
            reason = str(error)
        else:
            return
    print(f"no GPU: {reason}")
    raise SystemExit(NO_GPU)


def require_all(measurements: Sequence[Measurement], ours: str) -> None:
    """Return if there are measurements and each contains all contenders of this package.

    Raises:
        SystemExit: If a contender whose title begins with ``ours`` failed, or there is no
            measurement.
    """
    lost = [
        f"{title}: {reason}"
        for measurement in measurements
        for title, reason in measurement.left_out.items()
        if title.startswith(ours)
    ]
    if lost or not any(measurement.seconds for measurement in measurements):
        raise SystemExit(f"FAILED: {lost[0] if lost else 'nothing was measured'}")


def share_gpus(rank: int, size: int, gpus: int) -> None:
    """Let ranks share a GPU if there are fewer GPUs than ranks, as if each rank had its own host.

    Call it before NCCL is loaded. Then the numbers of all contenders include the loopback interface
    and the time
    slices of the GPU.
    """
    if gpus < size:
        sockets = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        os.environ.update(NCCL_HOSTID=f"rank-{rank}", NCCL_MNNVL_ENABLE="0", **sockets)


def shares_gpu() -> bool:
    """Return whether :func:`share_gpus` found fewer GPUs than ranks."""
    return "NCCL_HOSTID" in os.environ


def nccl_files() -> str:
    """Return the NCCL libraries that this process has opened. All contenders should use the same
    one."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return ", ".join(sorted({line.split()[-1] for line in lines if "libnccl.so" in line}))
