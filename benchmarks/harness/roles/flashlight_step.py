"""The step with this package, as a user and as the example write it."""

from __future__ import annotations

import flashlight_py as fl
from harness.role import Place
from harness.roles.flashlight import RankRole
from harness.roles.perceptron import LR, MOMENTUM, Step, StepRole, parameters, sample


class Flashlight(RankRole, StepRole):
    """Distributed: gradients are reduced in every backward pass, also if there is one rank."""

    def step(self, kind: str) -> Step:
        model = fl.nn.Sequential(fl.nn.Linear(10, 100), fl.nn.ReLU(), fl.nn.Linear(100, 1))
        loss = fl.nn.MeanSquaredError()
        for variable, array in zip(model.params(), parameters(), strict=True):
            variable.array = array
        if kind == "distributed":
            fl.broadcast_parameters(model)
            fl.distribute_module_grads(model)
        optimizer = fl.optim.SGDOptimizer(model.params(), LR, MOMENTUM)
        x, target = sample()

        def step() -> float:
            optimizer.zero_grad()
            error = loss(model(fl.input(x)), fl.input(target))
            error.backward()
            optimizer.step()
            return error.scalar()

        return step


def join(place: Place) -> Flashlight:
    """Meet the other ranks."""
    return Flashlight(place)
