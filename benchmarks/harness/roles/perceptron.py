"""The training step that every library has to do: the same start, the same batches.

Linear layers with ReLU between them, mean squared error or cross entropy, SGD with momentum or
Adam. A step is: take the next batch, drop the gradients, forward, loss, backward, update, read the
loss as a number. All ranks of a library train on the same batches, so that the mean of their
gradients is each one's own, and the losses are those of one process.
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
# Steps whose losses are compared, as many as take a moment: of large networks a few.
MOST_STEPS, FEWEST_STEPS, OPERATIONS = 200, 4, 2e10

Step = Callable[[], float]


@dataclass(frozen=True)
class Recipe:
    """What is trained: layers of ``widths``, on batches of so many samples.

    ``loss`` is "mse", or "cross entropy" of the log-softmax; ``rule`` is "sgd" or "adam". A step
    that does not train is a forward pass and the loss. ``leaves`` is into how many parts those cut
    a batch who go leaf by leaf. A step is made and first called ``starts`` times.
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
        """The number of the weights."""
        return sum(inputs * outputs for inputs, outputs in itertools.pairwise(self.widths))

    @property
    def operations(self) -> int:
        """The floating-point operations of a training step's products."""
        return 6 * self.batch * self.weights


def parameters(recipe: Recipe) -> list[NDArray[Any]]:
    """Return weight ``[outputs, inputs]`` and bias of each layer, uniform in +-1/sqrt(inputs)."""
    random = np.random.default_rng(0)
    found: list[NDArray[Any]] = []
    for inputs, outputs in itertools.pairwise(recipe.widths):
        bound = inputs**-0.5
        shapes = (outputs, inputs), (outputs,)
        found += [random.uniform(-bound, bound, shape).astype(recipe.dtype) for shape in shapes]
    return found


def batches(recipe: Recipe) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Return inputs and targets ``[batch, outputs]``, or the classes ``[batch]``.

    Each input comes with two targets: nothing can learn both, so that no gradient becomes 0, nor
    its running mean a number that is too small for the processor to multiply at full speed.
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
    """A library that trains; it reports its first losses, to be compared, and its first calls."""

    @abc.abstractmethod
    def step(self, recipe: Recipe, kind: str) -> Step:
        """Return the training step, in a form that this library has."""

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
