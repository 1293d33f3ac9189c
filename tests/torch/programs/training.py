"""What torch builds on its collectives, each beside the same on gloo."""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo  # DistributedDataParallel imports it, which takes seconds
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

import flashlight_py as fl
from tests.torch.programs.compiled import compiled

Result = dict[str, torch.Tensor]


class Net(nn.Module):
    """Two layers, and one that only some batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.other = nn.Linear(8, 32), nn.Linear(32, 4), nn.Linear(8, 32)
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: torch.Tensor, other: bool = False) -> torch.Tensor:
        layer = self.other if other else self.first
        return self.last(self.norm(layer(x)).relu())


def _net(kind: type[nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def _plain() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))


def _batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def _trained(model: nn.Module, rank: int, optimizer: Any = None, **options: Any) -> Result:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        model(_batch(rank, step), **options).square().mean().backward()
        optimizer.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def ddp_views(rank: int) -> Result:
    model = DDP(_net(), find_unused_parameters=True, gradient_as_bucket_view=True)
    return _trained(model, rank, other=rank == 0)


def ddp_join(rank: int) -> Result:
    model = DDP(_net(_plain))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Join([model]):
        for step in range(3 + 2 * rank):
            optimizer.zero_grad()
            model(_batch(rank, step)).square().mean().backward()
            optimizer.step()
    return dict(model.state_dict())


def _hooked(rank: int, hook: Any, state: Any = None) -> Result:
    model = DDP(_net(_plain), bucket_cap_mb=0.001)
    model.register_comm_hook(state, hook)
    return _trained(model, rank)


def ddp_float16(rank: int) -> Result:
    return _hooked(rank, default_hooks.fp16_compress_hook)


def ddp_power_sgd(rank: int) -> Result:
    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2, min_compression_rate=0.5)
    return _hooked(rank, powerSGD_hook.powerSGD_hook, state)


def sync_batch_norm(rank: int) -> Result:
    """Exchange objects and buffers, as DDP does of every module."""
    result = _trained(DDP(_net(), broadcast_buffers=True, find_unused_parameters=True), rank)
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, {"rank": rank})
    assert [one["rank"] for one in everyones] == list(range(len(everyones)))
    return result


def zero(rank: int) -> Result:
    model = DDP(_net(_plain))
    options = {"optimizer_class": torch.optim.AdamW, "lr": 0.1}
    optimizer = ZeroRedundancyOptimizer(model.parameters(), **options)
    result = _trained(model, rank, optimizer)
    optimizer.consolidate_state_dict(0)
    return result


def _sharded(mesh: Any = None, **options: Any) -> nn.Module:
    from torch.distributed._composable.fsdp import fully_shard

    model = _net(_plain)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def _full(state: Result) -> Result:
    return {name: value.full_tensor() for name, value in state.items()}


def fsdp(rank: int) -> Result:
    model = _sharded(init_device_mesh("cpu", (dist.get_world_size(),)))
    result = _trained(model, rank, torch.optim.AdamW(model.parameters(), lr=0.1))
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return _full(result)


def fsdp_bfloat16(rank: int) -> Result:
    from torch.distributed._composable.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return _full(_trained(_sharded(mesh, mp_policy=policy), rank))


def hybrid(rank: int) -> Result:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("a", "b"))
    return _full(_trained(_sharded(mesh), rank))


def dtensor(rank: int) -> Result:
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor, parallel

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    x = distribute_tensor(torch.arange(64.0).view(8, 8), mesh, [Shard(0)])
    y = x.redistribute(mesh, [Shard(1)])
    sums = y.sum(0).redistribute(mesh, [Replicate()])
    product = (x @ x.redistribute(mesh, [Replicate()])).redistribute(mesh, [Replicate()])
    parts = type(x).from_local(torch.ones(4) * rank, mesh, [Partial()]).full_tensor()
    plan = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
    model = parallel.parallelize_module(_net(_plain), mesh, plan)
    out = model(_batch(0, 0))
    out.sum().backward()
    results = {"sums": sums.to_local(), "product": product.to_local(), "parts": parts, "out": out}
    results["gradient"] = model[0].weight.grad.full_tensor()
    return results


def checkpoint(rank: int) -> Result:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = _sharded(mesh)
    _trained(model, rank)
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    dcp.save(get_model_state_dict(model), checkpoint_id=folder[0])
    other = _sharded(mesh)
    state = get_model_state_dict(other)
    dcp.load(state, checkpoint_id=folder[0])
    for name, value in get_model_state_dict(model).items():
        assert torch.equal(value.to_local(), state[name].to_local())
    return _full(state)


def functional(rank: int) -> Result:
    import torch.distributed._functional_collectives as coll

    size = dist.get_world_size()
    group = dist.group.WORLD

    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        total = coll.all_reduce(x * 2, "sum", group)
        gathered = coll.all_gather_tensor(x, 0, group)
        part = coll.reduce_scatter_tensor(gathered, "sum", 0, group)
        moved = coll.all_to_all_single(gathered, None, None, group)
        return total + 1, gathered, part, moved, coll.broadcast(x, 1, group)

    x = torch.arange(4.0) + rank
    eager = step(x)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(x)
    for one, other in zip(eager, compiled, strict=True):
        assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    assert eager[1].numel() == 4 * size
    return {str(number): torch.as_tensor(value) + 0 for number, value in enumerate(eager)}


def sparse(rank: int) -> Result:
    """Sum sparse tensors, also gradients of an embedding."""
    results = {}
    for number, is_async in enumerate((False, True)):
        indices = [[rank, 5, rank]] if rank != number else torch.empty(1, 0, dtype=torch.int64)
        values = torch.ones(0 if rank == number else 3, 2) * (rank + 1)
        x = torch.sparse_coo_tensor(indices, values, (8, 2), check_invariants=True)
        if is_async and rank == 1:
            dist.recv(torch.empty(1), 0)  # rank 0 sends after the start of its sum
        work = dist.all_reduce(x, async_op=is_async)
        if is_async and rank == 0:
            dist.send(torch.empty(1), 1)
        if work is not None:
            work.wait()
        results[f"sum {is_async}"] = x.to_dense()
    model = DDP(nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2)))
    for _ in range(2):
        model(torch.tensor([[1, 2], [rank, 4]])).sum().backward()
    return results | {"gradient": model.module[0].weight.grad.to_dense()}


def odd_tensors(rank: int) -> Result:
    """Write to expanded tensors, and use tensors without data. The version of a result changes."""
    one = [torch.full((1,), rank + 3.0).expand(4) for _ in range(2)]
    with torch.inference_mode():
        strided = [torch.full((2, 3), rank + 1.0).t() for _ in range(2)]
    dist.broadcast(strided[0], 1)
    dist.all_reduce(strided[1])
    dist.all_reduce(one[0])
    dist.broadcast(one[1], 1)
    x, y = torch.ones(4), torch.zeros(4 * dist.get_world_size())
    dist.all_reduce(x)
    dist.all_gather_into_tensor(y, x)
    dist.reduce_scatter_tensor(x, y)
    z = torch.ones(4)
    dist.scatter(z, list(y.chunk(dist.get_world_size())) if rank == 0 else None)
    for make in (FakeTensorMode, lambda: torch.device("meta")):
        with make():
            a, b = torch.ones(4), torch.ones(4 * dist.get_world_size())
            works = [dist.all_reduce(a, async_op=True), dist.broadcast(a, 0, async_op=True)]
            works += [dist.all_gather_into_tensor(b, a, async_op=True)]
            dist.all_to_all_single(b, b)
            dist.all_gather(list(b.chunk(dist.get_world_size())), a)
            assert all(work.wait() for work in works)
    versions = torch.tensor([tensor._version > 0 for tensor in (x, y, z)])
    return {"expanded": torch.stack(one), "strided": torch.stack(strided), "versions": versions}


def differentiated(rank: int) -> Result:
    size = dist.get_world_size()
    x = (torch.arange(float(2 * size)) + rank).requires_grad_()
    parts = list(x.view(size, 2).unbind())
    room = [torch.empty(2) for _ in range(size)]
    values = [
        differentiable.all_reduce(x * 2).square().sum(),
        torch.stack(differentiable.all_gather(x * rank)).square().sum(),
        differentiable.broadcast(x * 3, 1).square().sum(),
        differentiable.reduce_scatter(torch.empty(2), parts).square().sum(),
        torch.stack(list(differentiable.all_to_all(room, parts))).square().sum(),
        differentiable.all_to_all_single(torch.empty(2 * size), x).square().sum(),
    ]
    sum(values).backward()
    return {"gradient": x.grad, "values": torch.stack(values).detach()}


def pipeline(rank: int) -> Result:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    size = dist.get_world_size()
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(size)]
    stage = PipelineStage(layers[rank], rank, size, torch.device("cpu"))
    schedule = ScheduleGPipe(
        stage, 2, loss_fn=lambda out, expected: (out - expected).square().mean()
    )
    x, target = _batch(0, 0), torch.ones(6, 8)
    if rank == 0:
        schedule.step(x)
    elif rank == size - 1:
        schedule.step(target=target)
    else:
        schedule.step()
    return {"gradient": layers[rank].weight.grad}


def messages(rank: int) -> Result:
    size = dist.get_world_size()
    x, y = torch.full((4,), float(rank)), torch.empty(4)
    ops = [
        dist.P2POp(dist.isend, x, (rank + 1) % size),
        dist.P2POp(dist.irecv, y, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    results = {"batch": y}
    if rank == 0:
        got = [torch.empty(2) for _ in range(size - 1)]
        senders = sorted(dist.recv(source) for source in got)
        assert senders == list(range(1, size))
        results["any"] = torch.stack(got).sort(0).values
    else:
        dist.send(torch.full((2,), float(rank)), 0)
    return results


def chained(rank: int) -> Result:
    """Wait for a future in what another one calls, as PowerSGD does."""

    def follow(future: Any) -> torch.Tensor:
        time.sleep(0.2 * (rank == 1))
        return dist.all_reduce(future.value()[0], async_op=True).get_future().wait()[0]

    time.sleep(0.2 * (rank == 1))
    work = dist.all_reduce(torch.full((3,), float(rank)), async_op=True)
    return {"sum": work.get_future().then(follow).wait()}


def in_place(rank: int) -> Result:
    """Gather into what holds this rank's part, and reduce into a part, as FSDP does."""
    size = dist.get_world_size()
    results = {}
    for dtype in (torch.float32, torch.bfloat16):
        gathered = torch.zeros(4 * size, dtype=dtype)
        part = gathered.narrow(0, 4 * rank, 4).fill_(rank + 1)
        dist.all_gather_into_tensor(gathered, part)
        results[f"gathered {dtype}"] = gathered.clone()
        dist.reduce_scatter_tensor(part, gathered)
        results[f"reduced {dtype}"] = part.clone()
    return results


