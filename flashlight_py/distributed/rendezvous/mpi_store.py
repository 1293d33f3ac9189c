"""Rendezvous of ranks that one ``mpirun`` started, through MPI."""

from __future__ import annotations

import atexit
import sys
from typing import Any

from flashlight_py import system
from flashlight_py.distributed.rendezvous.environment import LaunchEnvironment, detect
from flashlight_py.distributed.rendezvous.file_store import LOOPBACK
from flashlight_py.distributed.rendezvous.secret import NONCE_BYTES, Secret
from flashlight_py.distributed.rendezvous.store import host_identity
from flashlight_py.distributed.rendezvous.tree import TreeStore
from flashlight_py.distributed.rendezvous.wire import Offer
from flashlight_py.errors import BackendUnavailableError, RendezvousError
from flashlight_py.interfaces import listen_everywhere, own_addresses


def load_mpi() -> Any:
    """Import ``mpi4py.MPI``, which initialises MPI; MPI is finalised when this process exits.

    Raises BackendUnavailableError if mpi4py or its MPI library is missing, MPI is not initialised,
    or MPI has been finalised.
    """
    finalizes = False
    try:
        import mpi4py

        # If the program imported mpi4py.MPI or set rc.finalize, keep its choice.
        finalizes = "mpi4py.MPI" not in sys.modules and mpi4py.rc.finalize is None
        if finalizes:
            mpi4py.rc.finalize = False  # forked children would finalise as well
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py found no libmpi
        raise BackendUnavailableError(
            f"MPI needs mpi4py and an MPI library, which cannot be loaded: {error}. Install both "
            "with: pip install 'flashlight-py[mpi]'"
        ) from error
    if finalizes:
        atexit.register(_finalize, MPI, system.getpid())
    if not MPI.Is_initialized():
        raise BackendUnavailableError(
            "MPI is not initialised: mpi4py.rc.initialize is False. Set it to True, or call "
            "MPI.Init_thread() before distributed_init"
        )
    if MPI.Is_finalized():
        raise BackendUnavailableError(
            "MPI has been finalised in this process and cannot be initialised again. Do not call "
            "MPI.Finalize(): mpi4py calls it at exit"
        )
    return MPI


def _finalize(mpi: Any, pid: int) -> None:
    """Finalise MPI at exit, but not in a forked child: its parent still uses MPI."""
    if system.getpid() == pid and not mpi.Is_finalized():
        mpi.Finalize()


def check_world(declared: LaunchEnvironment | None, size: int) -> None:
    """Raise RendezvousError if the environment declares several ranks, but MPI only one."""
    if declared is None or declared.size == 1 or size > 1:
        return
    raise RendezvousError(
        f"the environment says rank {declared.rank} of {declared.size} ({declared.source}), but "
        "MPI has 1 rank: one MPI started the process, and mpi4py loaded another. Use the mpirun of "
        "mpi4py's library (python -m mpi4py --mpi-lib-version shows it), or build mpi4py for the "
        "MPI of mpirun: pip install --no-binary=mpi4py mpi4py"
    )


# MPI sends only rank 0's address. The tree of connections detects missing ranks and aborts.
class MpiStore(TreeStore):
    """A store over ``MPI.COMM_WORLD``, which gives rank and size. Initialises MPI.

    MPI sends rank 0's address and a secret of this run to all ranks. Blocks until all ranks have
    called. ``timeout`` is in seconds for each exchange.

    Raises BackendUnavailableError like ``load_mpi``, RendezvousError like ``check_world``, and
    ValueError like ``detect``.
    """

    name, kind, run_option = "MPI", "world of MPI", "mpirun"

    def __init__(self, timeout: float) -> None:
        world = load_mpi().COMM_WORLD
        rank, size = int(world.Get_rank()), int(world.Get_size())
        check_world(detect(), size)
        hosts = world.allgather(host_identity())
        self._one_host, self.local_rank = len(set(hosts)) == 1, hosts[:rank].count(hosts[rank])
        self._addresses: list[tuple[str, int]] = []
        self.secret = world.bcast(system.random_bytes(NONCE_BYTES).hex().encode(), 0)
        self.job_secret = Secret(self.secret, source=self.name)
        try:
            super().__init__(rank, size, timeout, [LOOPBACK] if self._one_host else [])
        finally:  # otherwise the other ranks would wait forever
            self._addresses = world.bcast(self._addresses, 0)

    def listen(self, backlog: int) -> list[system.Socket]:
        """Listen on the loopback, or on all addresses if there are other hosts."""
        if self._one_host:
            listener, hosts = system.create_server((LOOPBACK, 0), backlog=backlog), [LOOPBACK]
        else:
            listener, hosts = listen_everywhere(0, backlog), own_addresses()
            if not hosts:
                raise OSError("this host has no address that other hosts could reach")
        port = int(listener.getsockname()[1])
        self._addresses = [(host, port) for host in hosts]
        return [listener]

    def offers(self) -> list[Offer]:
        if not self._addresses:
            raise self.error("rank 0 cannot listen for connections. Read the output of rank 0")
        return [Offer(self._addresses, self.job_secret)]

    def remedy(self) -> str:
        return "check whether a rank has raised or is still computing"
