"""Train with one script on spawn, flrun, Ray, Dask and Spark, also if ranks are killed.

    python examples/engines.py spawn --folder run
    flrun -n 2 --max-restarts 3 examples/engines.py flrun --folder run
    python examples/engines.py ray --folder run      # and dask, spark

Each engine calls the same function on ``--ranks`` processes. If a rank is killed, the engine starts
all ranks again, at most three times. They continue from the last checkpoint and end with the same
bits. All ranks must be able to read the folder.
"""

import argparse
import hashlib
import importlib.util
from typing import Any

import numpy as np

import flashlight_py as fl

STEPS = 20


def train(rank: int, folder: str) -> str:
    """Fit a line, save each step, and return the SHA-256 of the parameters."""
    fl.set_seed(0)
    model = fl.nn.Linear(8, 1)
    fl.broadcast_parameters(model)
    fl.distribute_module_grads(model)
    optimizer = fl.optim.AdamOptimizer(model.params(), 1e-2)
    checkpoint = fl.load(folder, module=model, optimizer=optimizer)
    for step in range(checkpoint.step if checkpoint else 0, STEPS):
        x = np.random.default_rng([step, rank]).random((16, 8), dtype=np.float32)
        optimizer.zero_grad()
        target = fl.no_grad(x.sum(axis=1, keepdims=True))
        fl.nn.MeanSquaredError()(model(fl.input(x)), target).backward()
        optimizer.step()
        fl.save(folder, module=model, optimizer=optimizer, step=step + 1)
    return hashlib.sha256(
        b"".join(parameter.array.tobytes() for parameter in model.params())
    ).hexdigest()


def run(engine: str, folder: str, ranks: int) -> Any:
    """Train on ``engine``."""
    options: dict[str, Any] = {"args": (folder,), "nprocs": ranks}
    if engine == "ray":
        return fl.launch.ray.run(train, **options, max_restarts=3)
    if engine == "dask":
        from distributed import Client

        with Client(n_workers=ranks, threads_per_worker=1, dashboard_address=None) as client:
            return fl.launch.dask.run(client, train, **options, max_restarts=3)
    if engine == "spark":
        from pyspark.sql import SparkSession

        with SparkSession.builder.master(f"local[{ranks}]").getOrCreate():
            return fl.launch.spark.run(train, **options, max_restarts=3)
    if engine == "flrun":
        fl.distributed_init()
        return [train(fl.get_world_rank(), folder)]
    return fl.spawn(train, **options, max_restarts=3)


def main() -> None:
    """Read the command line, train, and print the result of rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("engine", choices=["spawn", "flrun", "ray", "dask", "spark"])
    parser.add_argument("--folder", required=True, help="of the checkpoints")
    parser.add_argument("--ranks", type=int, default=2, help="without flrun; default 2")
    options = parser.parse_args()
    needed = {"ray": "ray", "dask": "distributed", "spark": "pyspark"}.get(options.engine, "sys")
    if options.ranks < 1 or importlib.util.find_spec(needed) is None:
        parser.error(f"--ranks is from 1 on, and {options.engine} must be installed")
    digests = run(options.engine, options.folder, options.ranks)
    if fl.is_main_process():
        print(f"SHA-256 of the parameters: {digests[0]}")


if __name__ == "__main__":
    main()
