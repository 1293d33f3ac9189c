"""Train a ResNet-18 on CIFAR-10, or on scikit-learn's digits if CIFAR-10 is missing.

    mpirun -n 2 python examples/cifar_resnet.py --data cifar-10-batches-bin
    flrun -n 2 examples/cifar_resnet.py --width 16 --steps 300 --folder run --leaves 8

--data names a folder with CIFAR-10's binary files. With --folder the program saves checkpoints and
continues from the last checkpoint. With --leaves the parameters have the same bits on any number of
ranks.
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


def convolution(before: int, after: int, size: int, stride: int) -> list[nn.Module]:
    return [nn.Conv2D(before, after, size, stride, size // 2, bias=False), nn.BatchNorm(after)]


def block(before: int, after: int, stride: int) -> nn.Module:
    """Two convolutions and a shortcut (He et al., CVPR 2016)."""
    inner = [*convolution(before, after, 3, stride), nn.ReLU(), *convolution(after, after, 3, 1)]
    shortcut = nn.Sequential(convolution(before, after, 1, stride)) if before != after else None
    return nn.Sequential(nn.Residual(nn.Sequential(inner), shortcut), nn.ReLU())


def resnet18(width: int = 64, classes: int = 10) -> nn.Sequential:
    """Return a network from images (n, 3, 32, 32) to log probabilities of the classes."""
    layers = [*convolution(3, width, 3, 1), nn.ReLU()]
    for before, after in ((1, 1), (1, 2), (2, 4), (4, 8)):
        layers.append(block(before * width, after * width, after // before))
        layers.append(block(after * width, after * width, 1))
    layers += [nn.Pool2D(4, mode="average"), nn.View((-1, 8 * width))]
    return nn.Sequential(*layers, nn.Linear(8 * width, classes), nn.LogSoftmax())


def main(options: argparse.Namespace) -> None:
    fl.distributed_init()
    fl.set_seed(options.seed)
    train, test = cifar(options.data) if options.data else digits()
    if not fl.get_world_size() <= options.batch_size <= len(train[1]):
        bounds = f"{fl.get_world_size()}, the number of processes, to {len(train[1])} images"
        raise SystemExit(f"--batch-size: expected {bounds}, got {options.batch_size}")
    fl.broadcast_parameters(model := resnet18(options.width))
    fl.distribute_module_grads(model, leaves=options.leaves or None)
    optimizer = fl.optim.SGDOptimizer(model.params(), 0.1, 0.9, weight_decay=5e-4, nesterov=True)
    schedule = fl.optim.OneCycleLR(optimizer, 0.1, options.steps)
    criterion = nn.CategoricalCrossEntropy()

    def step(images: npt.NDArray[np.float32], labels: npt.NDArray[np.int64]) -> fl.Variable:
        optimizer.zero_grad()
        for x, y in fl.leaves(model, images, labels) if options.leaves else [(images, labels)]:
            loss = criterion(model(fl.input(x)), fl.no_grad(y))
            loss.backward()
        optimizer.step()
        return loss

    run = fl.capture(step) if options.capture else step
    state: dict[str, Any] = {"module": model, "optimizer": optimizer, "schedule": schedule}
    checkpoint = fl.load(options.folder, rng=True, **state) if options.folder else None
    history: list[list[float]] = checkpoint.extra if checkpoint else []
    share = slice(None) if options.leaves else slice(fl.get_world_rank(), None, fl.get_world_size())
    losses = []
    steps = range(checkpoint.step if checkpoint else 0, options.steps)
    for t in tqdm(steps, leave=False, disable=None if fl.is_main_process() else True):
        images, labels = batch(train, [options.seed, t], options.batch_size)
        losses.append(run(images[share], labels[share]).scalar())
        schedule.step()
        if (t + 1) % options.every == 0 or t + 1 == options.steps:
            history.append([t + 1, float(np.mean(losses)), *validate(model, test)])
            losses.clear()
            say("step {:5.0f}  loss {:.4f}  validation {:.4f}  accuracy {:.2%}", *history[-1])
            if options.folder:
                fl.save(options.folder, rng=True, step=t + 1, extra=history, **state)
    arrays = b"".join(array.tobytes() for array in model.state_dict().values())
    say("SHA-256 of the parameters: {}", hashlib.sha256(arrays).hexdigest())


def batch(data: Batch, seed: list[int], size: int) -> Batch:
    """Return samples that the seed determines, with images shifted by at most 4 pixels."""
    random = np.random.default_rng(seed)
    chosen = random.choice(len(data[1]), size, replace=False)
    images = np.pad(data[0][chosen], ((0, 0), (0, 0), (4, 4), (4, 4)))
    corners = random.integers(0, 9, (size, 2))
    moved = [x[:, i : i + 32, j : j + 32] for x, (i, j) in zip(images, corners, strict=True)]
    return np.stack(moved), data[1][chosen]


def validate(model: nn.Module, data: Batch) -> tuple[float, float]:
    """Return the loss and the accuracy on held-out samples, which are divided between the ranks."""
    sums = np.zeros(2)
    model.eval()
    for first in range(100 * fl.get_world_rank(), len(data[1]), 100 * fl.get_world_size()):
        images, labels = data[0][first : first + 100], data[1][first : first + 100]
        logs = model(fl.input(images)).numpy()
        sums -= logs[np.arange(len(labels)), labels].sum(), -(logs.argmax(1) == labels).sum()
    model.train()
    fl.all_reduce(sums, scale=1 / len(data[1]))
    return float(sums[0]), float(sums[1])


def cifar(folder: Path) -> tuple[Batch, Batch]:
    """Return CIFAR-10's images (n, 3, 32, 32) of mean 0 and deviation 1: training set, test set."""

    def read(*names: str) -> Batch:
        records = np.concatenate([np.fromfile(folder / name, np.uint8) for name in names])
        records = records.reshape(-1, 3073)
        pixels = records[:, 1:].reshape(-1, 3, 32, 32).astype(np.float32)
        return (pixels - 120.7) / np.float32(63.9), records[:, 0].astype(np.int64)

    return read(*(f"data_batch_{n}.bin" for n in range(1, 6))), read("test_batch.bin")


