"""A step of a large perceptron with this package, with and without communication."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import flashlight_py as fl
from harness.role import Call, Place, Prepared, Role
from harness.roles import flashlight

LR, MOMENTUM = 1e-6, 0.9


class Mlp(Role):
    """Kinds of steps: "alone", "overlap", and "after", which reduces when backward has returned."""

    def __init__(self, place: Place) -> None:
        flashlight.initialise(place)
        self.rank, self.size = fl.get_world_rank(), fl.get_world_size()

    def facts(self) -> dict[str, str]:
        return {**flashlight.facts(), "NumPy": np.__version__}

    def barrier(self) -> None:
        fl.barrier()

    def leave(self) -> None:
        fl.distributed_shutdown()

    def prepare(self, task: Mapping[str, Any]) -> Prepared:
        widths, batch, kind = task["widths"], task["batch"], task["kind"]
        fl.set_seed(0)
        model = fl.nn.Sequential()
        for inputs, outputs in itertools.pairwise(widths):
            model.add(fl.nn.Linear(inputs, outputs))
            model.add(fl.nn.ReLU())
        if kind == "overlap":
            fl.distribute_module_grads(model)
        reduce = self._reduce_afterwards(model) if kind == "after" else None
        return Prepared(_step(model, reduce, batch, widths))

    def _reduce_afterwards(self, model: fl.nn.Module) -> Callable[[], None]:
        return lambda: fl.all_reduce_gradients(model, 1 / self.size)


def _step(
    model: fl.nn.Module, reduce: Callable[[], None] | None, batch: int, widths: list[int]
) -> Call:
    random = np.random.default_rng(fl.get_world_rank())
    x = random.random((batch, widths[0]), "float32")
    target = random.random((batch, widths[-1]), "float32")
    optimizer = fl.optim.SGDOptimizer(model.params(), LR, MOMENTUM)
    loss = fl.nn.MeanSquaredError()

    def step() -> float:
        optimizer.zero_grad()
        error = loss(model(fl.input(x)), fl.input(target))
        error.backward()
        if reduce is not None:
            reduce()
        optimizer.step()
        return error.scalar()

    return step


def join(place: Place) -> Mlp:
    """Meet the other ranks."""
    return Mlp(place)
