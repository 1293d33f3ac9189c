"""Facts about this machine as Markdown; the exit status is NO_GPU if CUDA finds no device.

    python -c 'from tests.gpu.machine import main; main()'

First two ranks add numbers on the CPU in shared memory and over Gloo. This needs no GPU, and shows
that the
wheel works with this Python and this NumPy.
"""

import contextlib
import os
import platform
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import numpy as np

import flashlight_py as fl
from flashlight_py.distributed.backends.nccl.library import load_nccl, version_text
from flashlight_py.errors import BackendUnavailableError
from tests.distributed.harness import run_ranks

NO_GPU = 77
LIBRARIES = ("nvrtc", "cublas", "curand")  # for CuPy's kernels, products, numbers
PACKAGES = r"numpy|cffi|cupy(-cuda1\dx)?|nvidia-nccl-cu1\d|torch|pytest|mpi4py"


def packages() -> Iterator[tuple[str, str]]:
    for package in sorted(metadata.distributions(), key=lambda one: str(one.name).lower()):
        if re.fullmatch(PACKAGES, package.name):
            yield package.name, package.version


def nccl() -> str:
    """Return the NCCL library that this package uses, or the reason why there is none; needs no
    GPU."""
    try:
        library = load_nccl()
    except BackendUnavailableError as error:
        return f"none: {error}"
    return f"{version_text(library.version)}, {library.path}"


def add_up(rank: int, size: int) -> tuple[str, float]:
    """Return the backend of the ranks, and the sum of their numbers."""
    total = fl.all_reduce(np.full(1000, rank + 1.0))
    joined = str(fl.distributed.describe()).splitlines()[1:]
    return "; ".join(line.strip() for line in joined), float(total[-1])


def on_the_cpu(backend: str) -> str:
    """Return the backend of two ranks on the CPU that add their numbers.

    Raises:
        RuntimeError: If the sum is wrong.
    """
    results = run_ranks(add_up, 2, params={"BACKEND": backend})
    if {total for _, total in results} != {3.0}:
        raise RuntimeError(f"the sum of 1 and 2 through {backend} is {results}")
    return str(results[0][0])


def works_on_the_cpu(backend: str) -> bool:
    """Print the result of two ranks on the CPU."""
    try:
        show(f"BACKEND={backend}", on_the_cpu(backend))
    except (OSError, RuntimeError) as error:  # or of the harness; the GPU is still examined
        show(f"BACKEND={backend}", f"FAILED: {error}")
        return False
    return True


def library_of_cuda(name: str) -> str:
    """Return the path of a CUDA library that CuPy finds; needs no GPU."""
    try:
        from cuda import pathfinder
    except ImportError as error:
        return f"not looked for: {error}"
    try:
        return str(pathfinder.load_nvidia_dynamic_lib(name).abs_path)
    except pathfinder.DynamicLibNotFoundError as error:
        return f"NOT FOUND: {str(error).splitlines()[0]}"


def gpu() -> Iterator[tuple[str, str]]:
    """Yield CUDA's facts about the driver, the runtime and the first device.

    Raises:
        SystemExit: If CuPy is missing, or CUDA finds no device.
    """
    if reason := why_no_gpu():
        print(f"\nno GPU: {reason}")
        raise SystemExit(NO_GPU)
    import cupy

    runtime: Any = cupy.cuda.runtime
    count = runtime.getDeviceCount()
    yield "CUDA driver, runtime", f"{runtime.driverGetVersion()}, {runtime.runtimeGetVersion()}"
    properties = runtime.getDeviceProperties(0)
    name, memory = properties["name"].decode(), properties["totalGlobalMem"] / 2**30
    yield "GPU", f"{count} x {name}, {memory:.0f} GiB, {properties['multiProcessorCount']} SMs"
    total = float(cupy.arange(1_000_000, dtype=cupy.float64).sum())
    yield "a sum on the GPU", "right" if total == 499999500000.0 else f"WRONG: {total}"


def why_no_gpu() -> str:
    """Return the reason why CUDA cannot be used, or "" if it can."""
    try:
        import cupy
    except ImportError as error:
        return str(error)
    runtime: Any = cupy.cuda.runtime
    try:
        return "" if runtime.getDeviceCount() else "there is none"
    except runtime.CUDARuntimeError as error:
        return str(error)


def processor() -> str:
    with contextlib.suppress(OSError, StopIteration), open("/proc/cpuinfo") as file:
        return next(line for line in file if "model name" in line).partition(":")[2].strip()
    return platform.machine()


def show(name: str, value: str) -> None:
    """Print a row at once, because a later row may end this process."""
    print(f"| {name} | {value} |", flush=True)


def main() -> None:
    """Print the table, row by row."""
    print("| what | found |\n|---|---|")
    show("system", f"{platform.platform()}, {len(os.sched_getaffinity(0))} cores, {processor()}")
    show("Python", f"{platform.python_version()}, {sys.executable}")
    for name, version in packages():
        show(name, version)
    show("flashlight_py", f"{fl.__version__}, {fl.__file__}")
    show("NCCL", nccl())
    for name in LIBRARIES:
        show(name, library_of_cuda(name))
    wrong = [backend for backend in ("shm", "gloo") if not works_on_the_cpu(backend)]
    for name, value in gpu():
        show(name, value)
    sys.exit(f"{', '.join(wrong)} failed on the CPU, as shown above" if wrong else 0)