def bfloat16_moves(rank: int, size: int, backend: str | None, hosts: int) -> str:
    """Move bfloat16 by every verb without ml_dtypes; return the error of an uneven reduction."""
    os.environ["FLASHLIGHT_MEMORY_DOMAIN"] = str(rank * hosts // size)
    sys.modules["ml_dtypes"] = None  # type: ignore[assignment]
    dist.init_process_group("flashlight", pg_options={"BACKEND": backend} if backend else None)

    def of(*numbers: float) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.bfloat16)

    def room(count: int = 1) -> torch.Tensor:
        return of(*[0.0] * 2 * count)[::2]  # it has gaps

    x, last, is_last = of(rank + 0.5), size - 1, rank == size - 1
    everyone = [of(peer + 0.5) for peer in range(size)]
    for is_async in (False, True):
        options = {"async_op": is_async}
        parts, one, sent, received = [room() for _ in range(size)], room(), room(), room()
        gathered, to_last = room(size), room(size * is_last)
        works = [
            dist.broadcast(one.copy_(x), last, **options),
            dist.all_gather(parts, x, **options),
            dist.scatter(sent, everyone if is_last else None, last, **options),
            dist.all_to_all_single(gathered, torch.cat([x] * size), **options),
            dist.all_to_all_single(to_last, x, [int(is_last)] * size, [0] * last + [1], **options),
            dist.isend(x, (rank + 1) % size),
            dist.irecv(received, (rank - 1) % size),
        ]
        for work in filter(None, works):
            work.wait()
        values = torch.cat([*parts, gathered, one, sent, received, to_last])
        expected = [*everyone, *everyone, everyone[last], x, everyone[rank - 1]]
        assert torch.equal(values, torch.cat(expected + everyone * is_last))
        dist.gather(x, parts if is_last else None, last)
        if rank:
            dist.send(x, 0)
        else:
            assert {dist.recv(part) for part in parts[1:]} == {*range(1, size)}
        assert torch.equal(fl.all_gather(x), torch.cat(everyone))
        assert torch.equal(torch.cat(fl.all_to_all([x] * size)), torch.cat(everyone))
    try:
        dist.reduce_scatter(of(*[0.0] * (rank + 1)), [of(*[1.0] * (n + 1)) for n in range(size)])
    except TypeError as error:
        return str(error)
    return ""


