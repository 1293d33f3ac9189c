"""The CUDA devices here. Nothing raises without a driver, a device or CuPy."""

from __future__ import annotations

from typing import Any

from flashlight_py import _native, device
from flashlight_py.errors import BackendUnavailableError


def is_available() -> bool:
    """Return whether a network can be moved to a CUDA device."""
    return get_device_count() > 0


def is_nccl_available() -> bool:
    """Return whether NCCL's library can be loaded, and this package's binding of it is built."""
    try:
        _native.load("nccl")
    except BackendUnavailableError:
        return False
    return True


def get_device_count() -> int:
    """Return how many CUDA devices CuPy finds; 0 without CuPy, too."""
    return _cupy()[1]


def get_current_device() -> int:
    """Return the index of the device that CuPy uses in this thread; -1: there is none."""
    cupy, count = _cupy()
    return int(cupy.cuda.runtime.getDevice()) if count else -1


def set_device(device_index: int) -> bool:
    """Let CuPy use this device in this thread; return whether there is one of this index."""
    cupy, count = _cupy()
    if 0 <= device_index < count:
        cupy.cuda.runtime.setDevice(device_index)
    return 0 <= device_index < count


def is_device_available(device_index: int) -> bool:
    """Return whether there is a device of this index."""
    return 0 <= device_index < get_device_count()


def get_device_properties(device_index: int) -> str:
    """Return the device's name and compute capability; empty: there is no such device."""
    cupy, count = _cupy()
    if not 0 <= device_index < count:
        return ""
    found = cupy.cuda.runtime.getDeviceProperties(device_index)
    return f"{found['name'].decode()}, compute capability {found['major']}.{found['minor']}"


def get_device_memory(device_index: int) -> tuple[int, int]:
    """Return the device's memory in bytes: total, free. Zeros: there is no such device."""
    cupy, count = _cupy()
    if not 0 <= device_index < count:
        return 0, 0
    with cupy.cuda.Device(device_index):
        free, total = cupy.cuda.runtime.memGetInfo()
    return int(total), int(free)


def _cupy() -> tuple[Any, int]:
    try:
        return device.cuda()
    except BackendUnavailableError:
        return None, 0
