"""States of torch's GradScaler over random steps; run by torch's own interpreter."""

import hashlib
import json
import random
import sys
from typing import Any


def run(steps: int, growth_interval: int, share: float, is_whole: bool) -> Any:
    """Return the state at the end, how many steps were taken, and a digest of all states.

    Unless ``is_whole``, the scaler is told what the gradients are: torch takes long to look.
    """
    import torch

    class Bare:  # an optimizer, as far as a scaler knows one
        def __init__(self, param: torch.Tensor) -> None:
            self.param_groups, self.steps = [{"params": [param]}], 0

        def step(self) -> None:
            self.steps += 1

    scaler = torch.amp.GradScaler("cpu", growth_interval=growth_interval)
    param = torch.zeros(1, requires_grad=True)
    param.grad = torch.zeros(1)
    scaler.scale(param)
    optimizer, drawn, digest = Bare(param), random.Random(7), hashlib.sha256()
    no, yes = torch.zeros(1), torch.ones(1)
    finite, infinite, nan = torch.ones(1), torch.full((1,), torch.inf), torch.full((1,), torch.nan)
    for _ in range(steps):
        chance = drawn.random()
        if is_whole:
            param.grad.copy_(nan if chance < share / 2 else infinite if chance < share else finite)
            scaler.step(optimizer)
        else:
            found = {param.device: yes if chance < share else no}
            scaler._per_optimizer_states[0]["found_inf_per_device"] = found
            optimizer.steps += not chance < share
        scaler.update()
        digest.update(repr((scaler.get_scale(), scaler._get_growth_tracker())).encode())
    return [scaler.state_dict(), optimizer.steps, digest.hexdigest()]


if __name__ == "__main__":
    print(json.dumps([run(*each) for each in json.loads(sys.argv[1])]))
