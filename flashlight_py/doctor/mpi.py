"""The MPI library that mpi4py loads: which one, its ABI, GPUs, and the mpirun that belongs to it.

It is loaded in another process, which runs this module: loading MPI initialises it, and one that
cannot be initialised ends the process.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flashlight_py.doctor.finding import Finding, State

__all__ = ["absence", "look", "mpirun_command"]

SECONDS = 60.0
_REMEDY = "pip install 'flashlight-py[mpi]' (MPICH), or an MPI of your system and mpi4py"


def look() -> Iterator[Finding]:
    """Tell of mpi4py, the library, its knowledge of GPUs, and ``mpirun``."""
    if not _is_installed():
        yield Finding("mpi4py", State.MISSING, "not installed: no start by mpirun", _REMEDY)
        return
    told, problem = _ask()
    if problem:
        remedy = "the library and mpirun must be of one MPI; " + _REMEDY
        yield Finding("library", State.MISSING, f"mpi4py cannot load it: {problem}", remedy)
        return
    yield Finding("library", State.OK, f"{told['library']}; mpi4py {told['mpi4py']}")
    yield Finding("ABI", State.OK, f"{told['abi']}; MPI {told['standard']}; {told['path']}")
    threads = State.OK if told["threads"] else State.WARNING
    yield Finding("threads", threads, _threads(told["threads"]))
    yield Finding("GPU memory", State.OK, _awareness(told["cuda"]))
    yield _mpirun(told["vendor"])


def absence() -> str:
    """Return why nothing can be started by ``mpirun`` here; "" if it can, as far as is known."""
    if not _is_installed():
        return "mpi4py is not installed"
    if problem := _ask()[1]:
        return f"mpi4py cannot load the library: {problem}"
    return "" if mpirun_command(1) else "mpirun is not on PATH"


def mpirun_command(size: int) -> list[str] | None:
    """Return what starts ``size`` processes of the command that follows; None: no mpirun."""
    beside = Path(sys.executable).with_name("mpirun")
    program = str(beside) if beside.exists() else shutil.which("mpirun")
    if program is None:
        return None
    if "Open MPI" in _version_of(program):
        return [program, "--allow-run-as-root", "--oversubscribe", "-n", str(size)]
    return [program, "-n", str(size)]


def _is_installed() -> bool:
    return importlib.util.find_spec("mpi4py") is not None


@functools.cache
def _ask() -> tuple[dict[str, Any], str]:
    """Return what the other process tells, and what went wrong, if it did."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", "flashlight_py.doctor.mpi"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
            env=_outside_of_jobs(),
        )
    except subprocess.TimeoutExpired:
        return {}, f"nothing happened for {SECONDS:g} s"
    if done.returncode != 0 or not done.stdout.strip():
        last = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
        return {}, f"{last} (exit code {done.returncode})"
    return json.loads(done.stdout.splitlines()[-1]), ""


def _outside_of_jobs() -> dict[str, str]:
    """Return the environment without what mpirun tells its processes: the other is none of them."""
    prefixes = ("PMI", "PMIX_", "OMPI_COMM_", "HYDRA_", "MPI_LOCAL")
    return {k: v for k, v in os.environ.items() if not k.startswith(prefixes)}


def _threads(any_thread: bool) -> str:
    if any_thread:
        return "any thread may call it"
    return "one thread only: asynchronous verbs advance in waits"


def _awareness(cuda: bool | None) -> str:
    if cuda is None:
        return "it does not say whether it takes CuPy arrays; they are staged through the host"
    if cuda:
        return "takes pointers to it: params={'BACKEND': 'mpi', 'MPI_CUDA_AWARE': 1}"
    return "does not take pointers to it; CuPy arrays are staged through the host"


def _mpirun(vendor: str) -> Finding:
    command = mpirun_command(1)
    if command is None:
        return Finding("mpirun", State.MISSING, "not on PATH", _REMEDY)
    version = _version_of(command[0])
    if ("Open MPI" in version) != (vendor == "Open MPI"):
        return Finding(
            "mpirun",
            State.WARNING,
            f"{command[0]} is of another MPI than the library ({vendor}): each process would be "
            "alone in a world of one",
            "put the mpirun of the library first on PATH",
        )
    return Finding("mpirun", State.OK, command[0])


def _version_of(program: str) -> str:
    try:
        command = [program, "--version"]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stdout


def _tell() -> dict[str, Any]:
    """In the other process: load MPI and return what there is to tell."""
    import mpi4py
    from mpi4py import MPI

    vendor = MPI.get_vendor()[0]
    # mpi4py has a module for each ABI, and chooses the one that fits the library that it finds.
    variant = Path(MPI.__file__).name.split(".")[1]
    abi = {"mpich": "MPICH's", "openmpi": "Open MPI's", "mpiabi": "the MPI standard's"}.get(variant)
    path = _library_path()
    return {
        "mpi4py": mpi4py.__version__,
        "library": " ".join(MPI.Get_library_version().splitlines()[0].split(",")[0].split()),
        "vendor": vendor,
        "abi": f"{abi} ABI" if abi else f"{vendor}'s, mpi4py was compiled for it",
        "standard": ".".join(map(str, MPI.Get_version())),
        "threads": MPI.Query_thread() == MPI.THREAD_MULTIPLE,
        "path": path,
        "cuda": _takes_gpu_pointers(path),
    }


def _library_path() -> str:
    """Return the file of libmpi that this process has mapped."""
    lines = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
    files = (line.split(maxsplit=5)[-1] for line in lines if "/" in line)
    return next((file for file in files if Path(file).name.startswith("libmpi")), "")


def _takes_gpu_pointers(path: str) -> bool | None:
    """Return what the library says of itself; None: it says nothing."""
    query = getattr(ctypes.CDLL(path or None), "MPIX_Query_cuda_support", None)
    return None if query is None else bool(query())


if __name__ == "__main__":
    print(json.dumps(_tell()))
