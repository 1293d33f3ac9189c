"""Every function and every optimizer: a captured step has the bits of the eager one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.autograd.cases import CASES, Case
from tests.tape.steps import assert_same_bits, optimizers, twins

STEPS = 100


def stepping(case: Case, dtype: Any) -> Callable[[], tuple[Any, ...]]:
    """What makes a step that differentiates ``case``, and the variables it changes."""

    def make() -> tuple[Any, ...]:
        params = [fl.param(array.astype(dtype)) for array in case.arrays]
        optimizer = fl.optim.SGDOptimizer(params, lr=1e-4, momentum=0.5)

        def step(*noise: np.ndarray) -> Any:
            optimizer.zero_grad()
            given = [param + fl.input(each) for param, each in zip(params, noise, strict=True)]
            out = case.ours(*given)
            loss = (out * out).sum()
            loss.backward()
            optimizer.step()
            return out, loss

        return step, params

    return make


# What an index by truth values returns may have any shape.
CAPTURED = [case for case in CASES if case.name != "index_mask"]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", CAPTURED, ids=[case.name for case in CAPTURED])
def test_function(case: Case, dtype: str) -> None:
    random = np.random.default_rng(1)
    eager, captured = twins(stepping(case, dtype))
    for _ in range(STEPS):
        noise = [np.asarray(random.random(a.shape) / 100, dtype) for a in case.arrays]
        assert_same_bits(eager.step(*noise), captured.step(*noise))
    captured.assert_replayed(STEPS)
    assert_same_bits(eager.state(), captured.state())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", optimizers())
def test_optimizer(name: str, dtype: str) -> None:
    def make() -> tuple[Any, ...]:
        fl.set_seed(3)
        model = fl.nn.Sequential(fl.nn.Linear(5, 7), fl.nn.Tanh(), fl.nn.Linear(7, 3)).astype(dtype)
        optimizer = optimizers()[name](model.params())

        def step(x: np.ndarray, y: np.ndarray) -> Any:
            optimizer.zero_grad()
            scores = fl.autograd.functions.log_softmax(model(fl.input(x)))
            loss = fl.autograd.functions.categorical_cross_entropy(scores, fl.input(y))
            loss.backward()
            optimizer.step()
            return loss

        return step, model.params(), optimizer

    random = np.random.default_rng(1)
    eager, captured = twins(make)
    for number in range(STEPS):
        x, y = random.random((4, 5)).astype(dtype), random.integers(-1, 3, 4)
        for each in (eager, captured):
            each.optimizer.lr = 1e-3 / (1 + number)  # read by every replay
        assert_same_bits(eager.step(x, y), captured.step(x, y))
    captured.assert_replayed(STEPS)
    assert_same_bits(eager.state(), captured.state())
