"""GPUs, CuPy, and NCCL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flashlight_py.distributed.backends.nccl.library import load, version_text
from flashlight_py.distributed.devices import cuda
from flashlight_py.doctor.finding import Finding, State
from flashlight_py.errors import BackendUnavailableError

__all__ = ["look", "usable_gpus"]

_DRIVER = Path("/proc/driver/nvidia/version")


def look() -> Iterator[Finding]:
    """Tell of the driver, of CuPy and its devices, and of NCCL."""
    driver = _driver_line()
    yield Finding("driver", State.OK if driver else State.MISSING, driver or "no NVIDIA driver")
    try:
        cupy, count = cuda()
    except BackendUnavailableError as error:
        # A GPU that nothing can use is worth a warning; without one there is nothing to do.
        yield Finding("CuPy", State.WARNING if driver else State.MISSING, str(error))
    else:
        yield from _devices(cupy, count)
    yield _nccl(bool(driver))


def usable_gpus() -> int:
    """Return how many GPUs CuPy can use here; 0 also where CuPy or NCCL is missing."""
    try:
        load()
        return cuda()[1]
    except BackendUnavailableError:
        return 0


def _driver_line() -> str:
    return _DRIVER.read_text().splitlines()[0].strip() if _DRIVER.exists() else ""


def _devices(cupy: Any, count: int) -> Iterator[Finding]:
    runtime = cupy.cuda.runtime
    versions = [_cuda_version(f()) for f in (runtime.runtimeGetVersion, runtime.driverGetVersion)]
    detail = f"{cupy.__version__}, CUDA {versions[0]}; the driver takes up to {versions[1]}"
    yield Finding("CuPy", State.OK, detail)
    for index in range(count):
        properties = runtime.getDeviceProperties(index)
        memory = properties["totalGlobalMem"] / 2**30
        yield Finding(f"cuda:{index}", State.OK, f"{properties['name'].decode()}, {memory:.0f} GiB")


def _cuda_version(code: int) -> str:
    return f"{code // 1000}.{code % 1000 // 10}"


def _nccl(has_driver: bool) -> Finding:
    try:
        library = load()
    except BackendUnavailableError as error:
        return Finding("NCCL", State.WARNING if has_driver else State.MISSING, str(error))
    return Finding("NCCL", State.OK, f"{version_text(library.version)}; {library.path}")
