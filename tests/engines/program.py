"""A program for schedulers: joins the world and prints rank, size and a sum.

``program.py [victim HOW]``: rank ``victim`` then dies while the other ranks wait.
"""

import os
import signal
import sys
import time

import numpy as np

import flashlight_py as fl


def main() -> None:
    fl.distributed_init(fl.DistributedInit.ENV)
    rank, size = fl.get_world_rank(), fl.get_world_size()
    print(f"{rank} of {size} sum {int(fl.all_reduce(np.array(rank)))}", flush=True)
    if len(sys.argv) > 1:
        victim, failure = int(sys.argv[1]), sys.argv[2]
        if rank == victim:
            if failure == "raise":
                raise ValueError("a bad batch")
            if failure == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)  # "wait": the test ends the job
        fl.all_reduce(np.zeros(4))


def submitted(start: int) -> tuple[int, int, int]:
    fl.distributed_init()
    rank = fl.get_world_rank()
    return rank, fl.get_world_size(), int(fl.all_reduce(np.array(start + rank)))


if __name__ == "__main__":
    main()
