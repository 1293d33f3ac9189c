"""One rank of ``doctor --run``: join a world, reduce some arrays, and tell how long it took.

``python -m flashlight_py.doctor.rank_main PARAMS DEVICE BYTES...``: the params of
``distributed_init`` as JSON, ``cpu`` or ``cuda``, and the sizes. Every rank checks the sums; rank 0
prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

SECONDS, MOST = 0.2, 2_000


def main() -> None:
    """Do what the arguments say."""
    import flashlight_py as fl

    params, device, *sizes = sys.argv[1:]
    fl.distributed_init(params=json.loads(params))
    if device == "cuda":
        device = fl.distributed.use_local_device()
    seconds = [reduce_for_a_while(fl, device, int(size)) for size in sizes]
    arrays = fl.distributed.describe().splitlines()[1 if device == "cpu" else -1]
    path = arrays.partition(": ")[2]
    if fl.get_world_rank() == 0:
        told = {"seconds": seconds, "ranks": fl.get_world_size(), "path": path}
        print(json.dumps(told), flush=True)
    fl.distributed_shutdown()


def reduce_for_a_while(fl: Any, device: str, nbytes: int) -> float:
    """Return the seconds that a reduction of ``nbytes`` takes, once it is warm; check the sum."""
    import numpy as np

    array = fl.device.to_device(np.ones(nbytes // 4, np.float32), device)
    fl.all_reduce(array)
    if not bool((array == fl.get_world_size()).all()):
        raise RuntimeError(f"the sum of {fl.get_world_size()} ones is {array}")
    once = timed(fl, array, 2)
    # Rank 0 decides how often: all ranks must call it as many times.
    return timed(fl, array, fl.broadcast_object(max(2, min(MOST, int(SECONDS / once)))))


def timed(fl: Any, array: Any, times: int) -> float:
    """Return the seconds that one of ``times`` reductions takes."""
    array[...] = 0
    fl.barrier()
    start = time.perf_counter()
    for _ in range(times):
        fl.all_reduce(array)
    fl.sync_distributed()
    return (time.perf_counter() - start) / times


if __name__ == "__main__":
    main()
