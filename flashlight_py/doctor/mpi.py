"""The MPI library that mpi4py loads: which one, its ABI, GPUs, and the mpirun that belongs to it.

It is loaded in another process, which runs this module: loading MPI initialises it, and one that
cannot be initialised ends the process.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flashlight_py import libraries
from flashlight_py.doctor import Finding, Health

SECONDS = 60.0
_REMEDY = "pip install 'flashlight-py[mpi]' (MPICH), or an MPI of your system and mpi4py"
_ABIS = {"mpich": "MPICH's ABI", "openmpi": "Open MPI's ABI", "mpiabi": "the MPI standard's ABI"}
_THREADS = {
    True: (Health.OK, "any thread may call it"),
    False: (Health.WARNING, "one thread only: asynchronous verbs advance in waits"),
}
_CUDA = {
    None: "it does not say whether it takes CuPy arrays; they are staged through the host",
    True: "takes pointers to it: params={'BACKEND': 'mpi', 'MPI_CUDA_AWARE': 1}",
    False: "does not take pointers to it; CuPy arrays are staged through the host",
}


def look() -> Iterator[Finding]:
    """Report on mpi4py, the library, what it knows of GPUs, and ``mpirun``."""
    if importlib.util.find_spec("mpi4py") is None:
        yield Finding("mpi4py", Health.MISSING, "not installed: no start by mpirun", _REMEDY)
        return
    output, problem = _output(sys.executable, "-m", "flashlight_py.doctor.mpi")
    if problem:
        remedy = "the library and mpirun must be of one MPI; " + _REMEDY
        yield Finding("library", Health.MISSING, f"mpi4py cannot load it: {problem}", remedy)
        return
    facts = json.loads(output.splitlines()[-1])
    yield Finding("library", Health.OK, f"{facts['library']}; mpi4py {facts['mpi4py']}")
    yield Finding("ABI", Health.OK, f"{facts['abi']}; MPI {facts['standard']}; {facts['path']}")
    yield Finding("threads", *_THREADS[facts["threads"]])
    yield Finding("GPU memory", Health.OK, _CUDA[facts["cuda"]])
    yield mpirun(facts["vendor"])


def mpirun(vendor: str) -> Finding:
    """Report which ``mpirun`` there is, and whether it is of the same MPI as the library."""
    command = mpirun_command(1)
    if command is None:
        return Finding("mpirun", Health.MISSING, "not on PATH", _REMEDY)
    if ("--oversubscribe" in command) == (vendor == "Open MPI"):
        return Finding("mpirun", Health.OK, command[0])
    return Finding(
        "mpirun",
        Health.WARNING,
        f"{command[0]} is of another MPI than the library ({vendor}): each process would be "
        "alone in a world of one",
        "put the mpirun of the library first on PATH",
    )


def mpirun_command(size: int) -> list[str] | None:
    """Return what starts ``size`` processes of the command that follows; None: no mpirun."""
    beside = Path(sys.executable).with_name("mpirun")
    program = str(beside) if beside.exists() else shutil.which("mpirun")
    if program is None:
        return None
    is_open_mpi = "Open MPI" in _output(program, "--version")[0]
    options = ["--allow-run-as-root", "--oversubscribe"] if is_open_mpi else []
    return [program, *options, "-n", str(size)]


def _output(*command: str) -> tuple[str, str]:
    """Return what ``command`` has printed, and what went wrong: "" if nothing did."""
    # Without what mpirun sets for its processes: the command is none of them.
    ours = ("PMI", "PMIX_", "OMPI_COMM_", "HYDRA_", "MPI_LOCAL")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
            env=environ,
        )
    except subprocess.TimeoutExpired:
        return "", f"nothing happened for {SECONDS:g} s"
    except OSError as error:
        return "", str(error)
    if done.returncode == 0 and done.stdout.strip():
        return done.stdout, ""
    last = (done.stderr.strip().splitlines() or ["it ended without a word"])[-1]
    return done.stdout, f"{last} (exit code {done.returncode})"


def _report() -> dict[str, Any]:
    """In the other process: load MPI and return what there is to report."""
    import mpi4py
    from mpi4py import MPI

    vendor = MPI.get_vendor()[0]
    # mpi4py has a module for each ABI, and chooses the one that fits the library that it finds.
    variant = Path(MPI.__file__).name.split(".")[1]
    library = next(libraries.mapped("libmpi"), ctypes.CDLL(None))
    query = getattr(library, "MPIX_Query_cuda_support", None)
    return {
        "mpi4py": mpi4py.__version__,
        "library": " ".join(MPI.Get_library_version().splitlines()[0].split(",")[0].split()),
        "vendor": vendor,
        "abi": _ABIS.get(variant, f"{vendor}'s, mpi4py was compiled for it"),
        "standard": ".".join(map(str, MPI.Get_version())),
        "threads": MPI.Query_thread() == MPI.THREAD_MULTIPLE,
        "path": library._name or "",
        "cuda": None if query is None else bool(query()),
    }


if __name__ == "__main__":
    print(json.dumps(_report()))
