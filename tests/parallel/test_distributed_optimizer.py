"""DistributedOptimizer: sums, means, updates and errors. test_ways.py trains with it."""

import re
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.distributed.conformance import on_ranks


@pytest.mark.parametrize(("average", "found"), [(False, [6, 4, None]), (True, [2, 4 / 3, None])])
@on_ranks(("shm", 3))
def test_sums_and_means_and_gradients_that_are_missing(
    rank: int, size: int, average: bool, found: list[Any]
) -> None:
    params = [fl.param(np.zeros(3, np.float32)), fl.param(np.zeros((2, 2))), fl.param(np.zeros(1))]
    optimizer = fl.DistributedOptimizer(fl.optim.SGDOptimizer(params, 1.0), average=average)
    params[0].grad = np.full(3, rank + 1, np.float32)
    if rank == 1:
        params[1].grad = np.full((2, 2), 4.0)
    optimizer.step()
    assert [None if p.grad is None else p.grad.ravel()[0] for p in params] == found


@on_ranks(("shm", 2))
def test_any_updates_can_be_reduced(rank: int, size: int) -> None:
    """As a Bayesian network does: the changes of means and variances, without any gradient."""
    optimizer = fl.DistributedOptimizer(fl.optim.SGDOptimizer([fl.param(np.zeros(1))], 1.0))
    means, variances = np.full((2, 3), rank, np.float32), np.full(4, rank + 1.0)[::-1]
    updates = (means, fl.Variable(variances), np.full((), 1j * rank))
    result = optimizer.reduce(updates)
    assert all(one is other for one, other in zip(result, updates, strict=True))
    assert optimizer.reduce([]) == []
    assert (means == 0.5).all()
    assert (variances == 1.5).all()
    assert updates[2] == 0.5j


@on_ranks(("shm", 2))
def test_updates_of_several_buckets(rank: int, size: int) -> None:
    """More than a bucket of 20 MiB, so that several travel."""
    updates = [np.full(3 << 20, rank + number, np.float32) for number in range(3)]
    fl.DistributedOptimizer(fl.optim.SGDOptimizer([fl.param(np.zeros(1))], 1.0)).reduce(updates)
    assert all((update == number + 0.5).all() for number, update in enumerate(updates))


@on_ranks(("shm", 2))
def test_parameters_and_updates_that_differ_are_refused(rank: int, size: int) -> None:
    params = [fl.param(np.zeros(2)), fl.param(np.zeros([(2, 3), (3, 2)][rank]))]
    optimizer = fl.DistributedOptimizer(fl.optim.SGDOptimizer(params, 1.0))
    updates = [np.full(2, rank, np.float64)] * 1 + [np.zeros(1)] * rank
    where = f"rank {rank} of 2: DistributedOptimizer"
    kinds = "(rank(s) 0: float64 (2, 3); rank(s) 1: float64 (3, 2))"
    words = re.escape(f"{where}: parameters differ in number 1 {kinds}")
    with pytest.raises(fl.errors.MismatchError, match=words):
        optimizer.step()
    kinds = "(rank(s) 0: nothing; rank(s) 1: float64 (1,))"
    words = re.escape(f"{where}.reduce: updates differ in number 1 {kinds}")
    with pytest.raises(fl.errors.MismatchError, match=words):
        optimizer.reduce(updates)
    assert (updates[0] == rank).all()


def test_everything_else_is_the_inner_optimizers() -> None:
    inner = fl.optim.SGDOptimizer([fl.param(np.zeros(2))], 0.5, momentum=0.9)
    outer = fl.DistributedOptimizer(inner)
    assert outer.optimizer is inner
    assert outer.params is inner.params
    outer.lr = 0.25
    assert inner.lr == outer.lr == 0.25
    outer.params[0].grad = np.ones(2)
    outer.step()
    assert outer.state_dict()["velocity"][0] is inner.state_dict()["velocity"][0]
    other = fl.DistributedOptimizer(fl.optim.SGDOptimizer([fl.param(np.zeros(2))], 1, 0.9))
    other.load_state_dict(outer.state_dict())
    assert other.state_dict()["velocity"][0].tolist() == [1, 1]
    assert other.lr == 0.25
    outer.zero_grad()
    assert inner.params[0].grad is None
    assert repr(outer) == "DistributedOptimizer(SGDOptimizer, average=True)"
    with pytest.raises(ValueError, match="at least 0"):
        outer.lr = -1


def test_what_cannot_be_wrapped() -> None:
    inner = fl.optim.SGDOptimizer([fl.param(np.zeros(2))], 0.5)
    with pytest.raises(TypeError, match="got DistributedOptimizer"):
        fl.DistributedOptimizer(fl.DistributedOptimizer(inner))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="got str"):
        fl.DistributedOptimizer("sgd")  # type: ignore[arg-type]


def test_updates_that_cannot_be_reduced() -> None:
    optimizer = fl.DistributedOptimizer(fl.optim.SGDOptimizer([fl.param(np.zeros(2))], 0.5))
    same = np.zeros(2)
    with pytest.raises(ValueError, match="twice"):
        optimizer.reduce([same, same])
    with pytest.raises(TypeError, match="got float"):
        optimizer.reduce([1.5])
    with pytest.raises(TypeError, match=r"DistributedOptimizer\.reduce: the average of int64"):
        optimizer.reduce([np.zeros(2, np.int64)])


@pytest.mark.parametrize("first", ["module", "optimizer"])
def test_gradients_are_not_reduced_twice(first: str) -> None:
    model = fl.nn.Linear(2, 1)
    inner = fl.optim.SGDOptimizer(model.params(), 0.5)
    if first == "module":
        fl.distribute_module_grads(model)
        with pytest.raises(ValueError, match="of a module under distribute_module_grads"):
            fl.DistributedOptimizer(inner)
        return
    outer = fl.DistributedOptimizer(inner)
    outer.step()
    fl.distribute_module_grads(model)
    with pytest.raises(ValueError, match=r"parameter 0 \(shape \(1, 2\)\) is of a module under"):
        outer.step()
    model.params()[0].clear_grad_hook()
    with pytest.raises(ValueError, match="parameter 1 "):
        outer.step()
