"""Memory and time of a step: one model per host next to one model per rank.

    python benchmarks/sharding.py --json sharding.json
    python benchmarks/sharding.py --move  # memory while fully_shard works, 6 x Linear(2048)

Each contender runs in new processes in each round; medians count. Memory is the growth of the
memory of
all ranks together (PSS, /proc/self/smaps_rollup) from before the model is made until after some
steps:
parameters, gradients, optimizer state, activations and buckets. A step is zero_grad, forward,
backward and step on a batch of 32 samples per rank; the time of the slowest rank counts. Each
process
has one thread. If torch is installed (python -m harness.install torch), its FSDP2 on gloo is a
peer, with each layer as a unit and with its fused Adam.
"""

import argparse
import itertools
import json
import os
import socket
import statistics
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # before NumPy, also in ranks

import numpy as np

import flashlight_py as fl
from harness.environments import PEERS, python_of

BATCH, WARM = 32, 3
MODELS = {
    "4 x Linear(2048)": [2048] * 5,
    "64-128-10": [64, 128, 10],
    "4 x Linear(256)": [256] * 5,
    "4 x Linear(512)": [512] * 5,
}
FSDP2 = "torch FSDP2, gloo"
WAYS = ["data parallel", "fully_shard"]
HERE = Path(__file__).parent


def pss() -> int:
    """Return the proportional set size of this process in bytes."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return int(text.split("Pss:")[1].split()[0]) << 10


def plain(sizes: list[int]) -> Any:
    """Return the model as each rank makes it."""
    model = fl.nn.Sequential()
    for inputs, outputs in itertools.pairwise(sizes):
        model.add(fl.nn.Linear(inputs, outputs))
        model.add(fl.nn.ReLU())
    return model


def build(sizes: list[int], kind: str) -> Any:
    """Return the model, prepared for data-parallel or sharded training."""
    model = plain(sizes)
    if kind == "data parallel":
        fl.distribute_module_grads(model)
    else:
        fl.fully_shard(model)
    return model


def train(
    rank: int, sizes: list[int], kind: str, steps: int
) -> tuple[Any, Any, list[float], float]:
    """Return the model and the optimizer, the seconds of each step, and the last loss."""
    fl.set_seed(1)
    model, criterion = build(sizes, kind), fl.nn.MeanSquaredError()
    optimizer = fl.optim.AdamOptimizer(model.params(), 0.001)
    random = np.random.default_rng(rank)
    x = fl.input(random.standard_normal((BATCH, sizes[0]), dtype=np.float32))
    y = fl.no_grad(random.standard_normal((BATCH, sizes[-1]), dtype=np.float32))
    seconds = []
    for _ in range(steps):
        fl.barrier()
        begin = time.perf_counter()
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
    return model, optimizer, seconds, float(loss.scalar())


def measure(rank: int, sizes: list[int], kind: str, steps: int) -> tuple[list[float], int, float]:
    """Return the seconds of each step, the growth of the memory, and the last loss."""
    fl.all_reduce(np.ones(1000, np.float32))
    train(rank, [512, 512], kind, 2)  # allocates memory that any model needs
    before = pss()
    model, optimizer, seconds, loss = train(rank, sizes, kind, WARM + steps)
    fl.barrier()
    taken = pss() - before
    fl.barrier()
    del model, optimizer
    return seconds[WARM:], taken, loss


def move(rank: int, sizes: list[int]) -> list[tuple[float, int]]:
    """Return times and memory of this rank from before fully_shard until after it."""
    fl.all_reduce(np.ones(1000, np.float32))
    fl.fully_shard(plain([512, 512]), across_hosts=True)  # across_hosts also shards small modules
    empty = pss()
    model = plain(sizes)
    fl.barrier()
    samples, done = [(time.monotonic(), pss() - empty)], threading.Event()

    def sample() -> None:
        while not done.wait(0.001):
            samples.append((time.monotonic(), pss() - empty))

    fl.barrier()
    sampler = threading.Thread(target=sample)
    sampler.start()
    fl.fully_shard(model)
    fl.barrier()
    done.set()
    sampler.join()
    samples.append((time.monotonic(), pss() - empty))
    fl.barrier()
    return samples


def print_moves(ranks: int) -> None:
    """Print a row: memory of all ranks before, at the peak of, and after fully_shard."""
    of_ranks = fl.spawn(move, ([2048] * 7,), nprocs=ranks)
    latest = [samples.pop(0)[1] for samples in of_ranks]
    totals = [sum(latest)]
    for _, rank, nbytes in sorted(
        (at, r, n) for r, samples in enumerate(of_ranks) for at, n in samples
    ):
        latest[rank] = nbytes
        totals.append(sum(latest))
    before, peak, after = (size >> 20 for size in (totals[0], max(totals), totals[-1]))
    print(f"| {ranks} | {before} | {peak} | {after} |")


def run(sizes: list[int], kind: str, ranks: int, steps: int) -> tuple[float, int]:
    """Return the median seconds of a step, and the memory of all ranks in bytes."""
    if kind == FSDP2:
        return summary(of_torch(sizes, ranks, steps))
    results = fl.spawn(measure, (sizes, kind, steps), nprocs=ranks)
    return summary([(seconds, taken) for seconds, taken, _ in results])


def of_torch(sizes: list[int], ranks: int, steps: int) -> list[tuple[list[float], int]]:
    """Return the results of each rank of torch."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    numbers = [json.dumps(sizes), *map(str, (BATCH, WARM, steps))]
    python = python_of(PEERS["torch"], None)
    command = [str(python), "-m", "harness.roles.torch_fully_shard", *numbers]
    world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            command,
            cwd=HERE,
            env={**os.environ, **world, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    lines = [process.communicate()[0] for process in processes]
    return [(seconds, taken) for seconds, taken in map(json.loads, lines)]


def summary(of_ranks: list[tuple[list[float], int]]) -> tuple[float, int]:
    """Return the median seconds of the slowest ranks, and the sum of their memory."""
    slowest = [max(times) for times in zip(*(seconds for seconds, _ in of_ranks), strict=True)]
    return statistics.median(slowest), sum(taken for _, taken in of_ranks)


def main() -> None:
    """Measure, print a table, and write JSON if the option is set."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--move", action="store_true")
    options = parser.parse_args()
    if options.move:
        print("| ranks | before, MiB | peak | after |\n|---|---|---|---|")
        for ranks in options.ranks:
            print_moves(ranks)
        return
    python = python_of(PEERS["torch"], None)
    kinds = WAYS if isinstance(python, str) else [*WAYS, FSDP2]
    if isinstance(python, str):
        print(f"without torch: {python}")
    results_by_case: dict[tuple[str, int, str], list[tuple[float, int]]] = {}
    for _ in range(options.rounds):
        for model in options.models:
            for ranks in options.ranks:
                for kind in kinds:
                    result = run(MODELS[model], kind, ranks, options.steps)
                    results_by_case.setdefault((model, ranks, kind), []).append(result)
    rows = []
    print("| model | ranks | | step, ms | memory of all ranks, MiB |\n|---|---|---|---|---|")
    for (model, ranks, kind), results in results_by_case.items():
        seconds = statistics.median(seconds_of_run for seconds_of_run, _ in results)
        taken = statistics.median(nbytes for _, nbytes in results)
        print(f"| {model} | {ranks} | {kind} | {seconds * 1e3:.2f} | {taken / 2**20:.0f} |")
        rows.append({"model": model, "ranks": ranks, "way": kind, "s": seconds, "bytes": taken})
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
