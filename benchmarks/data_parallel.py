"""A training step with fl.DataParallel, next to one process and to the ranks of fl.spawn.

    python benchmarks/data_parallel.py --json data_parallel.json

Each step is a forward and a backward pass of one batch through four linear layers with ReLU, and
SGD with momentum. "one process" uses one BLAS thread per core. The other rows use one process with
one thread per core: fl.DataParallel receives the whole batch from this process, and the ranks of
fl.spawn have their shares and call distribute_module_grads. The contenders take turns; their start
is not timed. torch.nn.DataParallel is for GPUs only and is not a peer.
"""

import argparse
import statistics
import time
from pathlib import Path

import numpy as np

import flashlight_py as fl
from flashlight_py.cores import usable_cores
from harness.facts import machine_facts
from harness.report import conclude, ratio_table, time_table
from harness.statistics import Measurement
from harness.verdicts import at_most

ONE, WRAPPED, SPAWNED = "one process", "fl.DataParallel", "fl.spawn, gradients reduced"
LAYERS = 4
WARM_UP = 3
FAR = 1.25  # times the step of ranks that have their data already


def main() -> None:
    """Measure, print, write."""
    options = read_options()
    results = [measure(width, options) for width in options.widths]
    widest = max(results, key=lambda result: result.nbytes)
    against = {label(widest): widest.ratios(WRAPPED, SPAWNED)}
    verdicts = [at_most("the widest network, against fl.spawn", FAR, against)]
    print(f"{time_table(results, 'width', label)}\n")
    print(f"Time divided by the time of {ONE}:\n\n{ratio_table(results, 'width', label, ONE)}\n")
    conclude(options, None, results, verdicts)


def measure(width: int, options: argparse.Namespace) -> Measurement:
    """Return the seconds of a step of every round."""
    nbytes = 4 * LAYERS * width * (width + 1)
    result = Measurement("step", "float32", nbytes, options.nprocs)
    for _ in range(options.rounds):
        arguments = width, options.rows, options.steps
        wrapped = fl.DataParallel(network(width), options.nprocs)
        of_ranks = fl.spawn(seconds_of_rank, arguments, options.nprocs)
        for title, seconds in (
            (ONE, seconds_of_steps(network(width), *arguments)),
            (WRAPPED, seconds_of_steps(wrapped, *arguments)),
            (SPAWNED, max(of_ranks)),
        ):
            result.seconds.setdefault(title, []).append(seconds)
        wrapped.close()
    return result


def seconds_of_rank(rank: int, width: int, rows: int, steps: int) -> float:
    """Return the seconds of a step of ``rank`` on its share of the rows."""
    model = network(width)
    fl.broadcast_parameters(model)
    fl.distribute_module_grads(model)
    return seconds_of_steps(model, width, rows // fl.get_world_size(), steps)


def seconds_of_steps(model: fl.nn.Module, width: int, rows: int, steps: int) -> float:
    """Return the median seconds of ``steps`` steps, after some steps to warm up."""
    criterion = fl.nn.MeanSquaredError()
    optimizer = fl.optim.SGDOptimizer(model.params(), 1e-4, momentum=0.9)
    x = np.random.default_rng(0).standard_normal((rows, width)).astype(np.float32)
    times = []
    for _ in range(WARM_UP + steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        criterion(model(fl.input(x)), fl.no_grad(x)).backward()
        optimizer.step()
        times.append(time.perf_counter() - start)
    return statistics.median(times[WARM_UP:])


def network(width: int) -> fl.nn.Module:
    """Return linear layers of this width with ReLU between them."""
    layers: list[fl.nn.Module] = []
    for _ in range(LAYERS):
        layers += [fl.nn.Linear(width, width), fl.nn.ReLU()]
    return fl.nn.Sequential(layers[:-1])


def label(measurement: Measurement) -> str:
    """Return the label of a row."""
    return str(int((measurement.nbytes / 4 / LAYERS) ** 0.5))


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.set_defaults(machine=machine_facts())
    add = parser.add_argument
    add("--widths", type=int, nargs="+", help="of the layers, default 64, 512 and 2048")
    add("--rows", type=int, default=512, help="of a batch, default 512")
    add("--nprocs", type=int, default=usable_cores(), help="default one for each core")
    add("--rounds", type=int, help="default 5")
    add("--steps", type=int, help="in each round, default 10")
    add("--quick", action="store_true", help="small, and few rounds: to see that it works")
    add("--json", type=Path, metavar="FILE", help="also write everything measured to this file")
    options = parser.parse_args()
    options.widths = options.widths or ([16, 32] if options.quick else [64, 512, 2048])
    options.rounds = options.rounds or (2 if options.quick else 5)
    options.steps = options.steps or (2 if options.quick else 10)
    return options


if __name__ == "__main__":
    main()
