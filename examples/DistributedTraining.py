"""Train a small perceptron on any number of processes: flashlight's DistributedTraining.

Two processes that MPI starts, without and with a captured step; one process; two processes that
find each other through a shared file:

    mpirun -n 2 python examples/DistributedTraining.py            # 24 s on two cores
    mpirun -n 2 python examples/DistributedTraining.py --capture  # 2.5 s, the same losses
    python examples/DistributedTraining.py --capture
    python examples/DistributedTraining.py --init file --file /shared/run --world-size 2 --rank 0
    python examples/DistributedTraining.py --init file --file /shared/run --world-size 2 --rank 1
"""

import argparse
import importlib.util
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

import flashlight_py as fl

FEATURES = 10
LEARNING_RATE = 1e-4
MOMENTUM = 0.9


def main(options: argparse.Namespace) -> None:
    # Join the other processes. Every process runs this program and has its own rank.
    initialise(options)
    if options.device == "cuda":
        options.device = fl.distributed.use_local_device()  # a GPU for each process
    world_size = fl.get_world_size()
    if options.samples < world_size:
        raise SystemExit(
            f"--samples: expected at least {world_size}, one for each process, got "
            f"{options.samples}"
        )
    fl.set_seed(options.seed)

    # Each process trains on its share of the samples.
    batches = my_batches(options)

    model = fl.nn.Sequential()
    model.add(fl.nn.Linear(FEATURES, 100))
    model.add(fl.nn.ReLU())
    model.add(fl.nn.Linear(100, 1))
    model.to(options.device)
    criterion = fl.nn.MeanSquaredError()

    # All processes start from the parameters of rank 0. backward() computes the mean of the
    # gradients over all processes, so the parameters remain equal.
    fl.broadcast_parameters(model)
    fl.distribute_module_grads(model, scale=1 / world_size)

    optimizer = fl.optim.SGDOptimizer(model.params(), LEARNING_RATE, momentum=MOMENTUM)
    meter = fl.meter.AverageValueMeter()
    history = []

    def step(inputs: fl.Variable, targets: fl.Variable) -> None:
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        loss.backward()
        optimizer.step()
        meter.add(loss)

    if options.capture:  # native code replays the same step
        step = fl.capture(step)

    say("[Multi-layer Perceptron] Started...")
    start = time.perf_counter()
    for epoch in with_progress(range(1, options.epochs + 1)):
        meter.reset()
        for inputs, targets in batches:
            step(inputs, targets)

        mse = np.array(meter.value()[0])
        fl.all_reduce(mse, scale=1 / world_size)
        history.append(float(mse))
        say(f"Epoch: {epoch} Mean Squared Error: {mse:g}")
    say("[Multi-layer Perceptron] Done!")
    say(f"{options.epochs} epochs in {time.perf_counter() - start:.1f} s")

    if fl.get_world_rank() == 0 and options.save:
        save(model, options.save)
    if fl.get_world_rank() == 0 and options.plot:
        plot(history, options.plot)


def initialise(options: argparse.Namespace) -> None:
    """Join the world that ``--init`` describes. The default reads the environment variables."""
    if options.init == "file":
        params = {fl.DistributedConstants.FILE_PATH: str(options.file)}
        method = fl.DistributedInit.FILE_SYSTEM
        fl.distributed_init(method, options.rank, options.world_size, params)
    else:
        methods = {"mpi": fl.DistributedInit.MPI, "env": fl.DistributedInit.ENV, None: None}
        fl.distributed_init(methods[options.init])


