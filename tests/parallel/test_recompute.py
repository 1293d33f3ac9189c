"""Recomputed modules that are trained on several ranks."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py import nn
from flashlight_py.parallel import fully_sharded
from flashlight_py.parallel.gathered_shards import shard_by_gathering
from tests.distributed.conformance import on_ranks, ranks_in

ranks = ranks_in(("shm", 2), slow=[("gloo", 3)])


class Mixed(nn.Module):
    """A collective between two layers, one of which is shared with another block."""

    def __init__(self, shared: Any) -> None:
        self.own, self.shared = nn.Linear(4, 4), shared

    def forward(self, x: Any) -> Any:
        return self.shared(fl.functional.all_reduce(self.own(x), op="avg"))


def trained(rank: int, again: Callable[[Any], Any], bucket_bytes: int) -> list[bytes]:
    fl.set_seed(1)
    shared = nn.Linear(4, 4)
    net = nn.Sequential(again(Mixed(shared)), nn.Dropout(0.2), again(Mixed(shared)))
    fl.distribute_module_grads(net, bucket_bytes=bucket_bytes)
    optimizer = fl.optim.SGDOptimizer(net.params(), 0.1, momentum=0.9)
    rng = np.random.default_rng(rank)
    for step in range(4):
        optimizer.zero_grad()
        for part in range(2):
            x = fl.param(rng.standard_normal((3, 4)).astype(np.float32))
            if step and not part:
                with fl.no_sync(net):
                    net(x).sum().backward()
            else:
                net(x).sum().backward()
        optimizer.step()
    return [array.tobytes() for array in (*net.state_dict().values(), x.grad)]


SHARDED: dict[str, Callable[[Any], Any]] = {
    "in shared memory": fl.fully_shard,
    "by gathering": shard_by_gathering,
}


def sharded(rank: int, again: Callable[[Any], Any], kind: str) -> list[bytes]:
    """Train a model whose parameters change, or are freed, as soon as possible."""
    fl.set_seed(1)
    block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Tanh())
    net = nn.Sequential(again(block), again(nn.Linear(4, 4)), again(block), nn.Linear(4, 2))
    SHARDED[kind](net)
    optimizer = fl.optim.AdamOptimizer(net.params(), 0.1)
    rng = np.random.default_rng(rank)
    for _ in range(3):
        optimizer.zero_grad()
        x = fl.param(rng.standard_normal((3, 4)).astype(np.float32))
        net(x).sum().backward()
        optimizer.step()
    return [array.tobytes() for array in (*net.state_dict().values(), x.grad)]


def by_leaves(again: Callable[[Any], Any]) -> list[bytes]:
    fl.set_seed(1)
    block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Tanh())
    net = nn.Sequential(again(block), again(block), nn.Linear(4, 2))
    fl.distribute_module_grads(net, leaves=8)
    optimizer = fl.optim.SGDOptimizer(net.params(), 0.1, momentum=0.9)
    rows = np.random.default_rng(3).standard_normal((21, 4)).astype(np.float32)
    for _ in range(2):
        optimizer.zero_grad()
        for x in fl.leaves(net, rows):
            net(fl.input(x)).mean().backward()
        optimizer.step()
    return [array.tobytes() for array in net.state_dict().values()]


@on_ranks()
def test_recompute_replays_random_numbers_of_leaves(rank: int, size: int) -> None:
    plain = by_leaves(lambda module: module)
    assert by_leaves(fl.recompute) == plain
    assert fl.all_gather_object(plain) == [plain] * size


@pytest.mark.parametrize("kind", SHARDED)
@on_ranks(("shm", 2))
def test_recompute_keeps_training_of_a_sharded_model(rank: int, size: int, kind: str) -> None:
    with mock.patch.object(fully_sharded, "SMALL_BYTES", 0):
        assert sharded(rank, fl.recompute, kind) == sharded(rank, lambda module: module, kind)


@pytest.mark.parametrize("bucket_bytes", [1 << 20, 64])
@on_ranks()
def test_recompute_keeps_bucket_order_of_gradients(rank: int, size: int, bucket_bytes: int) -> None:
    plain = trained(rank, lambda module: module, bucket_bytes)
    assert trained(rank, fl.recompute, bucket_bytes) == plain
    assert fl.all_gather_object(plain[:-1]) == [plain[:-1]] * size
