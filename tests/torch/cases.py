"""Cases that torch's own suite lacks, in its form. ``self.rank`` is the rank in an existing group.

All cases that run on gloo also pass there.
"""

import _thread
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

NEW = hasattr(dist.AllreduceOptions, "asyncOp")  # torch 2.7: FSDP2 and merged groups on CPUs


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


class _Recomputed(nn.Module):
    """Layers whose activations are computed again in the backward pass."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.layers, x, use_reentrant=False)


class Cases:
    rank: int
    _barrier: Callable[..., None]
    assertRaisesRegex: Any

    def test_gather_if_other_ranks_pass_no_list(self) -> None:
        size = dist.get_world_size()
        for is_async in (False, True):
            x = torch.full((3,), float(self.rank))
            parts = [torch.empty(3) for _ in range(size)] if self.rank == 0 else None
            work = dist.gather(x, parts, dst=0, async_op=is_async)
            if is_async:
                work.wait()
            if parts:
                assert [part[0].item() for part in parts] == list(range(size))

    def test_messages_of_a_thread_that_has_no_other_code(self) -> None:
        group: Any = dist.group.WORLD
        if self.rank < 2:
            x = torch.full((3,), float(self.rank))
            begin = group.recv if self.rank else group.send
            works: list[Any] = []
            calls = map(begin, [[x]], [1 - self.rank], [0])
            _thread.start_new_thread(works.extend, (calls,))
            end = time.monotonic() + 10
            while not works and time.monotonic() < end:
                time.sleep(0.001)
            works[0].wait()
            assert x.tolist() == [0.0] * 3

    def test_monitored_barrier_names_missing_ranks(self) -> None:
        group = dist.new_group([0, 1])
        dist.monitored_barrier(group, timedelta(seconds=60))  # other ranks may be absent
        if self.rank == 0:
            with self.assertRaisesRegex(RuntimeError, "[Rr]ank 1 "):  # noqa: PT027
                dist.monitored_barrier(group, timedelta(seconds=0.5))
        self._barrier(timeout=60)

    def test_result_of_a_completed_or_dropped_work(self) -> None:
        size, end = dist.get_world_size(), time.monotonic() + 20
        for is_dropped in (False, True):  # copies fill the results of both
            parts = [torch.zeros(2, 3).t() for _ in range(size)]
            work = dist.all_gather(parts, torch.full((3, 2), self.rank + 1.0), async_op=True)
            if is_dropped:
                del work
                self._barrier()
            while not (all(part[2, 1] for part in parts) if is_dropped else work.is_completed()):
                time.sleep(0.001)
                assert time.monotonic() < end
            assert [part[2, 1].item() for part in parts] == [1.0 + rank for rank in range(size)]

    def test_all_to_all_of_other_counts_than_expected(self) -> None:
        if dist.get_backend() == "gloo":
            return  # the process ends here, as expected
        size = dist.get_world_size()
        counts = [0, 2, *[1] * (size - 2)] if self.rank == 0 else [1] * size  # equal totals
        x, out = torch.ones(size), torch.zeros(size)
        for is_async in (False, True):
            try:
                work = dist.all_to_all_single(out, x, counts, [1] * size, None, is_async)
                if is_async:
                    work.wait()
            except (RuntimeError, ValueError):
                continue
            assert is_async
            assert self.rank

    def test_collectives_of_empty_tensors(self) -> None:
        size = dist.get_world_size()
        parts = [torch.empty(0, 3) for _ in range(size)]
        for is_async in (False, True):
            works = [
                dist.broadcast(torch.empty(0), 0, async_op=is_async),
                dist.all_reduce(torch.empty(0, 3), async_op=is_async),
                dist.all_gather(parts, torch.empty(0, 3), async_op=is_async),
                dist.reduce(torch.empty(2, 0), size - 1, async_op=is_async),
            ]
            for work in works if is_async else []:
                work.wait()
        assert [part.shape for part in parts] == [(0, 3)] * size

    def test_many_collectives_at_once(self) -> None:
        size, groups = dist.get_world_size(), [dist.group.WORLD, dist.new_group()]
        xs = [torch.full((50,), float(self.rank + number)) for number in range(200)]
        works = [
            dist.all_reduce(x, group=groups[number % 2], async_op=True)
            for number, x in enumerate(xs)
        ]
        for work in reversed(works):
            work.wait()
        ranks = sum(range(size))
        assert [x[-1].item() for x in xs] == [ranks + size * number for number in range(200)]

    def test_ddp_with_recomputed_activations(self) -> None:
        size, model = dist.get_world_size(), _model()
        xs = [torch.full((3, 4), rank + 1.0) for rank in range(size)]
        (sum(model(x).sum() for x in xs) / size).backward()
        expected = [weight.grad.clone() for weight in model.parameters()]
        model.zero_grad()
        layers = DDP(_Recomputed(model), static_graph=True)
        layers(xs[self.rank]).sum().backward()
        torch.testing.assert_close([weight.grad for weight in model.parameters()], expected)

    def test_fully_shard_clips_and_accumulates_gradients(self) -> None:
        if not NEW:
            return
        size, model, sharded = dist.get_world_size(), _model(), _model()
        for layer in (*sharded, sharded):
            fully_shard(layer, mesh=init_device_mesh("cpu", (size,)))
        sharded[0].weight.requires_grad_(False)
        model[0].weight.requires_grad_(False)
        for step in range(2):  # only the last step reduces
            sharded.set_requires_gradient_sync(step == 1)
            sharded(torch.full((3, 4), self.rank + step + 1.0)).sum().backward()
            for rank in range(size):
                (model(torch.full((3, 4), rank + step + 1.0)).sum() / size).backward()
        norms = [nn.utils.clip_grad_norm_(one.parameters(), 0.1) for one in (sharded, model)]
        torch.testing.assert_close(norms[0].full_tensor(), norms[1])
        pairs = zip(sharded.parameters(), model.parameters(), strict=True)
        for ours, expected in [pair for pair in pairs if pair[1].requires_grad]:
            torch.testing.assert_close(ours.grad.full_tensor(), expected.grad)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(sharded, options=options)
        if self.rank == 0:
            torch.testing.assert_close(dict(state), dict(model.state_dict()))

    def test_redistribution_of_uneven_tensors(self) -> None:
        size = dist.get_world_size()
        mesh, x = init_device_mesh("cpu", (size,)), torch.arange(35.0).view(5, 7)
        for before in (Replicate(), Shard(0), Shard(1)):
            for after in (Replicate(), Shard(0), Shard(1)):
                y = distribute_tensor(x, mesh, [before]).redistribute(mesh, [after])
                assert torch.equal(y.full_tensor(), x)
        for after in (Replicate(), Shard(0), Shard(1)):
            partial = DTensor.from_local(x * self.rank, mesh, [Partial()])
            y = partial.redistribute(mesh, [after]).full_tensor()
            assert torch.equal(y, x * sum(range(size)))
        product = distribute_tensor(x, mesh, [Shard(1)]) @ distribute_tensor(
            x.t(), mesh, [Shard(0)]
        )
        torch.testing.assert_close(product.full_tensor(), x @ x.t())

    def test_checkpoint_is_loaded_with_other_shards(self) -> None:
        size = dist.get_world_size()
        mesh, x = init_device_mesh("cpu", (size,)), torch.arange(35.0).view(5, 7)
        folders = [tempfile.mkdtemp() for _ in range(2)]
        dist.broadcast_object_list(folders)
        state = {"x": distribute_tensor(x, mesh, [Shard(0)]), "step": 3}
        dcp.save(state, checkpoint_id=folders[0])
        dcp.async_save(state, checkpoint_id=folders[1]).result()
        for folder in folders:
            for placement in (Shard(1), Replicate()):
                state = {"x": distribute_tensor(x * 0, mesh, [placement]), "step": 0}
                dcp.load(state, checkpoint_id=folder)
                assert torch.equal(state["x"].full_tensor(), x)
                assert state["step"] == 3