def digits() -> tuple[Batch, Batch]:
    """Return scikit-learn's digits with each pixel as 4 x 4 pixels in three colours: training set,
    test set."""
    from sklearn.datasets import load_digits

    data: Any = load_digits()
    images = ((data.images[:, None] - 4.9) / 6).astype(np.float32).repeat(3, 1)
    images, labels = images.repeat(4, 2).repeat(4, 3), data.target.astype(np.int64)
    return (images[:1437], labels[:1437]), (images[1437:], labels[1437:])


def say(line: str, *values: Any) -> None:
    """Print on rank 0 only, above the progress bar."""
    if fl.is_main_process():
        tqdm.write(line.format(*values))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a ResNet-18.")
    add = parser.add_argument
    add("--data", type=Path, metavar="FOLDER", help="of CIFAR-10's binary files; else digits")
    add("--width", type=int, default=64, help="channels of the first layers")
    add("--steps", type=int, default=2_000)
    add("--batch-size", type=int, default=32, help="of all ranks together")
    add("--every", type=int, default=100, help="steps between validations, and checkpoints")
    add("--seed", type=int, default=0)
    add("--capture", action="store_true", help="record the step once and replay it natively")
    add("--leaves", type=int, default=0, help="the same bits on any number of ranks, such as 8")
    add("--folder", type=Path, help="folder of the checkpoints; created if it is missing")
    options = parser.parse_args()
    if options.steps < 4 or min(options.width, options.every) < 1:  # OneCycleLR has two phases
        parser.error("--steps is from 4 on, --width and --every from 1")
    if min(options.seed, options.leaves) < 0:
        parser.error("--seed and --leaves are from 0 on")
    if options.data and not (options.data / "test_batch.bin").is_file():
        parser.error(f"--data: {options.data} has no test_batch.bin of CIFAR-10")
    main(options)
