"""Sum an array over all processes: mpirun -n 4 python examples/all_reduce.py."""

import numpy as np

import flashlight_py as fl

fl.distributed_init()  # reads rank and size from the launcher's environment variables
rank = fl.get_world_rank()

array = np.full((3, 3), rank, dtype=np.float32)
fl.all_reduce(array)

if rank == 0:
    print(f"sum over {fl.get_world_size()} processes")
    print(array)
