"""Leaves and sharding together: one model per host, and bits that no number of ranks changes."""

import hashlib
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.parallel import fully_sharded
from tests.distributed import conformance

ranks = conformance.ranks_in(("single", 1), ("shm", 3), ("gloo", 2), slow=[("hierarchical", 4)])


def trained(rank: int, size: int, steps: int, sharded: bool) -> str:
    """Train by leaves, clipped; return the digest of all that a checkpoint would have."""
    fl.set_seed(3)
    model = fl.nn.Sequential(
        fl.nn.Linear(9, 33), fl.nn.ReLU(), fl.nn.Dropout(0.3), fl.nn.Linear(33, 5)
    )
    if sharded:
        fully_sharded.SMALL_BYTES = 0
        fl.fully_shard(model)
    fl.distribute_module_grads(model, leaves=8)
    optimizer = fl.optim.AdamOptimizer(model.params(), lr=0.01)
    criterion = fl.nn.MeanSquaredError()
    draws = np.random.default_rng(5)
    for _ in range(steps):
        batch = draws.standard_normal((19, 9)).astype(np.float32)
        target = draws.standard_normal((19, 5)).astype(np.float32)
        optimizer.zero_grad()
        for x, y in fl.leaves(model, batch, target):
            criterion(model(fl.input(x)), fl.no_grad(y)).backward()
        fl.optim.clip_grad_norm(model.params(), 0.5)
        optimizer.step()
    digest = hashlib.sha256()
    arrays = [*model.state_dict().values(), *optimizer.state_dict()["mean"]]
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def test_a_sharded_model_has_the_bits_of_one_process(ranks: Any) -> None:
    """Sharded or not, on any number of ranks: parameters and moments are the same."""
    alone = trained(0, 1, 5, False)
    assert set(ranks.run(trained, 5, True)) == {alone}


def test_leaves_of_a_sharded_module_take_the_place_of_its_own_sums(ranks: Any) -> None:
    """Passes outside of a loop over leaves are refused, as without sharding."""
    ranks.run(outside)


def outside(rank: int, size: int) -> None:
    fully_sharded.SMALL_BYTES = 0
    model = fl.nn.Linear(3, 2)
    fl.fully_shard(model)
    fl.distribute_module_grads(model, leaves=4)
    with pytest.raises(RuntimeError, match="outside of a loop over"):
        model(fl.input(np.ones((2, 3), np.float32))).mean().backward()
    fl.fully_shard(model)  # back to sums over whole passes
    model(fl.input(np.ones((2, 3), np.float32))).mean().backward()
    assert model.params()[0].grad is not None
