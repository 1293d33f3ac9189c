"""The place where ranks meet: a file, a port of rank 0's host, or MPI."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from flashlight_py import system
from flashlight_py.distributed.constants import DistributedInit
from flashlight_py.distributed.rendezvous import environment
from flashlight_py.distributed.rendezvous.environment import LaunchEnvironment
from flashlight_py.distributed.rendezvous.file_store import FileStore
from flashlight_py.distributed.rendezvous.mpi_store import MpiStore
from flashlight_py.distributed.rendezvous.secret import private_folder
from flashlight_py.distributed.rendezvous.store import Store, check_member
from flashlight_py.distributed.rendezvous.tcp_store import TcpStore
from flashlight_py.distributed.start.settings import Settings
from flashlight_py.errors import RendezvousError

_MPI_LAUNCHERS = ("openmpi", "pmi", "mvapich")

StoreFactory = Callable[[], Store]


def choose(
    method: DistributedInit | None, rank: int, size: int, settings: Settings
) -> StoreFactory | None:
    """Return what makes the store; None: a world of one process, which meets no other.

    Raises ValueError and RendezvousError like ``distributed_init``.
    """
    host, port, file = settings.master_addr, settings.master_port, settings.file_path
    is_given = (rank, size) != (-1, -1)
    if host is not None and method not in (None, DistributedInit.ENV):
        raise ValueError(
            "MASTER_ADDR and MASTER_PORT are for DistributedInit.ENV or None, not for "
            f"{method.name}; leave one of them out"
        )
    if host is not None and file is not None:
        raise ValueError(f"port {port} of {host} and FILE_PATH are two places to meet; pass one")
    if method is DistributedInit.MPI:
        return lambda: MpiStore(settings.timeout)
    if host is not None:
        call = f"distributed_init('tcp://{host}:{port}', 0, 1)"
        found = _passed(rank, size, settings, call) if is_given else _detected()
        found = replace(found, file=None, master_address=host, master_port=port, addresses=())
    elif method is DistributedInit.FILE_SYSTEM:
        if file is None:
            raise ValueError(
                "DistributedInit.FILE_SYSTEM needs params={'FILE_PATH': a path that all ranks see}"
            )
        found = _passed(rank, size, settings, "distributed_init(FILE_SYSTEM, 0, 1)")
    elif method is DistributedInit.ENV:
        found = _detected()
        if is_given and (rank, size) != (found.rank, found.size):
            raise ValueError(
                f"world_rank={rank} and world_size={size} are passed, and the environment says "
                f"rank {found.rank} of {found.size} ({found.source}); leave them out with ENV"
            )
    else:
        detected = None if environment.is_alone() else environment.detect()
        if is_given or file is not None:
            raise ValueError(
                "world_rank, world_size and FILE_PATH belong to DistributedInit.FILE_SYSTEM; pass "
                "it as init_method, or leave them out to let the environment decide"
            )
        if detected is None:
            environment.check_no_launcher()
            return None
        found = detected
        if found.launcher in _MPI_LAUNCHERS and not found.file:
            return lambda: MpiStore(settings.timeout)
    return None if found.size == 1 else lambda: _store(found, settings)


def _passed(rank: int, size: int, settings: Settings, call: str) -> LaunchEnvironment:
    """Check the rank and size that were passed. ``call`` is the call for a world of one."""
    for name, value in (("world_rank", rank), ("world_size", size)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{name} must be an integer, got {value!r}")
    check_member(rank, size, settings.timeout)
    if size == 1:
        environment.check_size_one(call)
    return LaunchEnvironment("call", rank, size, variables=("world_rank", "world_size"))


def _detected() -> LaunchEnvironment:
    found = environment.detect()
    if found is None:
        environment.check_schedulers()
        raise RendezvousError(
            "DistributedInit.ENV found no launcher in the environment; start by one (flrun, srun, "
            "mpirun, torchrun), or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT by hand"
        )
    return found


def _store(found: LaunchEnvironment, settings: Settings) -> Store:
    """Make the store that the environment calls for."""
    rank, size, timeout = found.rank, found.size, settings.timeout
    file = settings.file_path or found.file
    host, port = found.master_address, found.master_port
    if file is None and port is not None and port == environment.agent_port():
        if found.local_size == size:
            file = str(private_folder(system.environ) / f"torchrun-{port}")
        else:
            port = environment.derived_port(port, 1)  # with 0, 13600 would be its own
    store: FileStore | TcpStore
    if file is not None:
        store = FileStore(file, rank, size, timeout)
    elif host is not None and port is not None:
        one_host = found.local_size == size
        store = TcpStore(host, port, rank, size, timeout, one_host, found.addresses)
    elif found.launcher in _MPI_LAUNCHERS:
        return MpiStore(timeout)
    else:
        raise RendezvousError(
            f"the environment says rank {rank} of {size} ({found.source}) but not where to meet; "
            "set MASTER_ADDR and MASTER_PORT, or pass params={'FILE_PATH': a path that all ranks "
            "see}; or DistributedInit.MPI, where the launcher starts processes of MPI"
        )
    store.local_rank = found.local_rank
    return store
