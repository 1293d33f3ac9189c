"""Programs in torch.compile: training steps, and collectives at which Dynamo breaks the graph."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

Tensor = torch.Tensor
ROWS = 4


def _rank() -> int:
    return dist.get_rank()


def _room(x: Tensor) -> list[Tensor]:
    return [torch.zeros_like(x) for _ in range(dist.get_world_size())]


def _several(x: Tensor) -> Tensor:
    y = x * 3
    works = [dist.all_reduce(part, async_op=True) for part in (x, y)]
    for work in works:
        work.wait()
    return x + y


def _future(x: Tensor) -> Tensor:
    return dist.all_reduce(x, async_op=True).get_future().wait()[0]


def _chained_future(x: Tensor) -> Tensor:
    future = dist.all_reduce(x, async_op=True).get_future()
    return future.then(lambda done: done.value()[0] * 2).wait()


def _gather(x: Tensor) -> Tensor:
    parts = _room(x) if _rank() == 0 else None
    dist.gather(x, parts, 0)
    return torch.cat(parts) if parts else x


def _reduce(x: Tensor) -> Tensor:
    dist.reduce(x, 0)
    return x * (_rank() == 0)  # the other ranks' tensors are undefined


def _scatter(x: Tensor) -> Tensor:
    parts = [x + other for other in range(dist.get_world_size())] if _rank() == 1 else None
    dist.scatter(x, parts, 1)
    return x


def _of_list(verb: str) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        parts = [x + other for other in range(dist.get_world_size())]
        out = torch.zeros_like(x) if verb == "reduce_scatter" else _room(x)
        getattr(dist, verb)(out, x if verb == "all_gather" else parts)
        return out if isinstance(out, Tensor) else torch.cat(out)

    return run


def _into(verb: str, out_rows: str) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        size = dist.get_world_size()
        out = torch.zeros({"more": ROWS * size, "less": ROWS // size, "same": ROWS}[out_rows])
        getattr(dist, verb)(out, x)
        return out

    return run


def _messages(x: Tensor, begin: bool = False) -> Tensor:
    """Send around the ring of all ranks."""
    after, before = (_rank() + 1) % dist.get_world_size(), (_rank() - 1) % dist.get_world_size()
    received = torch.zeros_like(x)
    if begin:
        works = [dist.irecv(received, before), dist.isend(x, after)]
        for work in works:
            work.wait()
    elif _rank() % 2:
        dist.recv(received, before)
        dist.send(x, after)
    else:
        dist.send(x, after)
        dist.recv(received, before)
    return received


def _batch(x: Tensor) -> Tensor:
    other, received = dist.get_world_size() - 1 - _rank(), torch.zeros_like(x)
    ops = [dist.P2POp(dist.irecv, received, other), dist.P2POp(dist.isend, x, other)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return received


def _strided(x: Tensor) -> Tensor:
    wide = torch.stack([x, x * 2], 1)
    dist.all_reduce(wide[:, 0])
    dist.all_reduce(wide.t())
    return wide


def _of_subgroup(x: Tensor) -> Tensor:
    group = dist.new_group([0, 1])
    if _rank() < 2:
        dist.all_reduce(x, group=group)
    return x


def _then(verb: Callable[..., object], *args: Any, **options: Any) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        verb(x, *args, **options)
        return x * 2

    return run


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "all_reduce": _then(dist.all_reduce),
    "all_reduce, maximum": _then(dist.all_reduce, op=dist.ReduceOp.MAX),
    "all_reduce, asynchronous": lambda x: dist.all_reduce(x, async_op=True).wait() * x,
    "all_reduce, several": _several,
    "get_future": _future,
    "get_future, then": _chained_future,
    "broadcast": _then(dist.broadcast, 1),
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "all_gather": _of_list("all_gather"),
    "reduce_scatter": _of_list("reduce_scatter"),
    "all_to_all": _of_list("all_to_all"),
    "all_gather_into_tensor": _into("all_gather_into_tensor", "more"),
    "reduce_scatter_tensor": _into("reduce_scatter_tensor", "less"),
    "all_to_all_single": _into("all_to_all_single", "same"),
    "send and recv": _messages,
    "isend and irecv": lambda x: _messages(x, begin=True),
    "batch_isend_irecv": _batch,
    "coalesced": lambda x: dist.all_reduce_coalesced([x, x + 1]) or x,
    "strided": _strided,
    "barrier": lambda x: dist.barrier() or x,
    "a new group": _of_subgroup,
    "functional": lambda x: functional.all_reduce(x, "sum", dist.group.WORLD) + 1,
    "all_reduce of a matrix": lambda x: _then(dist.all_reduce)(x.expand(3, -1).clone()),
}


def _net(width: int = 8) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(ROWS, width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, 2)
    return nn.Sequential(*layers)


def _trained(model: Any, run: Any, module: nn.Module) -> Tensor:
    """Train three steps, after which DDP has rebuilt its buckets, and return the parameters."""
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for number in range(3):
        optimizer.zero_grad()
        x = torch.linspace(0, 1, 6 * ROWS).view(6, ROWS) * (number + 1) + _rank()
        run(model, x).backward()
        optimizer.step()
    return torch.cat([param.detach().flatten() for param in module.parameters()])


def _loss(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def _sum_hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0] / dist.get_world_size())


def _of_ddp(
    hook: Any = None, around: bool = False, width: int = 8, **options: Any
) -> Callable[[Any], Tensor]:
    def run(compiled: Any) -> Tensor:
        model = DistributedDataParallel(_net(width), **options)
        if hook is not None:
            model.register_comm_hook(None, hook)
        step = compiled(_loss) if around else _loss
        return _trained(model if around else compiled(model), step, model)

    return run


def _of_fsdp(compiled: Any) -> Tensor:
    model = FullyShardedDataParallel(_net(), device_id=torch.device("cpu"), use_orig_params=True)
    return _trained(compiled(model), _loss, model)


TRAINING: dict[str, Callable[[Any], Tensor]] = {
    "DDP": _of_ddp(),
    "DDP, small buckets": _of_ddp(width=700, bucket_cap_mb=1, gradient_as_bucket_view=True),
    "DDP, float16 hook": _of_ddp(default_hooks.fp16_compress_hook),
    "DDP, own hook": _of_ddp(_sum_hook),
    "a step around DDP": _of_ddp(around=True),
    "FSDP1": _of_fsdp,
}

NOT_OF_GLOO = {"reduce_scatter", "reduce_scatter_tensor", "all_to_all", "FSDP1"}  # of torch 2.6


def compiled(rank: int) -> dict[str, Tensor]:
    """Return the result of each program, by name."""

    def compile_anew(function: Any) -> Any:
        torch._dynamo.reset()
        return torch.compile(function, backend="eager")

    results = {}
    for name, program in {**FUNCTIONS, **TRAINING}.items():
        if torch.__version__.startswith("2.6") and name in NOT_OF_GLOO:
            continue
        if name in TRAINING:
            results[name] = program(compile_anew)
        else:
            results[name] = compile_anew(program)(torch.arange(float(ROWS)) + rank)
    return results
