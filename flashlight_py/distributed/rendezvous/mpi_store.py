"""Ranks that an ``mpirun`` started meet through MPI."""

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
    """Import and return ``mpi4py.MPI``, which initialises MPI; finalised when this process exits.

    Raises BackendUnavailableError if mpi4py or the MPI library that it loads is missing, MPI was
    not initialised, or it has ended already.
    """
    finalizes = False
    try:
        import mpi4py

        # Where the program has imported it before, or has chosen, mpi4py keeps to that.
        finalizes = "mpi4py.MPI" not in sys.modules and mpi4py.rc.finalize is None
        if finalizes:
            mpi4py.rc.finalize = False  # it would do so in forked children as well
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # mpi4py raises RuntimeError without a libmpi
        raise BackendUnavailableError(
            f"starting by MPI needs mpi4py and an MPI library, and they cannot be loaded: {error}; "
            "install both with: pip install 'flashlight-py[mpi]'"
        ) from error
    if finalizes:
        atexit.register(_finalize, MPI, system.getpid())
    if not MPI.Is_initialized():
        raise BackendUnavailableError(
            "MPI is not initialised: mpi4py.rc.initialize is False; leave it True, or call "
            "MPI.Init_thread() before distributed_init"
        )
    if MPI.Is_finalized():
        raise BackendUnavailableError(
            "MPI has been finalised in this process, which cannot be undone; leave MPI.Finalize() "
            "to mpi4py, which calls it at exit"
        )
    return MPI


def _finalize(mpi: Any, pid: int) -> None:
    """At exit: end MPI, unless this is a child that was forked, whose parent goes on with it."""
    if system.getpid() == pid and not mpi.Is_finalized():
        mpi.Finalize()


def check_world(declared: LaunchEnvironment | None, size: int) -> None:
    """Raise RendezvousError if the environment declares several ranks, and MPI knows only one."""
    if declared is None or declared.size == 1 or size > 1:
        return
    raise RendezvousError(
        f"the environment says rank {declared.rank} of {declared.size} ({declared.said_by}), MPI "
        "says 1: this process was started by one MPI and mpi4py has loaded another; use the mpirun "
        "that belongs to mpi4py's library (python -m mpi4py --mpi-lib-version shows it), or "
        "build mpi4py for the MPI at hand: pip install --no-binary=mpi4py mpi4py"
    )


# MPI only passes on the address: then ranks that do not arrive are named, and all hear an abort.
class MpiStore(TreeStore):
    """A store over ``MPI.COMM_WORLD``, which knows rank and size; initialises MPI.

    MPI passes rank 0's address and a secret of this run to all ranks. Blocks until all are here.
    ``timeout`` is in seconds for each exchange.

    Raises BackendUnavailableError like ``load_mpi``, RendezvousError like ``check_world``, and
    ValueError like ``detect``.
    """

    name, kind, own = "MPI", "world of MPI", "mpirun"

    def __init__(self, timeout: float) -> None:
        world = load_mpi().COMM_WORLD
        rank, size = int(world.Get_rank()), int(world.Get_size())
        check_world(detect(), size)
        hosts = world.allgather(host_identity())
        self._one_host, self.local_rank = len(set(hosts)) == 1, hosts[:rank].count(hosts[rank])
        self._addresses: list[tuple[str, int]] = []
        self.secret = world.bcast(system.random_bytes(NONCE_BYTES).hex().encode(), 0)
        self.known = Secret(self.secret, source=self.name)
        try:
            super().__init__(rank, size, timeout, [LOOPBACK] if self._one_host else [])
        finally:  # else the others would wait for ever
            self._addresses = world.bcast(self._addresses, 0)

    def listen(self, backlog: int) -> list[system.Socket]:
        """Listen on the loopback, or for other hosts at all addresses; see ``MeetingPoint``."""
        if self._one_host:
            listener, hosts = system.create_server((LOOPBACK, 0), backlog=backlog), [LOOPBACK]
        else:
            listener, hosts = listen_everywhere(0, backlog), own_addresses()
            if not hosts:
                raise OSError("this host has no address by which others could reach it")
        port = int(listener.getsockname()[1])
        self._addresses = [(host, port) for host in hosts]
        return [listener]

    def offers(self) -> list[Offer]:
        if not self._addresses:
            raise self.error("rank 0 cannot listen for the others: look at its own output")
        return [Offer(self._addresses, self.known)]

    def remedy(self) -> str:
        return "see whether a rank has raised or still computes"
