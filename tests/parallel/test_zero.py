"""Sharding by gathering: the training of one process, with a part of everything on each rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.autograd import functions as F
from flashlight_py.parallel.zero import shard_by_gathering
from tests.distributed.conformance import ranks_in

BATCH, STEPS = 24, 4

ranks = ranks_in(("single", 1), ("gloo", 3), ("shm", 4), slow=[("shm", 2), ("mpi", 3)])


class Odd(fl.nn.Module):
    """Has parameters itself, around its parts: one product keeps its operands, one is of a matrix.

    The same layer is used twice, a row of the table is used by name, and nothing uses ``spare``.
    """

    def __init__(self) -> None:
        self.scale = fl.param(np.linspace(0.5, 1.5, 7))
        self.layer = fl.nn.Linear(7, 7, dtype="float64")
        self.table = fl.param(np.linspace(-1, 1, 49).reshape(7, 7))
        self.spare = fl.param(np.ones(5))
        self.frozen = fl.no_grad(np.full(7, 0.25))
        self.half: Any = None

    def forward(self, x: Any) -> Any:
        x = F.tanh(self.layer(x * self.scale))
        x = self.layer(x) @ self.table + self.frozen
        return x if self.half is None else x + F.astype(self.half, "float64")


def build(kind: str, seed: int = 0) -> Any:
    fl.set_seed(seed)
    odd = Odd()
    if kind == "two dtypes":
        odd.half = fl.param(np.linspace(0, 1, 7, dtype="float32"))
    return fl.nn.Sequential(
        fl.nn.Linear(6, 7, dtype="float64"),
        fl.nn.Tanh(),
        odd,
        fl.nn.Sequential(fl.nn.Linear(7, 33, dtype="float64"), fl.nn.ReLU()),
        fl.nn.Linear(33, 3, bias=False, dtype="float64"),
    )


def optimizer_of(model: Any, kind: str) -> Any:
    if kind != "adam":
        return fl.optim.SGDOptimizer(model.params(), 0.05, momentum=0.9, weight_decay=0.01)
    return fl.optim.AdamOptimizer(model.params(), 0.01, weight_decay=0.1)


def one_pass(model: Any, step: int, rank: int, size: int, passes: int = 1, part: int = 0) -> None:
    """Go through this rank's samples, of one of ``passes`` parts of a batch."""
    random = np.random.default_rng(step)
    x, y = random.standard_normal((BATCH, 6)), random.standard_normal((BATCH, 3))
    mine = np.s_[part::passes]
    rows = [array[mine][rank::size] for array in (x, y)]
    loss = fl.nn.MeanSquaredError()(model(fl.input(rows[0])), fl.no_grad(rows[1]))
    (loss / passes).backward()


def same(got: Any, expected: Any) -> None:
    """Compare arrays by name or number; a float32 among them has rounded what the others are."""
    assert got.keys() == expected.keys()
    rough = any(array.dtype == np.float32 for array in expected.values())
    for name, array in expected.items():
        assert got[name].dtype == array.dtype
        np.testing.assert_allclose(got[name], array, 0, 1e-6 if rough else 1e-12)


def train(kind: str, steps: range, state: Any = None, passes: int = 1) -> tuple[Any, Any]:
    """What one process makes of all samples."""
    model = build(kind)
    optimizer = optimizer_of(model, kind)
    if state is not None:
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
    for step in steps:
        optimizer.zero_grad()
        for part in range(passes):
            one_pass(model, step, 0, 1, passes, part)
        optimizer.step()
    return model.state_dict(), optimizer.state_dict()


def train_sharded(rank: int, size: int, kind: str, passes: int) -> tuple[Any, Any, Any]:
    """Begin as rank 0 does, wherever; return the states, and those of one step after loading."""
    model = build(kind, seed=rank)
    variables = model.params()
    shard_by_gathering(model)
    assert model.params() == variables
    optimizer = optimizer_of(model, kind)
    for step in range(STEPS):
        optimizer.zero_grad()
        for part in range(passes):
            one_pass(model, step, rank, size, passes, part)
        assert model[2].spare.grad is None
        optimizer.step()
    assert all(param.grad.ndim == 1 for param in variables if param.grad is not None)
    states = model.state_dict(), optimizer.state_dict()
    states = {name: array.copy() for name, array in states[0].items()}, states[1]
    same(model.eval().state_dict(), states[0])
    model.train()
    # The states of an unsharded run fit, whatever the number of ranks.
    others = train(kind, range(2))
    model.load_state_dict(others[0])
    optimizer.load_state_dict(others[1])
    one = fl.input(np.ones((2, 6)))
    plain = build(kind)
    plain.load_state_dict(others[0])
    np.testing.assert_allclose(model(one).array, plain(one).array, 0, 1e-12)
    optimizer.zero_grad()
    one_pass(model, 2, rank, size)
    optimizer.step()
    return (*states, model.state_dict())


@pytest.mark.parametrize("kind", ["sgd", "adam", "two dtypes"])
def test_trains_as_one_process_does(ranks: Any, kind: str) -> None:
    passes = 2 if kind == "adam" else 1
    expected = train(kind, range(STEPS), passes=passes)
    later = train(kind, range(2, 3), train(kind, range(2)))
    for parameters, state, after_loading in ranks.run(train_sharded, kind, passes):
        same(parameters, expected[0])
        for name in state.keys() - {"lr", "steps"}:
            same(dict(enumerate(state[name])), dict(enumerate(expected[1][name])))
        assert state.get("steps") == expected[1].get("steps")
        same(after_loading, later[0])
