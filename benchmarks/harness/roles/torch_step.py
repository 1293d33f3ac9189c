"""The step with torch: eager, compiled, or wrapped in DistributedDataParallel on gloo."""

import itertools
from typing import Any

import torch

from harness.role import RankSetup
from harness.roles.perceptron import LR, MOMENTUM, Recipe, Step, StepRole, batches, parameters
from harness.roles.torch_process import Rank


class Torch(Rank, StepRole):
    """One thread per rank; no process group if there is one rank."""

    def step(self, recipe: Recipe, kind: str) -> Step:
        model = _model(recipe)
        if kind == "distributed":
            # The fastest setting that suits any model: gradients are not copied.
            model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        is_mse = recipe.loss == "mse"
        criterion: Any = torch.nn.MSELoss() if is_mse else torch.nn.CrossEntropyLoss()
        optimizer = _optimizer(recipe, model)
        pairs = [tuple(map(torch.from_numpy, pair)) for pair in batches(recipe)]
        coming = itertools.cycle(pairs)

        def forward(x: Any, y: Any) -> Any:
            return criterion(model(x), y)

        if kind == "compiled":
            forward = torch.compile(forward)

        def evaluate() -> float:
            with torch.inference_mode():
                return float(forward(*next(coming)).item())

        def step() -> float:
            optimizer.zero_grad()
            loss = forward(*next(coming))
            loss.backward()
            optimizer.step()
            return float(loss.item())

        return step if recipe.trains else evaluate


def _model(recipe: Recipe) -> Any:
    layers: list[Any] = []
    for inputs, outputs in itertools.pairwise(recipe.widths):
        layers += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers[:-1]).to(getattr(torch, recipe.dtype))
    with torch.no_grad():
        for tensor, array in zip(model.parameters(), parameters(recipe), strict=True):
            tensor.copy_(torch.from_numpy(array))
    return model


def _optimizer(recipe: Recipe, model: Any) -> Any:
    if recipe.rule == "adam":
        return torch.optim.Adam(model.parameters(), LR, fused=True)
    return torch.optim.SGD(model.parameters(), LR, MOMENTUM, fused=True)


def join(setup: RankSetup) -> Torch:
    """Connect to the other ranks, if there are any."""
    return Torch(setup)