def my_batches(options: argparse.Namespace) -> list[tuple[fl.Variable, fl.Variable]]:
    """Return this rank's batches of the data of the whole job, which depend on the seed only.

    Every rank gets the same number of batches, because each reduction needs all ranks.
    """
    random = np.random.default_rng(options.seed)
    x = 1 + random.random((options.samples, FEATURES), dtype=np.float32)  # elements in [1, 2)
    noise = np.sin(2 * np.pi * random.random((options.samples, 1), dtype=np.float32))
    y = (x**3).sum(axis=1, keepdims=True) + noise

    rank_samples = fl.dataset.partition_by_round_robin(
        options.samples, fl.get_world_rank(), fl.get_world_size(), options.batch_size
    )
    x, y = (fl.device.to_device(array[rank_samples], options.device) for array in (x, y))
    data = fl.dataset.BatchDataset(fl.dataset.TensorDataset([x, y]), options.batch_size)
    return [(fl.input(inputs), fl.no_grad(targets)) for inputs, targets in data]


def say(line: str) -> None:
    """Print on rank 0 only, above the progress bar if there is one."""
    if fl.get_world_rank() == 0:
        write = sys.modules["tqdm"].tqdm.write if "tqdm" in sys.modules else print
        write(line)
        sys.stdout.flush()


def with_progress(epochs: Iterable[int]) -> Iterable[int]:
    """Show a progress bar on rank 0 if its output is a terminal and tqdm is installed."""
    watched = fl.get_world_rank() == 0 and sys.stderr.isatty()
    if not watched or importlib.util.find_spec("tqdm") is None:
        return epochs
    from tqdm import tqdm

    bar: Iterable[int] = tqdm(epochs, unit="epoch", leave=False)
    return bar


def save(model: fl.nn.Module, file: Path) -> None:
    """Write every parameter under its name."""
    state = model.state_dict()
    arrays: dict[str, Any] = {n: fl.device.to_device(array, "cpu") for n, array in state.items()}
    np.savez(file, **arrays)


def plot(history: list[float], file: Path) -> None:
    """Draw the loss of each epoch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(history) + 1), history)
    axes.set(yscale="log", xlabel="epoch", ylabel="mean squared error")
    axes.set_title(f"Training loss, world size {fl.get_world_size()}")
    axes.grid(which="both", alpha=0.3)
    figure.savefig(file, dpi=150)


def read_options() -> argparse.Namespace:
    """Read the command line and reject options that would fail after the start."""
    parser = argparse.ArgumentParser(description="Train a perceptron on several processes.")
    add = parser.add_argument
    add("--epochs", type=positive, default=100)
    add("--samples", type=positive, default=10_000, help="of all processes together")
    add("--batch-size", type=positive, default=1, help="samples per process and step")
    add("--seed", type=int, default=0)
    add("--init", choices=["mpi", "file", "env"], help="default: environment variables")
    add("--rank", type=int, help="of this process, with --init file")
    add("--world-size", type=positive, help="number of processes, with --init file")
    add("--file", type=Path, help="a path that all processes see, with --init file")
    add("--capture", action="store_true", help="record the step once and replay it natively")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--plot", type=Path, metavar="FILE.png", help="draw the loss curve")
    add("--save", type=Path, metavar="FILE.npz", help="write the trained parameters")
    options = parser.parse_args()

    are_set = [value is not None for value in (options.rank, options.world_size, options.file)]
    if (options.init == "file") != any(are_set) or any(are_set) != all(are_set):
        parser.error("--init file, --rank, --world-size and --file go together")
    if any(are_set) and not 0 <= options.rank < options.world_size:
        parser.error(f"--rank: expected 0 to {options.world_size - 1}, got {options.rank}")
    if options.seed < 0:
        parser.error(f"--seed: expected a number from 0 on, got {options.seed}")
    if options.device == "cuda" and importlib.util.find_spec("cupy") is None:
        parser.error("--device cuda needs CuPy: pip install 'flashlight-py[cuda12]'")
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install 'flashlight-py[plot]'")
    for file in filter(None, (options.plot, options.save)):
        if not file.absolute().parent.is_dir():
            parser.error(f"the folder of {file} does not exist")
    return options


def positive(text: str) -> int:
    """Read an integer of at least 1."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected an integer of at least 1, got {text!r}")
    return int(text)


if __name__ == "__main__":
    main(read_options())
