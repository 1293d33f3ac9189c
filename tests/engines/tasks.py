"""Functions of ranks in the engine tests, imported by the processes of the engines."""

import os
import signal
import time
from typing import Any

import numpy as np

import flashlight_py as fl


def total(rank: int, start: int) -> tuple[int, int]:
    return rank, int(fl.all_reduce(np.array(start + rank)))


def fail(rank: int, failure: str) -> None:
    """Fail on rank 1; the other ranks wait, or compute without communication."""
    fl.barrier()
    if rank == 1:
        if failure == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("a bad batch")
    while failure == "compute":
        time.monotonic()
    fl.barrier()


def never(rank: int) -> None:
    while rank == 0:
        time.monotonic()
    fl.barrier()


def stop(rank: int) -> None:
    """Stop the last rank, like a debugger."""
    if rank == fl.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    fl.barrier()


def sleep(_: object) -> None:
    time.sleep(6)


def unpicklable(rank: int) -> Any:
    return (value for value in [rank])
