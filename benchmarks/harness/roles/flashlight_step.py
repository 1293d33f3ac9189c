"""The step with this package, captured or eager, written as in the example."""

import itertools
from typing import Any

import flashlight_py as fl
from harness.role import RankSetup
from harness.roles.flashlight import RankRole
from harness.roles.perceptron import LR, MOMENTUM, Recipe, Step, StepRole, batches, parameters


class Flashlight(RankRole, StepRole):
    """Kinds are words: "eager" or "captured", then "distributed", "leaves" or no further word.

    "distributed" reduces gradients in every backward pass, also on one rank.
    """

    def step(self, recipe: Recipe, kind: str) -> Step:
        model, optimizer = _model(recipe), None
        if "distributed" in kind:
            fl.broadcast_parameters(model)
            fl.distribute_module_grads(model)
        if "leaves" in kind:
            fl.distribute_module_grads(model, leaves=recipe.leaves)
        if recipe.trains:
            optimizer = _optimizer(recipe, model)
        body: Any = _leaf_by_leaf if "leaves" in kind else _training_step
        function = body(model, _criterion(recipe), optimizer)
        if "captured" in kind:
            function = fl.capture(function)
        coming = itertools.cycle(batches(recipe))

        def step() -> float:
            loss: float = function(*next(coming)).scalar()
            return loss

        def mean_of_leaves() -> float:
            losses: list[float] = [loss.scalar() for loss in function(*next(coming))]
            return sum(losses) / len(losses)

        return mean_of_leaves if "leaves" in kind else step


def _model(recipe: Recipe) -> fl.nn.Module:
    model = fl.nn.Sequential()
    for number, (inputs, outputs) in enumerate(itertools.pairwise(recipe.widths)):
        if number:
            model.add(fl.nn.ReLU())
        model.add(fl.nn.Linear(inputs, outputs, dtype=recipe.dtype))
    if recipe.loss == "cross entropy":
        model.add(fl.nn.LogSoftmax())
    for variable, array in zip(model.params(), parameters(recipe), strict=True):
        variable.array = array
    return model


def _criterion(recipe: Recipe) -> fl.nn.Module:
    is_mse = recipe.loss == "mse"
    return fl.nn.MeanSquaredError() if is_mse else fl.nn.CategoricalCrossEntropy()


def _optimizer(recipe: Recipe, model: fl.nn.Module) -> Any:
    if recipe.rule == "sgd":
        return fl.optim.SGDOptimizer(model.params(), LR, MOMENTUM)
    return fl.optim.AdamOptimizer(model.params(), LR)


def _training_step(model: fl.nn.Module, criterion: fl.nn.Module, optimizer: Any) -> Any:
    """Return the function of a training step, or of a forward pass if there is no optimizer."""

    def forward(x: Any, y: Any) -> Any:
        return criterion(model(fl.input(x)), fl.no_grad(y))

    def train(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = criterion(model(fl.input(x)), fl.no_grad(y))
        loss.backward()
        optimizer.step()
        return loss

    return forward if optimizer is None else train


def _leaf_by_leaf(model: fl.nn.Module, criterion: fl.nn.Module, optimizer: Any) -> Any:
    def train(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        losses = []
        for part, target in fl.leaves(model, x, y):
            loss = criterion(model(fl.input(part)), fl.no_grad(target))
            loss.backward()
            losses.append(loss)
        optimizer.step()
        return losses

    return train


def join(setup: RankSetup) -> Flashlight:
    """Connect to the other ranks."""
    return Flashlight(setup)
