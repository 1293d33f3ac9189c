"""Queries of CUDA devices. No function raises if the driver, a device or CuPy is missing."""

from typing import Any

from flashlight_py import _native, device
from flashlight_py.errors import BackendUnavailableError


def is_available() -> bool:
    """Return whether a network can be moved to a CUDA device."""
    return get_device_count() > 0


def is_nccl_available() -> bool:
    """Return whether NCCL can be loaded and the package's binding of NCCL is built."""
    try:
        _native.load_extension("nccl")
    except BackendUnavailableError:
        return False
    return True


def get_device_count() -> int:
    """Return the number of CUDA devices; 0 without CuPy."""
    return _cupy()[1]


def get_current_device() -> int:
    """Return the index of CuPy's current device in this thread; -1 without a device."""
    cupy, count = _cupy()
    return int(cupy.cuda.runtime.getDevice()) if count else -1


def set_device(device_index: int) -> bool:
    """Make a device current for CuPy in this thread; return False if it does not exist."""
    cupy, count = _cupy()
    if 0 <= device_index < count:
        cupy.cuda.runtime.setDevice(device_index)
    return 0 <= device_index < count


def is_device_available(device_index: int) -> bool:
    """Return whether the device exists."""
    return 0 <= device_index < get_device_count()


def get_device_properties(device_index: int) -> str:
    """Return name and compute capability of a device; "" if it does not exist."""
    cupy, count = _cupy()
    if not 0 <= device_index < count:
        return ""
    info = cupy.cuda.runtime.getDeviceProperties(device_index)
    return f"{info['name'].decode()}, compute capability {info['major']}.{info['minor']}"


def get_device_memory(device_index: int) -> tuple[int, int]:
    """Return total and free memory of a device in bytes; zeros if it does not exist."""
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
