"""A step of an optimizer of torch, fused or over lists of tensors; one thread."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from harness.role import Place, Prepared, Refusal, Role
from harness.roles import torch_process
from harness.roles.optimizer_works import CHECKED, LR, RULES, WORKS, arrays


class Torch(Role):
    """One process; ``kind`` is an option of torch's optimizers: "fused" or "foreach"."""

    def __init__(self, place: Place) -> None:
        self.rank, self.size = place.rank, place.size
        torch.set_num_threads(1)

    def facts(self) -> dict[str, str]:
        return torch_process.facts()

    def barrier(self) -> None:
        pass

    def prepare(self, task: Mapping[str, Any]) -> Prepared:
        _, name, _, options = RULES[task["rule"]]
        tensors = []
        for array, grad in arrays(WORKS[task["work"]]):
            tensors.append(torch.from_numpy(array).requires_grad_())
            tensors[-1].grad = torch.from_numpy(grad)
        try:
            optimizer = getattr(torch.optim, name)(tensors, LR, **options, **{task["kind"]: True})
            optimizer.step()
        except (RuntimeError, TypeError) as error:
            raise Refusal(f"torch has no such step: {error}") from error
        first = tensors[0].detach().reshape(-1)[:CHECKED].tolist()
        return Prepared(optimizer.step, first, clock=time.process_time)


def join(place: Place) -> Torch:
    """Return the role of the only rank."""
    return Torch(place)
