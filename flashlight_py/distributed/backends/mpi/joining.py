"""From the ranks of a store to a communicator of MPI."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.backends.mpi.backend import MpiBackend, Progress, progress_of
from flashlight_py.distributed.rendezvous.mpi_store import load_mpi
from flashlight_py.distributed.rendezvous.store import Store
from flashlight_py.errors import DistributedError, UnavailableEverywhereError


class MpiCard(NamedTuple):
    """A rank's report to the others: its place among those that MPI knows, and settings."""

    world_rank: int = -1
    world_size: int = 0
    gpu_aware: bool = False
    problem: str = ""


def join(
    store: Store, join_cpus: Callable[[], Backend], seconds: float, checked: bool, gpu_aware: bool
) -> MpiBackend:
    """Join the ranks of ``store`` by their MPI library. Collective, blocking.

    ``join_cpus()`` returns a backend of the same ranks, over which they compare what they call.
    ``seconds`` bounds each operation; with ``checked``, the same on all, all calls are compared;
    ``gpu_aware`` says that the library takes pointers to a GPU's memory.

    Raises:
        UnavailableEverywhereError: mpi4py or a library is missing on a rank, the processes were
            not started together by MPI, or their settings differ. Raised on every rank.
    """
    mpi: Any = None
    try:
        mpi = load_mpi()
        world = mpi.COMM_WORLD
        card = MpiCard(world.Get_rank(), world.Get_size(), gpu_aware)
    except DistributedError as error:
        card = MpiCard(problem=str(error))
    cards = [MpiCard(*json.loads(text)) for text in store.exchange(json.dumps(card).encode())]
    _check(cards)
    control = join_cpus()
    try:
        # All members are here: each has just reported so.
        members = mpi.COMM_WORLD.Get_group().Incl([other.world_rank for other in cards])
        comm = mpi.COMM_WORLD.Create_group(members)
        members.Free()
        comm.Set_errhandler(mpi.ERRORS_RETURN)
    except BaseException:
        control.close()
        raise
    progress = progress_of(mpi, mpi.Query_thread() == mpi.THREAD_MULTIPLE)
    return MpiBackend(progress, comm, control, _described(progress), seconds, checked, gpu_aware)


def _check(cards: Sequence[MpiCard]) -> None:
    """Find out, on every rank alike, whether these processes can be joined."""
    for rank, card in enumerate(cards):
        if card.problem:
            raise UnavailableEverywhereError(f"rank {rank}: {card.problem}")
    places = [card.world_rank for card in cards]
    if len(set(places)) < len(places) or len({card.world_size for card in cards}) > 1:
        raise UnavailableEverywhereError(
            f"BACKEND is mpi, and the {len(cards)} ranks were not started together by MPI, which "
            f"knows them as {', '.join(f'{c.world_rank} of {c.world_size}' for c in cards)}; start "
            "them by one mpirun (of the MPI that mpi4py has loaded), or leave BACKEND out"
        )
    if len({card.gpu_aware for card in cards}) > 1:
        raise UnavailableEverywhereError(
            "BACKEND is mpi, and MPI_CUDA_AWARE is not the same on all ranks; make it so"
        )


def _described(progress: Progress) -> str:
    """Return the library's name and version, mpi4py's, and what threads may do."""
    import mpi4py

    line = progress.mpi.Get_library_version().splitlines()[0].split(",")[0]
    library = " ".join(line.replace("Version:", "").split())
    one = "one thread: async verbs advance in waits only"
    threads = "any thread" if progress.threaded else one
    return f"MPI ({library}; mpi4py {mpi4py.__version__}; {threads})"
