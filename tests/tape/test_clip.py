"""Limits on gradients in a captured step: the norm is a number that each replay computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.tape.steps import assert_same_bits, twins

X = np.random.default_rng(0).random((20, 4, 3))


@pytest.mark.parametrize("dtype", ["f4", "f8"])
def test_a_norm_is_computed_by_each_replay(dtype: str) -> None:
    def make() -> tuple[Any, ...]:
        fl.set_seed(1)
        model = fl.nn.Sequential(fl.nn.Linear(3, 5), fl.nn.Linear(5, 1)).astype(dtype)
        optimizer = fl.optim.SGDOptimizer(model.params(), lr=0.1, momentum=0.9)

        def step(x: np.ndarray) -> Any:
            loss = (model(fl.input(x)) ** 2).mean()
            loss.backward()
            norm = fl.optim.clip_grad_norm(model.params(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            return loss, norm

        return step, model.params(), optimizer

    eager, captured = twins(make)
    for number in range(20):  # two like each other, which must not make the norm a constant
        x = X[number // 5].astype(dtype)
        assert_same_bits(eager.step(x), captured.step(x))
        assert_same_bits(eager.state(), captured.state())
    captured.assert_replayed(20)


def test_a_norm_that_the_step_uses_ends_the_capture_with_the_line() -> None:
    weight = fl.param(np.ones(3))

    @fl.capture
    def step(x: np.ndarray) -> Any:
        weight.zero_grad()
        (weight * x).sum().backward()
        norm = fl.optim.clip_grad_norm([weight], 1.0)
        return norm > 2  # read

    with pytest.warns(RuntimeWarning, match=r"norm > 2  # read"):
        assert [step(np.full(3, each)) for each in (1.0, 1.0, 1.0, 1.0, 9.0, 1.0)] == [
            False, False, False, False, True, False
        ]  # fmt: skip
    assert step.replays == 0
