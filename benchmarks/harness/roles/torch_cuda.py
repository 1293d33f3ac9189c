"""torch.distributed's all_reduce on its backend nccl, or on the backend of the option."""

import functools
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.gpu import nccl_files, share_gpus
from harness.role import Call, RankSetup
from harness.roles import torch_process
from harness.roles.cuda import CudaRole


class TorchCuda(CudaRole):
    """CUDA tensors, asynchronously."""

    def __init__(self, setup: RankSetup) -> None:
        gpus = torch.cuda.device_count()
        if not gpus:
            raise RuntimeError("torch sees no CUDA device")
        share_gpus(setup.rank, setup.size, gpus)
        torch.cuda.set_device(setup.rank % gpus)
        meeting = (Path(setup.folder) / "meet").as_uri()
        backend = setup.options.get("backend", "nccl")
        dist.init_process_group(
            backend, init_method=meeting, rank=setup.rank, world_size=setup.size
        )
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def facts(self) -> dict[str, str]:
        version = ".".join(map(str, torch.cuda.nccl.version()))
        return {**torch_process.facts(), "NCCL": f"{version} {nccl_files()}"}

    def barrier(self) -> None:
        dist.barrier()
        torch.cuda.synchronize()

    def leave(self) -> None:
        dist.destroy_process_group()

    def zeros(self, count: int, dtype: str) -> Any:
        return torch.zeros(count, dtype=getattr(torch, dtype), device="cuda")

    def launcher(self, array: Any) -> Call:
        return functools.partial(dist.all_reduce, array, async_op=True)

    def synchronize(self) -> None:
        torch.cuda.synchronize()


def join(setup: RankSetup) -> TorchCuda:
    """Connect to the other ranks."""
    return TorchCuda(setup)