ALL: dict[str, Callable[[int], Result]] = {
    one.__name__: one
    for one in (
        *(ddp_views, ddp_join, ddp_float16),
        *(ddp_power_sgd, sync_batch_norm, zero, fsdp, fsdp_bfloat16, hybrid, dtensor, checkpoint),
        *(functional, compiled, sparse, odd_tensors, differentiated, pipeline, messages, chained),
        in_place,
    )
}


def beside_gloo(rank: int, size: int, places: list[str], names: list[str]) -> dict[str, str]:
    """Return what differs from gloo, or fails, of what ``names`` say."""
    wrong: dict[str, str] = {}
    # torch 2.6 has no FSDP2, and its gloo has no reduce_scatter and sends no meta tensors.
    if torch.__version__.startswith("2.6"):
        cannot = ["fsdp", "fsdp_bfloat16", "hybrid", "checkpoint", "differentiated", "in_place"]
        cannot += ["odd_tensors"]
        names = [name for name in names if name not in cannot]
    results: list[dict[str, Result]] = []
    for backend, path in zip(("flashlight", "gloo"), places, strict=True):
        options = {"init_method": f"file://{path}", "rank": rank, "world_size": size}
        dist.init_process_group(backend, **options)
        result = {}
        for name in names:
            torch.manual_seed(1)
            torch._dynamo.reset()
            arguments = ALL[name](rank)
            result[name] = {key: (value.detach() + 0).clone() for key, value in arguments.items()}
        results.append(result)
        dist.barrier()
        if backend == "flashlight":  # gloo of torch 2.6 may hang there
            dist.destroy_process_group()
    for name in names:
        for key, value in results[0][name].items():
            other = results[1][name][key]
            if not torch.allclose(value, other, rtol=1e-4, atol=1e-5):
                wrong[f"{name} {key}"] = f"{value.flatten()[:4]} {other.flatten()[:4]}"
    return wrong
