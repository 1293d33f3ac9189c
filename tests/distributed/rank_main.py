"""The program of one rank of a test: connect to the harness, then run the tasks that it sends.

``fork_server.py`` forks it, ``python rank_main.py SOCKET RANK`` starts it on another host, or a
launcher starts it with rank -1: the rank is then read from the environment of the MPI launcher.
Every message is a pickle on one Unix socket. A rank needs no inherited pipe, so any launcher may
start it.
"""

import ctypes
import faulthandler
import os
import pickle
import resource
import signal
import socket
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

_PR_SET_PDEATHSIG = 1


def main(path: str, rank: int) -> None:
    _die_with_parent()
    # The harness ends a stuck rank by SIGABRT, and faulthandler then prints its stack.
    faulthandler.enable(all_threads=True)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    link = _connect(path, rank)
    setup = link.recv()
    sys.path[:] = setup["path"]
    os.environ.update(setup["environ"])
    rank, size = setup["rank"], setup["size"]
    link.send(_attempt(_initialise, rank, size, setup))
    while (task := link.recv_bytes()) != b"":
        link.send_bytes(pickle.dumps(_attempt(_execute, rank, size, task)))
    if setup["init"] is not None:
        import flashlight_py as fl

        fl.distributed_shutdown()


def _die_with_parent() -> None:
    """Make the kernel kill this rank when its parent process ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def _connect(path: str, rank: int) -> Connection:
    launchers = set()
    if rank < 0:
        launchers.add(os.getpgid(os.getppid()))  # a process on this host, such as Hydra's
        names = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK")
        rank = int(next(os.environ[name] for name in names if name in os.environ))
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    channel.connect(path)
    link = Connection(channel.detach())
    link.send((rank, launchers))
    return link


def _initialise(rank: int, size: int, setup: dict[str, Any]) -> None:
    if setup["init"] is None:
        return
    import flashlight_py as fl

    if setup["init"] == "mpi":
        fl.distributed_init(fl.DistributedInit.MPI, -1, -1, setup["params"])
    elif setup["init"] == "env":
        fl.distributed_init(fl.DistributedInit.ENV, params=setup["params"])
    else:
        fl.distributed_init(fl.DistributedInit.FILE_SYSTEM, rank, size, setup["params"])
    if (fl.get_world_rank(), fl.get_world_size()) != (rank, size):
        raise AssertionError(
            f"rank {rank} of {size} became {fl.get_world_rank()} of {fl.get_world_size()}"
        )


def _execute(rank: int, size: int, task: bytes) -> bytes:
    # Unpickling imports the module of the test, and pickling may fail, so both are inside the
    # attempt.
    function, args = pickle.loads(task)
    return pickle.dumps(function(rank, size, *args))


def _attempt(function: Any, *args: Any) -> tuple[Any, ...]:
    try:
        return ("returned", function(*args))
    except Exception as error:  # noqa: BLE001 - whatever a test raises is reported to the harness
        names = [base.__name__ for base in type(error).__mro__]
        return ("raised", names, str(error), traceback.format_exc())


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
