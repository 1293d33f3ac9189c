"""A program as a user writes it: initialise, reduce, print what this process became.

``python start_main.py METHOD [FILE RANK SIZE]`` with METHOD one of auto, mpi, env, file.
"""

import sys

import numpy as np

import flashlight_py as fl


def main() -> None:
    method, rest = sys.argv[1], sys.argv[2:]
    if method == "file":
        file, rank, size = rest[0], int(rest[1]), int(rest[2])
        fl.distributed_init(fl.DistributedInit.FILE_SYSTEM, rank, size, {"FILE_PATH": file})
    elif method == "auto":
        fl.distributed_init()
    else:
        fl.distributed_init(fl.DistributedInit[method.upper()])
    x = np.full(3, fl.get_world_rank() + 1.0)
    fl.all_reduce(x)
    place = (fl.get_world_rank(), fl.get_world_size(), fl.get_local_rank(), fl.get_local_size())
    # One write: the lines of ranks that share a pipe must not be mixed.
    sys.stdout.write(f"{place} {x.tolist()} {fl.distributed_backend().name}\n")


if __name__ == "__main__":
    main()
