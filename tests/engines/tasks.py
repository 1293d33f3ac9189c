"""What ranks do in the tests of engines; also imported by the engines' processes."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import numpy as np

import flashlight_py as fl


def total(rank: int, start: int) -> tuple[int, int]:
    return rank, int(fl.all_reduce(np.array(start + rank)))


def fail(rank: int, how: str) -> None:
    """Rank 1 fails, the others wait for it, or compute without ever looking up."""
    fl.barrier()
    if rank == 1:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("a bad batch")
    while how == "compute":
        time.monotonic()
    fl.barrier()


def never(rank: int) -> None:
    while rank == 0:
        time.monotonic()
    fl.barrier()


def stop(rank: int) -> None:
    """The last rank is stopped, as by a debugger."""
    if rank == fl.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    fl.barrier()


def sleep(_: object) -> None:
    time.sleep(6)


def unpicklable(rank: int) -> Any:
    return (each for each in [rank])


def train(rank: int, folder: str, kill_at: int, victim: int) -> bytes:
    """Twenty steps with a checkpoint of each; the first start is killed at one of them."""
    model = fl.nn.Linear(10, 10)
    for each in model.params():
        each.array[...] = 0
    saved, first = fl.load(folder, model), os.environ["FLASHLIGHT_RESTART_COUNT"] == "0"
    for step in range(saved.step if saved else 0, 20):
        if first and (step, rank) == (kill_at, victim):
            os.kill(os.getpid(), signal.SIGKILL)
        draw = np.random.default_rng([step, rank])
        for each in model.params():
            gradient = draw.random(each.shape, dtype=np.float32)
            each.array -= 0.1 * fl.all_reduce(gradient, scale=1 / fl.get_world_size())
        fl.save(folder, model, step=step + 1)
    return b"".join(each.array.tobytes() for each in model.params())


def train_alone(rank: int, folder: str) -> bytes:
    """The same, undisturbed."""
    os.environ["FLASHLIGHT_RESTART_COUNT"] = "0"
    return train(rank, folder, -1, -1)
