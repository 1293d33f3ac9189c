"""Parameters that a module did not have when it was distributed: the next backward pass raises."""

from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.errors import DistributedError
from tests.distributed.conformance import on_ranks, ranks_in

ranks = ranks_in(("shm", 2), slow=[("gloo", 3), ("hierarchical", 4)])


class Net(fl.nn.Module):
    """Two layers by name, others in a list; a scale that is not trained."""

    def __init__(self) -> None:
        fl.set_seed(0)
        self.first, self.last = fl.nn.Linear(3, 3), fl.nn.Linear(3, 1)
        self.middle = [fl.nn.Linear(3, 3)]
        self.scale = fl.Variable(np.ones(1, np.float32), calc_grad=False)

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for layer in self.middle:
            x = layer(x)
        return self.last(x) * self.scale


def backward(model: fl.nn.Module) -> None:
    rank = fl.get_world_rank()
    model(fl.input(np.full((2, 3), rank + 1, np.float32))).sum().backward()


def replace_one(model: Net) -> None:
    model.first.weight = fl.Variable(np.ones((3, 3), np.float32), calc_grad=True)


def replace_all(model: Net) -> None:
    fresh = Net()
    model.first, model.last, model.middle = fresh.first, fresh.last, fresh.middle


def replace_in_list(model: Net) -> None:
    model.middle[0] = fl.nn.Linear(3, 3)


def append(model: Net) -> None:
    model.middle.append(fl.nn.Linear(3, 3))


def unfreeze(model: Net) -> None:
    model.scale.calc_grad = True


CHANGES = {each.__name__: each for each in (replace_one, replace_all, replace_in_list)} | {
    each.__name__: each for each in (append, unfreeze)
}


@pytest.mark.parametrize("change", CHANGES)
@on_ranks()
def test_a_new_parameter_is_refused_until_the_module_is_distributed_again(
    rank: int, size: int, change: str
) -> None:
    model = Net()
    fl.distribute_module_grads(model)
    backward(model)
    CHANGES[change](model)
    name = "'scale'.*" * (change == "unfreeze")
    for _ in range(2):
        with pytest.raises(ValueError, match=f"{name}would not be reduced"):
            backward(model)
    fl.distribute_module_grads(model)
    backward(model)
    grads = [param.grad for param in model.params() if param.grad is not None]
    assert len(grads) == len([p for p in model.params() if p.calc_grad])
    for grad in grads:
        assert np.array_equal(grad, fl.all_gather(grad[None])[0])


@on_ranks()
def test_a_new_parameter_of_a_sharded_module_is_refused(rank: int, size: int) -> None:
    model = Net()
    fl.fully_shard(model, across_hosts=True)
    backward(model)
    replace_in_list(model)
    with pytest.raises(ValueError, match="would not be reduced"):
        backward(model)


@on_ranks()
def test_all_ranks_know_of_a_new_parameter_on_one(rank: int, size: int) -> None:
    model = Net()
    fl.distribute_module_grads(model)
    if rank == 0:
        replace_all(model)
    words = "parameter 'first.weight' was assigned"
    with pytest.raises(ValueError if rank == 0 else DistributedError, match=words):
        backward(model)
    fl.barrier()


@on_ranks()
def test_parameters_may_be_frozen_removed_and_ignored(rank: int, size: int) -> None:
    model = Net()
    fl.distribute_module_grads(model, ignore=["last.weight"])
    model.middle.clear()
    model.first.bias.calc_grad = False
    backward(model)
    model.eval()
    model.train()
    backward(model)
    assert not np.array_equal(*fl.all_gather(model.last.weight.grad.ravel()[None])[:2])
