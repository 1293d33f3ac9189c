"""The MPI library behind mpi4py: load it, and say in words which one it is."""

from __future__ import annotations

from typing import Any

from flashlight_py.distributed.rendezvous.mpi_store import load_mpi
from flashlight_py.errors import BackendUnavailableError


def load() -> Any:
    """Import and return ``mpi4py.MPI``, initialised.

    Raises:
        BackendUnavailableError: mpi4py or an MPI library is missing, or MPI has ended already.
    """
    mpi = load_mpi()
    if not mpi.Is_initialized():
        raise BackendUnavailableError(
            "BACKEND is mpi, and MPI is not initialised: mpi4py.rc.initialize is False; leave it "
            "True, or call MPI.Init_thread() before distributed_init"
        )
    if mpi.Is_finalized():
        raise BackendUnavailableError(
            "BACKEND is mpi, and MPI has been finalised in this process, which cannot be undone; "
            "leave MPI.Finalize() to mpi4py, which calls it at exit"
        )
    return mpi


def has_threads(mpi: Any) -> bool:
    """Return whether any thread may call MPI at any time."""
    return bool(mpi.Query_thread() == mpi.THREAD_MULTIPLE)


def describe(mpi: Any) -> str:
    """Return the library's name and version, mpi4py's, and what threads may do."""
    import mpi4py

    line = mpi.Get_library_version().splitlines()[0].split(",")[0]
    library = " ".join(line.replace("Version:", "").split())
    threads = "any thread" if has_threads(mpi) else "one thread: async verbs advance in waits only"
    return f"MPI ({library}; mpi4py {mpi4py.__version__}; {threads})"
