"""Train, be killed at any moment, start again, and end with the same parameters, bit for bit.

    mpirun -n 2 python examples/ResumableTraining.py --folder run

Run it again after an interruption: it goes on from the last checkpoint in the folder. What is
saved is all that the next step depends on: the parameters, the optimizer's state, each rank's
random numbers (dropout draws from them) and the number of the step, which determines the batch.

    flrun -n 4 --max-restarts 20 examples/ResumableTraining.py --folder run --leaves 8

With ``--leaves`` that holds for any number of ranks, also for other ones after an interruption:
every batch is cut into so many parts, which any rank may compute, and whose gradients are added up
in an order of their own. The SHA-256 of the parameters is printed at the end.
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
    # Dropout is to differ between ranks; the parameters are those of rank 0.
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
    batches = my_batches(options.seed, whole=options.leaves > 0)

    # All ranks go on from the same checkpoint; there is none when the run begins.
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


def my_batches(seed: int, whole: bool) -> fl.ShardedDataset:
    """Make data that depend on the seed alone; item t is this rank's part of batch t, or all."""
    random = np.random.default_rng(seed)
    x = random.random((SAMPLES, FEATURES), dtype=np.float32)
    data = fl.dataset.TensorDataset([x, (x**3).sum(axis=1, keepdims=True)])
    rank, size = (0, 1) if whole else (None, None)
    return fl.ShardedDataset(data, GLOBAL_BATCH, seed=seed, drop_last=True, rank=rank, size=size)


def digest(model: fl.nn.Module) -> str:
    """Return what two models with the same parameters have in common, and no others."""
    found = hashlib.sha256()
    for array in model.state_dict().values():
        found.update(array.tobytes())
    return found.hexdigest()


def say(line: str) -> None:
    """Print on rank 0 only."""
    if fl.is_main_process():
        print(line, flush=True)


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train, going on from the last checkpoint.")
    add = parser.add_argument
    add("--folder", type=Path, required=True, help="of the checkpoints; made if there is none")
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
