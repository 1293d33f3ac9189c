"""A step of an optimizer of torch, fused or over lists of tensors; one thread."""

import time
from collections.abc import Mapping
from typing import Any

import torch

from harness.role import Prepared, RankSetup, Refusal
from harness.roles.optimizer_works import CHECKED, LR, RULES, WORKS, arrays
from harness.roles.torch_process import Rank


class Torch(Rank):
    """One process; ``kind`` is an option of torch's optimizers: "fused" or "foreach"."""

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


def join(setup: RankSetup) -> Torch:
    """Return the role of the only rank."""
    return Torch(setup)
