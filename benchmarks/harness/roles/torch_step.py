"""The step with torch: eager, or wrapped in DistributedDataParallel on gloo."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from harness.role import Place
from harness.roles import torch_process
from harness.roles.perceptron import LR, MOMENTUM, Step, StepRole, parameters, sample


class Torch(StepRole):
    """One thread per rank; no process group where there is one rank."""

    def __init__(self, place: Place) -> None:
        self.rank, self.size = place.rank, place.size
        torch.set_num_threads(1)
        if self.size > 1:
            torch_process.initialise(place)

    def facts(self) -> dict[str, str]:
        return torch_process.facts()

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()

    def leave(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()

    def step(self, kind: str) -> Step:
        model: Any = torch.nn.Sequential(
            torch.nn.Linear(10, 100), torch.nn.ReLU(), torch.nn.Linear(100, 1)
        )
        with torch.no_grad():
            for tensor, array in zip(model.parameters(), parameters(), strict=True):
                tensor.copy_(torch.from_numpy(array))
        if kind == "distributed":
            # The fastest of its settings that suit any model: gradients are not copied.
            model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
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


def join(place: Place) -> Torch:
    """Meet the other ranks, if there are any."""
    return Torch(place)
