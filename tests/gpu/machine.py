"""Facts about this machine as Markdown; the exit status is NO_GPU if CUDA finds no device.

    python -c 'from tests.gpu.machine import main; main()'

The ranks of ``flashlight_py.doctor`` on the CPU show that the wheel works with this Python and this
NumPy.
"""

import contextlib
import os
import platform
import re
import sys
from importlib import metadata

from flashlight_py import doctor
from flashlight_py.device import cuda
from flashlight_py.errors import BackendUnavailableError

NO_GPU = 77
LIBRARIES = ("nvrtc", "cublas", "curand")  # for CuPy's kernels, products, numbers
PACKAGES = r"cffi|cupy(-cuda1\dx)?|nvidia-nccl-cu1\d|torch|pytest|mpi4py"
SECONDS = 6.0  # most of one run of ranks


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


def why_no_gpu() -> str:
    """Return the reason why CUDA cannot be used, or "" if it can."""
    try:
        return "" if cuda()[1] else "there is none"
    except BackendUnavailableError as error:
        return str(error)


def processor() -> str:
    with contextlib.suppress(OSError, StopIteration), open("/proc/cpuinfo") as file:
        return next(line for line in file if "model name" in line).partition(":")[2].strip()
    return platform.machine()


def main() -> None:
    """Print each fact at once, because a later one may end this process."""
    print("```text")
    failed = doctor.main(["--run", "--timeout", str(SECONDS)])
    print(f"```\n| what | found |\n|---|---|\n| processor | {processor()} |")
    print(f"| cores | {len(os.sched_getaffinity(0))} |\n| interpreter | {sys.executable} |")
    for package in sorted(metadata.distributions(), key=lambda one: str(one.name).lower()):
        if re.fullmatch(PACKAGES, package.name):
            print(f"| {package.name} | {package.version} |")
    for name in LIBRARIES:
        print(f"| {name} | {library_of_cuda(name)} |", flush=True)
    if reason := why_no_gpu():
        print(f"\nno GPU: {reason}")
        raise SystemExit(NO_GPU)
    import cupy

    total = float(cupy.arange(1_000_000, dtype=cupy.float64).sum())
    print(f"| a sum on the GPU | {'right' if total == 499999500000.0 else f'WRONG: {total}'} |")
    sys.exit(failed)
