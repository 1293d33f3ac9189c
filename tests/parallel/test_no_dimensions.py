"""Parameters without dimensions: what NumPy computes of them are scalars, which never change."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import flashlight_py as fl
from flashlight_py.parallel import fully_sharded
from flashlight_py.parallel.gathered_shards import shard_by_gathering
from tests.distributed.conformance import on_ranks, ranks_in

ranks = ranks_in(("single", 1), ("gloo", 2), ("shm", 2), slow=[("hierarchical", 4), ("mpi", 2)])


class Net(fl.nn.Module):
    """A factor that is used three times, and a bias; a buffer without dimensions, too."""

    def __init__(self) -> None:
        self.bias = fl.param(np.array(0.5))
        self.factor = fl.param(np.array(2.0))
        self.row = fl.param(np.ones(3))
        self.add_buffer("seen", np.array(1.0))

    def forward(self, x: Any) -> Any:
        return x * self.factor * self.factor + self.factor * self.row + self.bias


def sharded(model: Net, **how: Any) -> None:
    fully_sharded.SMALL_BYTES = 0
    fl.fully_shard(model, **how)


def computed_again(model: Net) -> None:
    sharded(model)
    fl.recompute(model)


def reduced_by(kind: Any) -> Callable[[Net], None]:
    return lambda model: fl.distribute_module_grads(model, reducer=kind(1 / fl.get_world_size()))


WAYS: dict[str, Callable[[Net], None]] = {
    "in buckets": fl.distribute_module_grads,
    "by themselves": reduced_by(fl.InlineReducer),
    "coalesced": reduced_by(fl.CoalescingReducer),
    "compressed": lambda model: fl.distribute_module_grads(model, hook=fl.PowerSGDCompression()),
    "sharded": sharded,
    "sharded across hosts": lambda model: sharded(model, across_hosts=True),
    "computed again": computed_again,
    "gathered": shard_by_gathering,
    "one by one": lambda model: None,  # what they are compared with
}
WITHOUT_WHOLE_GRADIENTS = "gathered", "sharded across hosts"
RULES = {
    "sgd": lambda params: fl.optim.SGDOptimizer(params, 0.01, momentum=0.9, weight_decay=0.1),
    "adam": lambda params: fl.optim.AdamOptimizer(params, 0.01),
    "novograd": lambda params: fl.optim.NovogradOptimizer(params, 0.01),
}


def one_pass(model: Any, step: int, rank: int, passes: int = 1) -> None:
    x = fl.input(np.arange(12.0).reshape(4, 3) * (rank + 1) + step)
    loss = model(x).mean()
    for number in range(passes):
        loss.backward(retain_graph=number + 1 < passes)


def all_passes(model: Any, kind: str, step: int, rank: int, can_wait: bool) -> None:
    if kind == "no_sync":
        with fl.no_sync(model) if can_wait else contextlib.nullcontext():
            one_pass(model, step + 3, rank)
            one_pass(model, step + 5, rank)
    one_pass(model, step, rank, 2 if kind == "retained" else 1)
    if kind == "several":
        one_pass(model, step + 7, rank)


def train(way: str, rule: str, kind: str, rank: int, size: int) -> Any:
    model, grads = Net(), []
    model.train()
    WAYS[way](model)
    optimizer = RULES[rule](model.params())
    for step in range(2):
        optimizer.zero_grad()
        for each in range(size) if way == "one by one" else [rank]:
            all_passes(model, kind, step, each, way not in ("one by one", "gathered"))
        if way == "one by one":
            for param in model.params():
                param.grad /= size
        if kind != "once":
            fl.optim.clip_grad_norm(model.params(), 1.0)
            fl.barrier()
        optimizer.step()
        grads += [np.copy(p.grad) for p in model.params() if way not in WITHOUT_WHOLE_GRADIENTS]
    state = optimizer.state_dict()
    del state["lr"]
    states = [np.copy(entry) for entries in state.values() for entry in entries]
    return [np.copy(param.array) for param in model.params()], states, grads


def equal(rank: int, size: int, rule: str, kind: str) -> None:
    expected = train("one by one", rule, kind, rank, size)
    for way in WAYS:
        for found, other in zip(train(way, rule, kind, rank, size), expected, strict=True):
            for mine, theirs in zip(found, other, strict=bool(found)):
                np.testing.assert_allclose(mine, theirs, rtol=1e-9, err_msg=way)


def test_all_ways_of_training_count_every_contribution(ranks: Any) -> None:
    kinds = ["once", "several", "no_sync", "retained"]
    ranks.run_each(equal, [(rule, kind) for rule in RULES for kind in kinds])


@on_ranks()
def test_gradients_are_reduced_after_a_pass(rank: int, size: int) -> None:
    """A gradient that NumPy has made a scalar of is reduced as well, by either function."""
    for steps in (False, True):
        model = Net()
        one_pass(model, 0, 0)
        for param in model.params():
            param.grad = param.grad * (rank + 1.0)
        if steps:
            fl.DistributedOptimizer(fl.optim.SGDOptimizer(model.params(), 0.1)).step()
        else:
            fl.all_reduce_gradients(model, 1 / size)
        found = [float(np.sum(param.grad)) / ((size + 1) / 2) for param in model.params()]
        np.testing.assert_allclose(found, [1, 23, 2])


@on_ranks()
def test_leaf_by_leaf(rank: int, size: int) -> None:
    for leaves in (3, 4):
        model = Net()
        fl.distribute_module_grads(model, leaves=leaves)
        for x in fl.leaves(model, np.arange(12.0).reshape(4, 3)):
            model(fl.input(x)).mean().backward()
        np.testing.assert_allclose([float(np.sum(p.grad)) for p in model.params()], [1, 23, 2])


@on_ranks()
def test_checkpoints(rank: int, size: int, tmp_path: Path) -> None:
    models = Net(), Net()
    for model in models:
        sharded(model)
    optimizers = [RULES["adam"](model.params()) for model in models]
    one_pass(models[0], 0, rank)
    optimizers[0].step()
    fl.save(tmp_path, module=models[0], optimizer=optimizers[0])
    fl.load(tmp_path, module=models[1], optimizer=optimizers[1])
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.zero_grad()
        one_pass(model, 1, rank)
        optimizer.step()
    assert [p.array.tolist() for p in models[0].params()] == [
        p.array.tolist() for p in models[1].params()
    ]
