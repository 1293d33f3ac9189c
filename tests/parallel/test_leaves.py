"""Training leaf by leaf: the same bits on any number of ranks, and clear errors."""

import functools
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py import random as numbers
from flashlight_py.parallel import fully_sharded
from tests.distributed.conformance import BACKENDS, on_ranks, ranks_in

F = fl.autograd.functions
SLOW = [("shm", 4), ("gloo", 2), ("mpi", 3), ("hierarchical", 3)]
ranks = ranks_in(("shm", 2), ("gloo", 3), ("hierarchical", 4), slow=SLOW)
BATCHES = (37, 40, 5, 1)  # rows of global batches: also fewer than leaves
STEPS = 8
pytestmark = pytest.mark.usefixtures("own_numbers")


class Net(fl.nn.Module):
    """A scalar, two layers, dropout, statistics between them, and a layer that is not used."""

    def __init__(self, dtype: str = "float32") -> None:
        self.shift = fl.param(np.array(0.5, dtype))
        self.first = fl.nn.Linear(12, 32, dtype=dtype)
        self.dropout = fl.nn.Dropout(0.2)
        self.last = fl.nn.Linear(32, 3, dtype=dtype)
        self.unused = fl.nn.Linear(2, 2, dtype=dtype)
        self.add_buffer("mean", np.zeros(32, dtype))
        self.add_buffer("count", np.zeros((), np.int64))
        self.add_buffer("mask", np.full(3, -np.inf, dtype))

    def forward(self, x: Any) -> Any:
        hidden = self.first(x)
        if self.training:
            self.mean *= 0.9
            self.mean += 0.1 * hidden.array.mean(axis=0)
            self.count += 1
        return self.last(self.dropout(F.tanh(hidden))) + self.shift


def batch(step: int, dtype: str = "float32") -> tuple[Any, Any]:
    x = np.random.default_rng(step).standard_normal((BATCHES[step % 4], 12)).astype(dtype)
    return x, x[:, :3] ** 2


def backward(model: Any, x: Any, y: Any) -> None:
    fl.nn.MeanSquaredError()(model(fl.input(x)), fl.no_grad(y)).backward()


def optimizer_of(model: Any, kind: str) -> Any:
    if kind == "adam":
        return fl.optim.AdamOptimizer(model.params(), 1e-2)
    return fl.optim.SGDOptimizer(model.params(), 1e-2, momentum=0.9)


def digest(model: Any) -> str:
    found = hashlib.sha256()
    for array in model.state_dict().values():
        found.update(array.tobytes())
    return found.hexdigest()


def train(
    rank: int,
    size: int,
    kind: str,
    steps: int = STEPS,
    leaves: int = 8,
    folder: str = "",
    sharded: bool = False,
) -> tuple[str, int]:
    """Train; with ``folder`` go on from there, and save at the end."""
    fl.set_seed(rank)  # of which rank 0's counts
    model = Net()
    fl.broadcast_parameters(model)
    if sharded:
        fully_sharded.SMALL_BYTES = 0
        fl.fully_shard(model)
    fl.distribute_module_grads(model, leaves=leaves)
    optimizer = optimizer_of(model, kind)
    begin = 0
    if folder:
        found = fl.load(folder, module=model, optimizer=optimizer, rng=True)
        begin = found.step if found else 0
    for step in range(begin, begin + steps):
        optimizer.zero_grad()
        for x, y in fl.leaves(model, *batch(step)):
            backward(model, x, y)
            numbers.generator().random()  # of the leaf's, also after its backward pass
        fl.optim.clip_grad_norm(model.params(), 0.1)
        optimizer.step()
    if folder:
        fl.save(folder, module=model, optimizer=optimizer, rng=True, step=begin + steps)
    assert model.unused.weight.grad is None
    assert model.count == begin + steps
    fl.barrier()  # nobody changes what all have in common
    return digest(model), int(numbers.generator().integers(1 << 30))


@pytest.mark.parametrize(
    ("kind", "leaves", "sharded"), [("adam", 8, False), ("sgd", 5, False), ("adam", 8, True)]
)
def test_any_number_of_ranks_computes_the_same_bits(
    ranks: Any, kind: str, leaves: int, sharded: bool
) -> None:
    expected = train(0, 1, kind, leaves=leaves)
    assert set(ranks.run(train, kind, STEPS, leaves, "", sharded)) == {expected}


@functools.cache
def after_a_thousand_steps(kind: str) -> tuple[str, int]:
    return train(0, 1, kind, 1000)


WORLDS: list[tuple[str, int]] = [(name, n) for name in ("shm", "gloo") for n in range(2, 9)]
WORLDS += [("hierarchical", 3), ("hierarchical", 4)]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["sgd", "adam"])
@pytest.mark.parametrize("world", WORLDS, ids=lambda world: f"{world[0]}-{world[1]}")
def test_a_thousand_steps_on_one_to_eight_ranks(
    pool: Any, world: tuple[str, int], kind: str
) -> None:
    name, size = world
    ranks = pool(size, **BACKENDS[name][1])
    found = ranks.run(train, kind, 1000, deadline=500.0)
    assert set(found) == {after_a_thousand_steps(kind)}


def gradients(rank: int, size: int, leaves: int, step: int) -> list[Any]:
    fl.set_seed(1)
    model = Net("float64")
    model.dropout.ratio = 0.0
    if leaves:
        fl.distribute_module_grads(model, leaves=leaves)
        for x, y in fl.leaves(model, *batch(step, "float64")):
            backward(model, x, y)
    else:
        backward(model, *batch(step, "float64"))
    return [None if p.grad is None else p.grad.copy() for p in model.params()]


@pytest.mark.parametrize("step", [0, 1, 2])
def test_gradients_are_those_of_the_mean_over_the_whole_batch(ranks: Any, step: int) -> None:
    expected = gradients(0, 1, 0, step)
    for of_rank in ranks.run(gradients, 8, step):
        assert [g is None for g in of_rank] == [False] * 5 + [True] * 2
        for got, wanted in zip(of_rank[:5], expected[:5], strict=True):
            np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-12)


def test_going_on_with_other_numbers_of_ranks_ends_with_the_same_bits(
    pool: Any, tmp_path: Path
) -> None:
    expected = train(0, 1, "adam", 6)
    run = str(tmp_path / "run")
    train(0, 1, "adam", 1, 8, run)  # on one rank, then on three,
    pool(3, params={"BACKEND": "gloo"}).run(train, "adam", 2, 8, run)
    pair = pool(2, params={"BACKEND": "shm"})  # then on two, that have one model in common
    assert set(pair.run(train, "adam", 3, 8, run, True)) == {expected}


@on_ranks()
def test_leaves_of_a_sharded_module_take_the_place_of_its_own_sums(rank: int, size: int) -> None:
    """Passes outside of a loop over leaves are refused, as without sharding."""
    fully_sharded.SMALL_BYTES = 0
    model = fl.nn.Linear(3, 2)
    fl.fully_shard(model)
    fl.distribute_module_grads(model, leaves=4)
    with pytest.raises(RuntimeError, match="outside of a loop over"):
        model(fl.input(np.ones((2, 3), np.float32))).mean().backward()
    fl.fully_shard(model)  # back to sums over whole passes
    model(fl.input(np.ones((2, 3), np.float32))).mean().backward()
    assert model.params()[0].grad is not None
