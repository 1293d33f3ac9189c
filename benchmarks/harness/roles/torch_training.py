"""Training steps of torch's tutorials: DistributedDataParallel, and FSDP2."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from harness.role import Prepared, RankSetup, Role
from harness.roles import torch_process

BATCH = 8
# The learning rate is 0, so every step has the gradients of the first step.
LEARNING_RATE = 0.0
CLOSE = 1e-5  # tolerance for another backend's order of additions


def _perceptron(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _blocks(count: int, width: int) -> nn.Module:
    blocks = [
        nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
        for _ in range(count)
    ]
    return nn.Sequential(*blocks)


# The model, and the shapes of its input and output.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "10-100-1": (lambda: _perceptron(10, 100, 1), (BATCH, 10), (BATCH, 1)),
    "25 MB": (lambda: _perceptron(*[1024] * 7), (BATCH, 1024), (BATCH, 1024)),
    "2 blocks of 512": (lambda: _blocks(2, 512), (1, 32, 512), (1, 32, 512)),
}


def _sharded(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "DDP": DistributedDataParallel,
    "FSDP2": _sharded,
}


class Training(Role):
    """One thread per rank; each rank has its own batch."""

    def __init__(self, setup: RankSetup) -> None:
        torch_process.initialise(setup)
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def facts(self) -> dict[str, str]:
        return torch_process.facts()

    def barrier(self) -> None:
        dist.barrier()

    def leave(self) -> None:
        dist.destroy_process_group()

    def prepare(self, task: Mapping[str, Any]) -> Prepared:
        """Return the step, which reports the sum of squares of each parameter's gradient."""
        make, inputs, outputs = MODELS[task["model"]]
        torch.manual_seed(0)
        model = WRAPPERS[task["wrapper"]](make())
        torch.manual_seed(1 + self.rank)
        x, y = torch.randn(inputs), torch.randn(outputs)
        criterion = nn.MSELoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

        def step() -> None:
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()

        def squares() -> list[float]:
            step()
            grads = (_full_tensor(parameter.grad) for parameter in model.parameters())
            return [grad.double().square().sum().item() for grad in grads]

        first = squares()

        def check() -> None:
            torch.testing.assert_close(squares(), first, rtol=CLOSE, atol=0.0)

        return Prepared(step, first, check)


def _full_tensor(tensor: Any) -> Any:
    """Return the full tensor of a shard of FSDP2."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def join(setup: RankSetup) -> Training:
    """Connect to the other ranks."""
    return Training(setup)
