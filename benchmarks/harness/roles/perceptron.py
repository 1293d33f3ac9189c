"""The training step of every library: common initial parameters, common batches.

Linear layers with ReLU between them, mean squared error or cross entropy, SGD with momentum or
Adam. A step takes
the next batch, clears the gradients, computes forward pass, loss, backward pass and update, and
reads the loss as a
number. All ranks of a library train on the same batches, so the mean of their gradients equals the
gradient of one
rank, and the losses equal the losses of one process.
"""

import abc
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.role import Prepared, Role

__all__ = ["BETAS", "EPS", "LR", "MOMENTUM", "Recipe", "Step", "StepRole", "batches", "parameters"]

LR, MOMENTUM = 1e-7, 0.9
BETAS, EPS = (0.9, 0.999), 1e-8
INPUTS = 4
# Number of steps whose losses are compared: about one second of work, few steps of large networks.
MOST_STEPS, FEWEST_STEPS, OPERATIONS = 200, 4, 2e10

Step = Callable[[], float]


@dataclass(frozen=True)
class Recipe:
    """A network with layers of ``widths``, and the number of samples of a batch.

    ``loss`` is "mse", or "cross entropy" of the log-softmax; ``rule`` is "sgd" or "adam". A step
    that does not train is
    a forward pass and the loss. ``leaves`` is the number of leaves of a batch for kinds with
    leaves. A step is made and
    first called ``starts`` times.
    """

    widths: tuple[int, ...]
    batch: int = 1
    dtype: str = "float32"
    loss: str = "mse"
    rule: str = "sgd"
    trains: bool = True
    leaves: int = 8
    starts: int = 1

    @property
    def weights(self) -> int:
        """Number of weights."""
        return sum(inputs * outputs for inputs, outputs in itertools.pairwise(self.widths))

    @property
    def operations(self) -> int:
        """Number of floating-point operations of a training step's matrix products."""
        return 6 * self.batch * self.weights


def parameters(recipe: Recipe) -> list[NDArray[Any]]:
    """Return weight ``[outputs, inputs]`` and bias of each layer, uniform in +-1/sqrt(inputs)."""
    random = np.random.default_rng(0)
    arrays: list[NDArray[Any]] = []
    for inputs, outputs in itertools.pairwise(recipe.widths):
        bound = inputs**-0.5
        shapes = (outputs, inputs), (outputs,)
        arrays += [random.uniform(-bound, bound, shape).astype(recipe.dtype) for shape in shapes]
    return arrays


def batches(recipe: Recipe) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Return inputs and targets ``[batch, outputs]``, or the classes ``[batch]``.

    Each input occurs with two targets, which no network can learn. So no gradient becomes 0, and no
    moment becomes
    denormal, which would slow the processor.
    """
    random = np.random.default_rng(1)
    inputs, outputs = recipe.widths[0], recipe.widths[-1]
    xs = [random.random((recipe.batch, inputs)).astype(recipe.dtype) for _ in range(INPUTS)]

    def target() -> NDArray[Any]:
        if recipe.loss == "mse":
            return (2 * random.random((recipe.batch, outputs))).astype(recipe.dtype)
        return random.integers(outputs, size=recipe.batch)

    return [(x, target()) for x in xs + xs]


class StepRole(Role):
    """A library that trains; it reports its first losses for the comparison, and its first
    calls."""

    @abc.abstractmethod
    def step(self, recipe: Recipe, kind: str) -> Step:
        """Return the training step in a form of this library."""

    def prepare(self, task: Mapping[str, Any]) -> Prepared:
        recipe = Recipe(**task["recipe"])
        calls = []
        for _ in range(recipe.starts):
            step = self.step(recipe, task["kind"])
            first = [_timed(step) for _ in range(FEWEST_STEPS)]
            calls.append([seconds for _, seconds in first])
        count = min(MOST_STEPS, int(OPERATIONS / recipe.operations))
        losses = [loss for loss, _ in first] + [step() for _ in range(count - FEWEST_STEPS)]
        return Prepared(step, {"losses": losses, "calls": calls})


def _timed(step: Step) -> tuple[float, float]:
    start = time.perf_counter()
    loss = step()
    return loss, time.perf_counter() - start
