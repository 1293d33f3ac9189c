"""One rank of torch's FSDP2 on gloo, for benchmarks/sharding.py: prints a line of JSON.

python -m harness.roles.torch_fully_shard SIZES BATCH WARM STEPS, with torch's RANK and so on set.
"""

import gc
import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def pss() -> int:
    """Return the proportional set size of this process in bytes."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return int(text.split("Pss:")[1].split()[0]) << 10


def build(sizes: list[int]) -> Any:
    """Return the model with each linear layer as a unit, as in torch's documentation."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layers: list[Any] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [fully_shard(nn.Linear(inputs, outputs), mesh=mesh), nn.ReLU()]
    return fully_shard(nn.Sequential(*layers), mesh=mesh)


def train(sizes: list[int], batch: int, steps: int) -> tuple[Any, Any, list[float]]:
    """Return the model, the optimizer, and the seconds of each step."""
    model, criterion = build(sizes), nn.MSELoss()
    optimizer = torch.optim.Adam(model.parameters(), 0.001, fused=True)
    torch.manual_seed(dist.get_rank())
    x, y = torch.randn(batch, sizes[0]), torch.randn(batch, sizes[-1])
    seconds = []
    for _ in range(steps):
        dist.barrier()
        begin = time.perf_counter()
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - begin)
    return model, optimizer, seconds


def main(sizes: list[int], batch: int, warm: int, steps: int) -> None:
    """Measure like benchmarks/sharding.py."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train([512, 512], batch, 2)
    gc.collect()
    before = pss()
    held = train(sizes, batch, warm + steps)
    dist.barrier()
    taken = pss() - before
    dist.barrier()
    print(json.dumps([held[2][warm:], taken]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), *map(int, sys.argv[2:]))
