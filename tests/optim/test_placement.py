"""Optimizers of parameters that lie elsewhere: they step what their placement hands out."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from flashlight_py.autograd import Variable, param
from flashlight_py.optim import AdamOptimizer, SGDOptimizer
from flashlight_py.optim.optimizer import Placement, Shards
from tests.optim.test_optimizers import RULES


class Notes(Shards):
    """Shards of a single process, which write down what they are asked."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def attach(self, optimizer: Any) -> None:
        self.calls.append(type(optimizer).__name__)

    @contextmanager
    def changing(self, what: str) -> Iterator[None]:
        self.calls.append(what)
        yield
        self.calls.append("changed")


class Pieces(Placement):
    """State lies backwards and flat, and each parameter is stepped in three pieces."""

    def __init__(self, shards: Shards, shape: tuple[int, ...]) -> None:
        self.shards, self.shape = shards, shape

    def zeros(self, variable: Variable, dtype: Any) -> np.ndarray:
        return np.zeros(int(np.prod(self.shape)), dtype)[::-1]

    def pieces(self, variable: Variable, states: Sequence[Any]) -> list[Any]:
        arrays = [variable.data.reshape(-1), variable.grad.reshape(-1)]
        arrays += [state[::-1] for state in states]
        cuts = [slice(0, 1), slice(1, 1), slice(1, None)]
        return [tuple(array[cut] for array in arrays) for cut in cuts]

    def whole(self, state: Any) -> Any:
        return state[::-1].reshape(self.shape).copy()

    def put(self, state: Any, value: Any) -> None:
        state[::-1] = value.reshape(-1)


def arrays(seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape).astype("float32") for shape in ((3, 7), (5,), (2, 2))]


def parameters(*shards: Notes) -> list[Variable]:
    """Return three; as many as there are shards lie in pieces."""
    variables = [param(array) for array in arrays(0)]
    for variable, each in zip(variables, shards, strict=False):
        variable.placement = Pieces(each, variable.shape)
    return variables


def step(optimizer: Any, seed: int) -> None:
    for variable, grad in zip(optimizer.params, arrays(seed), strict=True):
        variable.grad = grad
    optimizer.step(0.5)


def same_state(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    for name in one.keys() - {"lr"}:
        for ours, theirs in zip(one[name], other[name], strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("rule", ["sgd", "nesterov", "adam_decoupled"])
def test_steps_in_pieces_are_those_of_the_whole(rule: str) -> None:
    """Also from a loaded state, beside a parameter that is no one's but this process's."""
    first, second, make = Notes(), Notes(), RULES[rule]
    straight, optimizer = make(parameters()), make(parameters(first, second))
    for seed in (1, 2):
        step(straight, seed)
        step(optimizer, seed)
    same_state(optimizer.state_dict(), straight.state_dict())
    again = make(optimizer.params)
    again.load_state_dict(straight.state_dict())
    step(straight, 3)
    step(again, 3)
    same_state(again.state_dict(), straight.state_dict())
    for ours, theirs in zip(again.params, straight.params, strict=True):
        np.testing.assert_array_equal(ours.data, theirs.data)
    name = type(optimizer).__name__
    assert first.calls == second.calls
    assert first.calls == [
        name, *[f"{name}.step", "changed"] * 2, name, f"{name}.step", "changed",
    ]  # fmt: skip


def test_one_module_s_parameters_change_together() -> None:
    shards = Notes()
    step(SGDOptimizer(parameters(shards, shards), 0.1), 1)
    assert shards.calls == ["SGDOptimizer", "SGDOptimizer.step", "changed"]


def test_a_parameter_that_was_sharded_afterwards_is_refused() -> None:
    optimizer = SGDOptimizer(parameters(), 0.1)
    optimizer.params[1].placement = Pieces(Notes(), (5,))
    with pytest.raises(RuntimeError, match=r"parameter 1 \(shape \(5,\)\) was sharded after"):
        step(optimizer, 1)
    np.testing.assert_array_equal(optimizer.params[0].data, arrays(0)[0])


def test_state_of_another_shape_is_refused() -> None:
    optimizer = AdamOptimizer(parameters(Notes()), 0.1)
    state = optimizer.state_dict()
    state["mean"][0] = state["mean"][0].reshape(-1)
    with pytest.raises(ValueError, match=r"'mean' of parameter 0 has shape \(21,\), expected \(3"):
        optimizer.load_state_dict(state)
