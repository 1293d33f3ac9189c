"""Training with a communication hook: bytes sent, time of a step, final loss."""

import argparse
import itertools
import runpy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

import flashlight_py as fl
from harness.role import Prepared, RankSetup
from harness.roles.flashlight import RankRole

EXAMPLE = Path(__file__).parents[3] / "examples" / "DistributedTraining.py"
LR, MOMENTUM = 1e-6, 0.9  # learning rate and momentum of the large perceptron

Hook = Callable[..., Any]


class Compression(RankRole):
    """Problems: "large", a perceptron whose step is timed, and "example", which is trained."""

    def __init__(self, setup: RankSetup) -> None:
        super().__init__(setup)
        self._examples: dict[str, Example] = {}

    def prepare(self, task: Mapping[str, Any]) -> Prepared:
        hook = hook_of(task["hook"])
        if task["problem"] == "large":
            model, step = large(task["widths"], task["batch"], hook)
            step()
            return Prepared(step, {"bytes": bytes_per_step(model, hook)})
        # Each call trains one more epoch of the same example.
        key = f"{task['hook']} {task['momentum']}"
        if key not in self._examples:
            self._examples[key] = Example(task["samples"], task["momentum"], hook)
        training = self._examples[key]
        loss = training.epoch()
        detail = {"bytes": bytes_per_step(training.model, training.hook), "loss": loss}
        return Prepared(training.forward, detail)


def hook_of(description: list[Any] | None) -> Hook | None:
    """Return the hook with this name and these arguments."""
    if description is None:
        return None
    name, arguments = description
    hook: Hook = getattr(fl, name)(**arguments)
    return hook


def bytes_per_step(model: fl.nn.Module, hook: Hook | None) -> int:
    """Return the bytes that a rank passed to collectives in the last step."""
    if isinstance(hook, fl.distributed.Compression):
        return hook.bytes_per_step
    return sum(param.array.nbytes for param in model.params())


def large(
    widths: list[int], batch: int, hook: Hook | None
) -> tuple[fl.nn.Module, Callable[[], float]]:
    """Return a perceptron and its step; each rank has its own batch."""
    fl.set_seed(0)
    model = fl.nn.Sequential()
    for inputs, outputs in itertools.pairwise(widths):
        model.add(fl.nn.Linear(inputs, outputs))
        model.add(fl.nn.ReLU())
    fl.distribute_module_grads(model, hook=hook)
    random = np.random.default_rng(fl.get_world_rank())
    x = fl.input(random.random((batch, widths[0]), "float32"))
    target = fl.no_grad(random.random((batch, widths[-1]), "float32"))
    optimizer = fl.optim.SGDOptimizer(model.params(), LR, MOMENTUM)
    return model, lambda: train([(x, target)], model, optimizer)


class Example:
    """The example's model, data, learning rate, and batches of one sample."""

    def __init__(self, samples: int, momentum: float, hook: Hook | None) -> None:
        self.hook = hook
        program = runpy.run_path(str(EXAMPLE))
        options = argparse.Namespace(samples=samples, batch_size=1, seed=0, device="cpu")
        self._batches = program["my_batches"](options)
        fl.set_seed(0)
        features = program["FEATURES"]
        self.model = fl.nn.Sequential(
            fl.nn.Linear(features, 100), fl.nn.ReLU(), fl.nn.Linear(100, 1)
        )
        fl.broadcast_parameters(self.model)
        fl.distribute_module_grads(self.model, hook=hook)
        rate = program["LEARNING_RATE"]
        self._optimizer = fl.optim.SGDOptimizer(self.model.params(), rate, momentum)

    def epoch(self) -> float:
        """Train on all samples; return the mean loss over the ranks."""
        loss = np.array(train(self._batches, self.model, self._optimizer))
        return float(fl.all_reduce(loss, op="avg"))

    def forward(self) -> None:
        """Compute one sample's prediction, a call that does not change the model."""
        self.model(self._batches[0][0])


def train(
    batches: list[tuple[fl.Variable, fl.Variable]],
    model: fl.nn.Module,
    optimizer: fl.optim.SGDOptimizer,
) -> float:
    """Take a step with each batch; return the mean loss."""
    criterion = fl.nn.MeanSquaredError()
    losses: list[float] = []
    for x, target in batches:
        optimizer.zero_grad()
        loss = criterion(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.scalar())
    return sum(losses) / len(losses)


def join(setup: RankSetup) -> Compression:
    """Connect to the other ranks."""
    return Compression(setup)
