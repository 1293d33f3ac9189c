"""Creation of an MPI backend for the ranks of a store."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from flashlight_py.distributed.backend import Backend
from flashlight_py.distributed.backends.mpi.backend import MpiBackend, progress_of
from flashlight_py.distributed.rendezvous.mpi_store import load_mpi
from flashlight_py.distributed.rendezvous.store import Store
from flashlight_py.errors import DistributedError, UnavailableEverywhereError


class MpiCard(NamedTuple):
    """A rank's report: its rank in MPI's world, and its settings."""

    world_rank: int = -1
    world_size: int = 0
    gpu_aware: bool = False
    problem: str = ""


def connect_mpi(
    store: Store, join_cpus: Callable[[], Backend], seconds: float, checked: bool, gpu_aware: bool
) -> MpiBackend:
    """Connect the ranks of ``store`` by their MPI library. Collective, blocking.

    ``join_cpus()`` returns a backend of the same ranks that compares their calls. For the other
    arguments, see ``MpiBackend``. ``checked`` must be equal on all ranks.

    Raises UnavailableEverywhereError on every rank if a rank lacks mpi4py or a library, MPI did not
    start the processes together, or settings differ.
    """
    mpi: Any = None
    try:
        mpi = load_mpi()
        world = mpi.COMM_WORLD
        card = MpiCard(world.Get_rank(), world.Get_size(), gpu_aware)
    except DistributedError as error:
        card = MpiCard(problem=str(error))
    cards = [MpiCard(*json.loads(text)) for text in store.exchange(json.dumps(card).encode())]
    _check_cards(cards)
    control = join_cpus()
    try:
        # All members are running, because each of them has just sent a card.
        members = mpi.COMM_WORLD.Get_group().Incl([other.world_rank for other in cards])
        comm = mpi.COMM_WORLD.Create_group(members)
        members.Free()
        comm.Set_errhandler(mpi.ERRORS_RETURN)
    except BaseException:
        control.close()
        raise
    progress = progress_of(mpi, mpi.Query_thread() == mpi.THREAD_MULTIPLE)
    import mpi4py

    line = mpi.Get_library_version().splitlines()[0].split(",")[0]
    library = " ".join(line.replace("Version:", "").split())
    threads = "any thread" if progress.threaded else "one thread: async verbs advance in waits only"
    path = f"MPI ({library}; mpi4py {mpi4py.__version__}; {threads})"
    return MpiBackend(progress, comm, control, path, seconds, checked, gpu_aware)


def _check_cards(cards: Sequence[MpiCard]) -> None:
    """Raise, on every rank alike, if these processes cannot form an MPI group."""
    for rank, card in enumerate(cards):
        if card.problem:
            raise UnavailableEverywhereError(f"rank {rank}: {card.problem}")
    world_ranks = [card.world_rank for card in cards]
    if len(set(world_ranks)) < len(world_ranks) or len({card.world_size for card in cards}) > 1:
        raise UnavailableEverywhereError(
            f"BACKEND is mpi: expected {len(cards)} ranks of one MPI job, got the MPI ranks "
            f"{', '.join(f'{c.world_rank} of {c.world_size}' for c in cards)}. Start all ranks by "
            "one mpirun (of the MPI that mpi4py has loaded), or omit BACKEND"
        )
    if len({card.gpu_aware for card in cards}) > 1:
        raise UnavailableEverywhereError(
            "BACKEND is mpi: MPI_CUDA_AWARE differs between ranks. Set one value on all ranks"
        )
