"""Facts about the machine, for a comparison with the numbers of other machines."""

import os
import platform
import shutil
from pathlib import Path

import numpy as np

__all__ = ["available_bytes", "cores", "machine_facts"]


def machine_facts() -> dict[str, str]:
    """Return processor, cores, kernel, memory, shared memory, load, Python and NumPy as text."""
    load = os.getloadavg()[0]
    return {
        "CPU": cpu_model(),
        "cores": str(cores()),
        "kernel": platform.release(),
        "memory": _gigabytes(_memory("MemTotal")),
        "/dev/shm": _shared_memory(),
        "load when started": f"{load:.2f}" + (" (not a quiet machine)" if load > 0.5 else ""),
        "Python": platform.python_version(),
        "NumPy": np.__version__,
    }


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def available_bytes() -> int:
    """Return the number of bytes that can be allocated without swapping."""
    return _memory("MemAvailable")


def cpu_model() -> str:
    """Return the processor's name from Linux, or from Python if Linux has none."""
    names = _values(Path("/proc/cpuinfo"), "model name")
    return names[0] if names else platform.processor() or platform.machine()


def _memory(key: str) -> int:
    kilobytes = _values(Path("/proc/meminfo"), key)[0].split()[0]
    return int(kilobytes) * 1024


def _values(file: Path, key: str) -> list[str]:
    """Return the values of ``key: value`` lines, or an empty dict if the file does not exist."""
    lines = file.read_text().splitlines() if file.exists() else []
    pairs = (line.partition(":") for line in lines)
    return [value.strip() for name, _, value in pairs if name.strip() == key]


def _shared_memory() -> str:
    folder = Path("/dev/shm")
    return _gigabytes(shutil.disk_usage(folder).total) if folder.is_dir() else "none"


def _gigabytes(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
