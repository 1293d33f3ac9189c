"""The example's training step, as every library has to do it: the same start, the same sample.

Linear(10, 100) - ReLU - Linear(100, 1), mean squared error, SGD with momentum, batch 1, float32.
A step is: drop the gradients, forward, loss, backward, update, read the loss as a number. All ranks
of a library train on the same sample, so that the mean of their gradients is each one's own, and
the losses are those of one process.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.role import Prepared, Role

__all__ = ["LR", "MOMENTUM", "SHAPES", "Floats", "Step", "StepRole", "parameters", "sample"]

LR, MOMENTUM = 1e-4, 0.9
SHAPES = ((100, 10), (100,), (1, 100), (1,))
FIRST_STEPS = 200

Floats = NDArray[np.float32]
Step = Callable[[], float]


def parameters() -> list[Floats]:
    """Return weight and bias of both layers, uniform in +-1/sqrt(inputs)."""
    random = np.random.default_rng(0)
    bounds = [10**-0.5, 10**-0.5, 100**-0.5, 100**-0.5]
    return [
        random.uniform(-bound, bound, shape).astype("float32")
        for bound, shape in zip(bounds, SHAPES, strict=True)
    ]


def sample() -> tuple[Floats, Floats]:
    """Return one sample ``[1, 10]`` and its target ``[1, 1]``."""
    x = np.random.default_rng(1).random((1, 10), "float32")
    return x, (x**3).sum(axis=1, keepdims=True)


class StepRole(Role):
    """A library that trains; it reports its first losses to the conductor, to be compared."""

    @abc.abstractmethod
    def step(self, kind: str) -> Step:
        """Return the training step, in its plain or its distributed form."""

    def prepare(self, task: Mapping[str, Any]) -> Prepared:
        step = self.step(task["kind"])
        return Prepared(step, [step() for _ in range(FIRST_STEPS)])
