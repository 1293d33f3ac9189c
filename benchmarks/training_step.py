"""One training step of the example: hand-written NumPy, flashlight_py, torch where installed.

    python benchmarks/training_step.py --steps 2000 --rounds 15 --json step.json

Linear(10, 100) - ReLU - Linear(100, 1), mean squared error, SGD with momentum, batch 1, float32.
A step is: drop the gradients, forward, loss, backward, update, read the loss as a number. All
start from the same parameters; after the first steps their losses are compared, so that nobody
wins by computing something else. The rounds of all contenders alternate, so that whatever else
the machine does slows them alike; the median of the rounds counts. One thread each.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before the libraries read it

import numpy as np
from numpy.typing import NDArray

from flashlight_py import _version
from flashlight_py.autograd import input
from flashlight_py.nn import Linear, MeanSquaredError, ReLU, Sequential
from flashlight_py.optim import SGDOptimizer
from flashlight_py.random import set_seed

LR, MOMENTUM = 1e-4, 0.9
WARM_UP = 200

Floats = NDArray[np.float32]
Step = Callable[[], float]


def initial_parameters() -> list[Floats]:
    """Weight and bias of both layers, as Linear initialises them."""
    set_seed(0)
    model = Sequential(Linear(10, 100), Linear(100, 1))
    return [variable.array.copy() for variable in model.params()]


def sample() -> tuple[Floats, Floats]:
    """One sample ``[1, 10]`` and its target ``[1, 1]``."""
    x = np.random.default_rng(0).random((1, 10), "float32")
    return x, (x**3).sum(axis=1, keepdims=True)


def numpy_step() -> Step:
    """What one writes by hand: only the needed gradients, momentum updated in place."""
    params = w1, b1, w2, b2 = initial_parameters()
    velocities = [np.zeros_like(p) for p in params]
    x, target = sample()

    def step() -> float:
        hidden = x @ w1.T + b1
        active = np.maximum(hidden, 0)
        error = active @ w2.T + b2 - target
        loss = np.vdot(error, error) / error.size  # a fifth of the time of np.mean
        grad_out = error * (2 / error.size)
        grad_hidden = (grad_out @ w2) * (hidden > 0)
        grads = (grad_hidden.T @ x, grad_hidden.sum(0), grad_out.T @ active, grad_out.sum(0))
        for param, velocity, grad in zip(params, velocities, grads, strict=True):
            np.multiply(velocity, MOMENTUM, out=velocity)
            np.add(velocity, grad, out=velocity)
            np.subtract(param, LR * velocity, out=param)
        return float(loss)

    return step


def flashlight_step() -> Step:
    """The same with this package, as a user writes it."""
    model, loss = Sequential(Linear(10, 100), ReLU(), Linear(100, 1)), MeanSquaredError()
    for variable, array in zip(model.params(), initial_parameters(), strict=True):
        variable.array = array
    optimizer = SGDOptimizer(model.params(), LR, MOMENTUM)
    x, target = sample()

    def step() -> float:
        optimizer.zero_grad()
        error = loss(model(input(x)), input(target))
        error.backward()
        optimizer.step()
        return error.scalar()  # type: ignore[no-any-return]

    return step


def torch_step() -> Step:
    """The same with torch, eager."""
    import torch

    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(10, 100), torch.nn.ReLU(), torch.nn.Linear(100, 1))
    with torch.no_grad():
        for tensor, array in zip(model.parameters(), initial_parameters(), strict=True):
            tensor.copy_(torch.from_numpy(array))
    loss = torch.nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), LR, MOMENTUM)
    x, target = map(torch.from_numpy, sample())

    def step() -> float:
        optimizer.zero_grad()
        error = loss(model(x), target)
        error.backward()
        optimizer.step()
        return float(error.item())

    return step


def contenders() -> dict[str, Step]:
    """Every contender that this environment has, the reference first."""
    steps = {"hand-written NumPy": numpy_step(), "flashlight_py": flashlight_step()}
    if importlib.util.find_spec("torch"):
        steps["torch, eager"] = torch_step()
    return steps


def check_that_all_compute_the_same(steps: dict[str, Step]) -> None:
    """Run the first steps of all; their losses must agree.

    Raises:
        RuntimeError: a contender's losses differ from the reference's.
    """
    losses = {name: [step() for _ in range(WARM_UP)] for name, step in steps.items()}
    reference = next(iter(losses.values()))
    for name, values in losses.items():
        if not np.allclose(values, reference, rtol=1e-3, atol=1e-6):
            raise RuntimeError(f"{name} computes other losses than hand-written NumPy")


def seconds_per_step(step: Step, steps: int) -> float:
    """Return the mean wall time of one step, in seconds."""
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - start) / steps


def measure(steps: dict[str, Step], count: int, rounds: int) -> dict[str, list[float]]:
    """Return each contender's microseconds per step in every round."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(1e6 * seconds_per_step(step, count))
    return times


def machine() -> dict[str, str]:
    """What a reader needs to know to compare these numbers with others."""
    facts = {
        "CPU": cpu_model(),
        "cores": str(len(os.sched_getaffinity(0))),
        "Python": platform.python_version(),
        "NumPy": np.__version__,
        "flashlight_py": _version.__version__,
    }
    if importlib.util.find_spec("torch"):
        import torch

        facts["torch"] = torch.__version__
    return facts


def cpu_model() -> str:
    """Return the processor's name as Linux tells it, else what Python knows."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def table(times: dict[str, list[float]]) -> str:
    """Return the medians and their ratios to the first contender as a Markdown table."""
    medians = {name: statistics.median(values) for name, values in times.items()}
    reference = next(iter(medians.values()))
    lines = ["| one step, batch 1 | median | fastest round | ratio |", "|---|---:|---:|---:|"]
    lines += [
        f"| {name} | {median:.1f} us | {min(times[name]):.1f} us | {median / reference:.2f} |"
        for name, median in medians.items()
    ]
    return "\n".join(lines)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time one training step of the example.")
    parser.add_argument("--steps", type=int, default=2000, help="steps in a round")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of every contender")
    parser.add_argument("--json", type=Path, help="also write all rounds to this file")
    return parser.parse_args()


def main() -> None:
    """Measure, print the table, write the file."""
    options = arguments()
    steps = contenders()
    check_that_all_compute_the_same(steps)
    times = measure(steps, options.steps, options.rounds)
    facts = machine()
    print(table(times))
    print("\n" + ", ".join(f"{name} {value}" for name, value in facts.items()))
    if options.json:
        result: dict[str, Any] = {"machine": facts, "microseconds_per_step": times}
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
