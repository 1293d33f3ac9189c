"""From the ranks of a store to communicators of MPI."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from flashlight_py.distributed.backends.mpi import library
from flashlight_py.distributed.backends.mpi.backend import MpiBackend
from flashlight_py.distributed.backends.mpi.progress import progress_of
from flashlight_py.distributed.rendezvous.store import Store
from flashlight_py.errors import DistributedError, UnavailableEverywhereError

__all__ = ["CHECKS", "join"]

CHECKS = "FLASHLIGHT_CHECKS"
"""The environment variable that, if it is "0", spares collectives the comparison of calls."""


@dataclass(frozen=True)
class _Card:
    """What a rank tells the others: its place among the processes that MPI knows, and settings."""

    world_rank: int = -1
    world_size: int = 0
    checked: bool = True
    gpu_aware: bool = False
    problem: str = ""


def join(store: Store, seconds: float, gpu_aware: bool) -> MpiBackend:
    """Join the ranks of ``store`` by their MPI library. Collective, blocking; one exchange.

    ``seconds`` bounds each operation; ``gpu_aware`` says that the library takes pointers to a
    GPU's memory.

    Raises:
        UnavailableEverywhereError: mpi4py or a library is missing on a rank, the processes were
            not started together by MPI, or their settings differ. Raised on every rank.
    """
    mpi, card = _look(gpu_aware)
    cards = [
        _Card(**json.loads(text)) for text in store.exchange(json.dumps(asdict(card)).encode())
    ]
    _check(cards)
    comms = _communicators(mpi, [other.world_rank for other in cards])
    progress = progress_of(mpi, library.has_threads(mpi))
    path = library.describe(mpi)
    checked, processes = card.checked, store.processes
    return MpiBackend(mpi, progress, comms, path, seconds, checked, gpu_aware, processes)


def _look(gpu_aware: bool) -> tuple[Any, _Card]:
    try:
        mpi = library.load()
    except DistributedError as error:
        return None, _Card(problem=str(error))
    world = mpi.COMM_WORLD
    checked = os.environ.get(CHECKS, "1") != "0"
    return mpi, _Card(world.Get_rank(), world.Get_size(), checked, gpu_aware)


def _check(cards: Sequence[_Card]) -> None:
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
    for name, key in (("checked", f"the environment's {CHECKS}"), ("gpu_aware", "MPI_CUDA_AWARE")):
        if len({getattr(card, name) for card in cards}) > 1:
            raise UnavailableEverywhereError(
                f"BACKEND is mpi, and {key} is not the same on all ranks; make it so"
            )


def _communicators(mpi: Any, places: Sequence[int]) -> tuple[Any, Any, Any]:
    """Return one each for collectives, for arrays between two ranks, and for notes.

    All members are here: each has just told the others so.
    """
    members = mpi.COMM_WORLD.Get_group().Incl(list(places))
    calls = mpi.COMM_WORLD.Create_group(members)
    members.Free()
    comms = (calls, calls.Dup(), calls.Dup())
    for comm in comms:
        comm.Set_errhandler(mpi.ERRORS_RETURN)
    return comms
