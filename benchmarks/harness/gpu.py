"""What every benchmark on a GPU needs: to know that there is one, and to share it between ranks."""

import os
from collections.abc import Sequence
from pathlib import Path

from harness.statistics import Measurement

__all__ = ["NO_GPU", "nccl_files", "require_all", "require_gpu", "share_gpus", "shares_gpu"]

NO_GPU = 77  # the exit status of a benchmark that has found none


def require_gpu() -> None:
    """Return if CuPy sees a CUDA device.

    Raises:
        SystemExit: it does not, with the status NO_GPU; the reason is printed.
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
    """Return if something was measured, and nothing of ours is missing in it.

    Raises:
        SystemExit: a contender whose title begins with ``ours`` failed, or there is no measurement.
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
    """Let several ranks use one GPU, if there are fewer ``gpus``, as if on hosts of their own.

    Must come before NCCL is loaded. The numbers then are those of the loopback and of a GPU that
    gives each process a slice of time, for everybody alike.
    """
    if gpus < size:
        sockets = {"NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
        os.environ.update(NCCL_HOSTID=f"rank-{rank}", NCCL_MNNVL_ENABLE="0", **sockets)


def shares_gpu() -> bool:
    """Return whether :func:`share_gpus` has found fewer GPUs than ranks."""
    return "NCCL_HOSTID" in os.environ


def nccl_files() -> str:
    """Return which files of NCCL this process has opened: all libraries are to use the same."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return ", ".join(sorted({line.split()[-1] for line in lines if "libnccl.so" in line}))
