"""Train a small convolutional network on scikit-learn's digits: 98.5 % within a minute.

    python examples/digits_cnn.py --capture
    mpirun -n 2 python examples/digits_cnn.py
    flrun -n 4 examples/digits_cnn.py --folder run --leaves 8

With --folder the program saves checkpoints, and a second start continues from the last checkpoint.
With --leaves the parameters and their SHA-256 are the same on any number of ranks.
"""

import argparse
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

import flashlight_py as fl
from flashlight_py import nn

Batch = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]


def network(dropout: float = 0.3) -> nn.Sequential:
    """Return a network from images of 8 x 8 pixels to log probabilities of ten digits."""
    layers: list[nn.Module] = []
    for before, after in ((1, 32), (32, 64)):
        layers.append(nn.Conv2D(before, after, 3, padding=1, bias=False))
        layers += [nn.BatchNorm(after), nn.ReLU(), nn.Pool2D(2)]
    layers += [nn.View((-1, 64 * 2 * 2)), nn.Dropout(dropout), nn.Linear(64 * 2 * 2, 10)]
    return nn.Sequential(*layers, nn.LogSoftmax())


def main(options: argparse.Namespace) -> None:
    fl.distributed_init()
    fl.set_seed(options.seed)
    train, test = digits()
    if not fl.get_world_size() <= options.batch_size <= len(train[1]):
        bounds = f"{fl.get_world_size()}, the number of processes, to {len(train[1])} images"
        raise SystemExit(f"--batch-size: expected {bounds}, got {options.batch_size}")
    model = network()
    fl.broadcast_parameters(model)
    fl.distribute_module_grads(model, leaves=options.leaves or None)
    optimizer = fl.optim.AdamOptimizer(model.params(), 2e-3, weight_decay=0.01)
    schedule = fl.optim.CosineAnnealingLR(optimizer, options.steps)
    criterion = nn.CategoricalCrossEntropy(label_smoothing=0.1)

    def step(images: npt.NDArray[np.float32], labels: npt.NDArray[np.int64]) -> fl.Variable:
        optimizer.zero_grad()
        parts = fl.leaves(model, images, labels) if options.leaves else [(images, labels)]
        for x, y in parts:
            loss = criterion(model(fl.input(x)), fl.no_grad(y))
            loss.backward()
        optimizer.step()
        return loss

    run = fl.capture(step) if options.capture else step
    state: dict[str, Any] = {"module": model, "optimizer": optimizer, "schedule": schedule}
    checkpoint = fl.load(options.folder, rng=True, **state) if options.folder else None
    history: list[list[float]] = checkpoint.extra if checkpoint else []
    losses = []
    steps = range(checkpoint.step if checkpoint else 0, options.steps)
    for t in tqdm(steps, leave=False, disable=None if fl.is_main_process() else True):
        losses.append(run(*batch(train, t, options)).scalar())
        schedule.step()
        if (t + 1) % options.every == 0 or t + 1 == options.steps:
            loss, accuracy = validate(model, test)
            history.append([t + 1, float(np.mean(losses)), loss, accuracy])
            losses.clear()
            say(
                "step {:5.0f}  loss {:.4f}  validation {:.4f}  accuracy {:.2%}".format(*history[-1])
            )
            if options.folder:
                fl.save(options.folder, rng=True, step=t + 1, extra=history, **state)
    say("SHA-256 of the parameters: {}", digest(model))


def digits() -> tuple[Batch, Batch]:
    """Return images (n, 1, 8, 8) with labels: four fifths as training set, the rest as test set."""
    from sklearn.datasets import load_digits

    data: Any = load_digits()
    images = (data.images[:, None] / 8 - 1).astype(np.float32)
    labels = data.target.astype(np.int64)
    order = np.random.default_rng(0).permutation(len(labels))
    learn, held_out = np.split(order, [len(labels) * 4 // 5])
    return (images[learn], labels[learn]), (images[held_out], labels[held_out])


def batch(data: Batch, t: int, options: argparse.Namespace) -> Batch:
    """Return this rank's share of batch ``t``, shifted by at most one pixel."""
    random = np.random.default_rng([options.seed, t])
    chosen = random.choice(len(data[1]), options.batch_size, replace=False)
    images, labels = data[0][chosen], data[1][chosen]
    moves = random.integers(-1, 2, (len(images), 2))
    images = np.stack([np.roll(x, by, (1, 2)) for x, by in zip(images, moves, strict=True)])
    share = slice(None) if options.leaves else slice(fl.get_world_rank(), None, fl.get_world_size())
    return np.ascontiguousarray(images[share]), labels[share].copy()


def validate(model: nn.Module, data: Batch) -> tuple[float, float]:
    """Return the loss and the accuracy on held-out samples, which are divided between the ranks."""
    share = slice(fl.get_world_rank(), None, fl.get_world_size())
    images, labels = data[0][share], data[1][share]
    model.eval()
    logs = model(fl.input(images)).numpy()
    model.train()
    wrong = -logs[np.arange(len(labels)), labels].sum()
    sums = fl.all_reduce(np.array([wrong, (logs.argmax(1) == labels).sum()], np.float64))
    return float(sums[0]) / len(data[1]), float(sums[1]) / len(data[1])


def digest(model: nn.Module) -> str:
    """Return the SHA-256 of the parameters of ``model``."""
    arrays = model.state_dict().values()
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


def say(line: str, *values: Any) -> None:
    """Print on rank 0 only, above the progress bar."""
    if fl.is_main_process():
        tqdm.write(line.format(*values))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a convolutional network on digits.")
    add = parser.add_argument
    add("--steps", type=int, default=1_000)
    add("--batch-size", type=int, default=64, help="of all ranks together")
    add("--every", type=int, default=200, help="steps between validations, and checkpoints")
    add("--seed", type=int, default=0)
    add("--capture", action="store_true", help="record the step once and replay it natively")
    add("--leaves", type=int, default=0, help="the same bits on any number of ranks, such as 8")
    add("--folder", type=Path, help="folder of the checkpoints; created if it is missing")
    options = parser.parse_args()
    if min(options.steps, options.every) < 1 or min(options.seed, options.leaves) < 0:
        parser.error("--steps and --every are from 1 on, --seed and --leaves from 0")
    main(options)
