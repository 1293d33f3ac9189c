"""Selection of the store for the rendezvous: a file, a port of rank 0's host, or MPI."""

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


def choose_store(
    method: DistributedInit | None, rank: int, size: int, settings: Settings
) -> StoreFactory | None:
    """Return a function that creates the store, or None for a world of one process."""
    host, port, file = settings.master_addr, settings.master_port, settings.file_path
    is_passed = (rank, size) != (-1, -1)
    if host is not None and method not in (None, DistributedInit.ENV):
        raise ValueError(
            "distributed_init: with MASTER_ADDR and MASTER_PORT, init_method must be "
            f"DistributedInit.ENV or None, got {method.name}. Omit init_method or them."
        )
    if host is not None and file is not None:
        raise ValueError(
            f"distributed_init: expected one rendezvous, got port {port} of {host} and FILE_PATH. "
            "Pass one of the two."
        )
    if method is DistributedInit.MPI:
        return lambda: MpiStore(settings.timeout)
    if host is not None:
        call = f"distributed_init('tcp://{host}:{port}', 0, 1)"
        launch = _check_passed(rank, size, settings, call) if is_passed else _detect()
        launch = replace(launch, file=None, master_address=host, master_port=port, addresses=())
    elif method is DistributedInit.FILE_SYSTEM:
        if file is None:
            raise ValueError(
                "distributed_init: DistributedInit.FILE_SYSTEM needs a rendezvous file. Pass "
                "params={'FILE_PATH': path} with a path that all ranks can access."
            )
        launch = _check_passed(rank, size, settings, "distributed_init(FILE_SYSTEM, 0, 1)")
    elif method is DistributedInit.ENV:
        launch = _detect()
        if is_passed and (rank, size) != (launch.rank, launch.size):
            raise ValueError(
                f"distributed_init: expected rank {launch.rank} of {launch.size} as in the "
                f"environment ({launch.source}), got world_rank={rank} and world_size={size}. "
                "Omit them with DistributedInit.ENV."
            )
    else:
        detected = None if environment.is_alone() else environment.detect()
        if is_passed or file is not None:
            raise ValueError(
                "distributed_init: world_rank, world_size and FILE_PATH need init_method="
                "DistributedInit.FILE_SYSTEM, got None. Pass this method, or omit them to use the "
                "environment."
            )
        if detected is None:
            environment.check_no_launcher()
            return None
        launch = detected
        if launch.launcher in _MPI_LAUNCHERS and not launch.file:
            return lambda: MpiStore(settings.timeout)
    return None if launch.size == 1 else lambda: _create_store(launch, settings)


def _check_passed(rank: int, size: int, settings: Settings, call: str) -> LaunchEnvironment:
    """Check ``rank`` and ``size``. ``call`` is the text of the user's call, for errors."""
    for name, value in (("world_rank", rank), ("world_size", size)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"distributed_init: {name} must be an integer, got {value!r}")
    check_member(rank, size, settings.timeout)
    if size == 1:
        environment.check_size_one(call)
    return LaunchEnvironment("call", rank, size, variables=("world_rank", "world_size"))


def _detect() -> LaunchEnvironment:
    launch = environment.detect()
    if launch is None:
        environment.check_schedulers()
        raise RendezvousError(
            "distributed_init: expected a launcher, got no launcher variables. Start "
            "the ranks by flrun, srun, mpirun or torchrun, or set RANK, WORLD_SIZE, MASTER_ADDR "
            "and MASTER_PORT."
        )
    return launch


def _create_store(launch: LaunchEnvironment, settings: Settings) -> Store:
    rank, size, timeout = launch.rank, launch.size, settings.timeout
    file = settings.file_path or launch.file
    host, port = launch.master_address, launch.master_port
    if file is None and port is not None and port == environment.agent_port():
        if launch.local_size == size:
            file = str(private_folder(system.environ) / f"torchrun-{port}")
        else:
            port = environment.derived_port(port, 1)  # part 0 could return ``port`` itself
    store: FileStore | TcpStore
    if file is not None:
        store = FileStore(file, rank, size, timeout)
    elif host is not None and port is not None:
        one_host = launch.local_size == size
        store = TcpStore(host, port, rank, size, timeout, one_host, launch.addresses)
    elif launch.launcher in _MPI_LAUNCHERS:
        return MpiStore(timeout)
    else:
        raise RendezvousError(
            f"distributed_init: rank {rank} of {size} ({launch.source}): expected a rendezvous in "
            "the environment, got no address. Set MASTER_ADDR and MASTER_PORT, pass "
            "params={'FILE_PATH': path} with a path that all ranks can access, or use "
            "DistributedInit.MPI under an MPI launcher."
        )
    store.local_rank = launch.local_rank
    return store
