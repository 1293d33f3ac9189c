"""Train with checkpoints: after an interruption the run ends with the same bits.

    mpirun -n 2 python examples/ResumableTraining.py --folder run

Run it again after an interruption: it continues from the last checkpoint in the folder. A
checkpoint contains the parameters, the optimizer's state, each rank's random generator (for
dropout) and the number of the step, which determines the batch.

    flrun -n 4 --max-restarts 20 examples/ResumableTraining.py --folder run --leaves 8

With ``--leaves`` the number of ranks may differ after an interruption. Each batch is divided into
that number of leaves. Any rank may compute a leaf, and the gradients of the leaves are added in a
fixed order. The program prints the SHA-256 of the parameters at the end.
"""

import argparse
import hashlib
from pathlib import Path
from typing import Any

import numpy as np

import flashlight_py as fl

FEATURES = 10
SAMPLES = 1_000
GLOBAL_BATCH = 20


def main(options: argparse.Namespace) -> None:
    fl.distributed_init()
    # Each rank needs other dropout masks, and the parameters of rank 0.
    fl.set_seed(options.seed + fl.get_world_rank())

    model = fl.nn.Sequential()
    model.add(fl.nn.Linear(FEATURES, 64))
    model.add(fl.nn.ReLU())
    model.add(fl.nn.Dropout(0.1))
    model.add(fl.nn.Linear(64, 1))
    fl.broadcast_parameters(model)
    fl.distribute_module_grads(model, leaves=options.leaves or None)
    optimizer = fl.optim.AdamOptimizer(model.params(), 1e-3)
    criterion = fl.nn.MeanSquaredError()
    batches = my_batches(options.seed, whole_batches=options.leaves > 0)

    # All ranks load the same checkpoint. At the start of a run there is no checkpoint.
    checkpoint = fl.load(options.folder, module=model, optimizer=optimizer, rng=True)
    first = 0 if checkpoint is None else checkpoint.step
    say(f"Going on from step {first}" if first else "Starting")

    for step in range(first, options.epochs * len(batches)):
        epoch, t = divmod(step, len(batches))
        if epoch != batches.epoch:
            batches.set_epoch(epoch)
        inputs, targets = batches[t]
        optimizer.zero_grad()
        parts = fl.leaves(model, inputs, targets) if options.leaves else [(inputs, targets)]
        for x, y in parts:
            loss = criterion(model(fl.input(x)), fl.no_grad(y))
            loss.backward()
        optimizer.step()
        if (step + 1) % options.save_every == 0:
            fl.save(options.folder, module=model, optimizer=optimizer, rng=True, step=step + 1)
            say(f"Saved step {step + 1}")

    say(f"Done after step {options.epochs * len(batches)}")
    say(f"SHA-256 of the parameters: {digest(model)}")
    if options.result and fl.get_world_rank() == 0:
        arrays: dict[str, Any] = model.state_dict()
        np.savez(options.result, **arrays)


def my_batches(seed: int, whole_batches: bool) -> fl.ShardedDataset:
    """Make data that depend on the seed only.

    Item t is this rank's share of batch t, or the whole batch if ``whole_batches`` is True.
    """
    random = np.random.default_rng(seed)
    x = random.random((SAMPLES, FEATURES), dtype=np.float32)
    data = fl.dataset.TensorDataset([x, (x**3).sum(axis=1, keepdims=True)])
    rank, size = (0, 1) if whole_batches else (None, None)
    return fl.ShardedDataset(data, GLOBAL_BATCH, seed=seed, drop_last=True, rank=rank, size=size)


def digest(model: fl.nn.Module) -> str:
    """Return the SHA-256 of the parameters of ``model``."""
    sha = hashlib.sha256()
    for array in model.state_dict().values():
        sha.update(array.tobytes())
    return sha.hexdigest()


def say(line: str) -> None:
    """Print on rank 0 only."""
    if fl.is_main_process():
        print(line, flush=True)


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train, going on from the last checkpoint.")
    add = parser.add_argument
    add(
        "--folder",
        type=Path,
        required=True,
        help="folder of the checkpoints; created if it is missing",
    )
    add("--epochs", type=int, default=10)
    add("--save-every", type=int, default=10, metavar="STEPS")
    add("--seed", type=int, default=0)
    add("--leaves", type=int, default=0, help="the same bits on any number of ranks, such as 8")
    add("--result", type=Path, metavar="FILE.npz", help="write the trained parameters")
    options = parser.parse_args()
    if min(options.epochs, options.save_every) < 1 or min(options.seed, options.leaves) < 0:
        parser.error("--epochs and --save-every are from 1 on, --seed and --leaves from 0")
    if options.result and not options.result.absolute().parent.is_dir():
        parser.error(f"the folder of {options.result} does not exist")
    return options


if __name__ == "__main__":
    main(read_options())
