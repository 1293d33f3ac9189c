"""Containers and Sequential."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.autograd import Variable, input, param
from flashlight_py.autograd.graph import Part
from flashlight_py.nn import Container, Linear, ReLU, Sequential, View, recompute
from flashlight_py.random import set_seed
from tests.tape.steps import compare, training


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_map_and_a_relu_are_one_operation_with_the_same_bits(bias: bool) -> None:
    set_seed(0)
    model = Sequential(ReLU(), Linear(3, 4, bias), ReLU(), ReLU(), Linear(4, 4), Linear(4, 2, bias))
    model.add(ReLU())
    assert len(model) == 7
    array = np.random.default_rng(0).standard_normal((5, 3)).astype("float32")

    def run(forward: Any) -> list[Any]:
        model.zero_grad()
        x = param(array)
        result = forward(x)
        result.backward(np.ones(result.shape, "float32"))
        return [result.array, x.grad, *(each.grad for each in model.params())]

    def one_by_one(x: Variable) -> Variable:
        for position in range(len(model)):
            x = model[position](x)
        return x

    for together, alone in zip(run(model), run(one_by_one), strict=True):
        assert together.tobytes() == alone.tobytes()


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize("way", ["before_forward", "recompute", "forward"])
def test_a_linear_map_and_a_relu_are_called_one_by_one_where_calls_do_more(
    position: int, way: str
) -> None:
    model, called = Sequential(Linear(2, 2), ReLU()), []
    module = model[position]
    if way == "before_forward":
        module.before_forward = called.append
    elif way == "recompute":
        recompute(module)
        called.append(module)  # what it does is in its own tests
    else:
        forward = module.forward
        module.forward = lambda x: (called.append(module), forward(x))[1]  # type: ignore[method-assign,func-returns-value]
    x = param(np.array([[1.0, -1.0]], "float32"))
    result = model(x)
    assert isinstance(result.node, Part) == (way == "recompute" and position == 1)
    result.sum().backward()
    assert called == [module]
    expected = np.maximum(model[0](x).array, 0)
    np.testing.assert_array_equal(result.array, expected)


def test_empty_sequential_is_the_identity() -> None:
    x = input(np.ones(1))
    assert Sequential()(x) is x


def test_container_finds_members_and_attributes() -> None:
    class Residual(Container):
        def __init__(self) -> None:
            super().__init__(Linear(2, 2))
            self.shortcut = Linear(2, 2, bias=False)

        def forward(self, x: Variable) -> Variable:
            return self[0](x) + self.shortcut(x)

    model = Residual()
    assert list(model.named_params()) == ["0.weight", "0.bias", "shortcut.weight"]
    x = input(np.ones((1, 2), "float32"))
    np.testing.assert_array_equal(model(x).array, model[0](x).array + model.shortcut(x).array)


@pytest.mark.parametrize("member", [Linear, "Linear", None, np.ones(1)])
def test_only_modules_can_be_added(member: Any) -> None:
    with pytest.raises(TypeError, match="Sequential holds modules"):
        Sequential(member)


def test_repr_shows_the_structure() -> None:
    model = Sequential(Linear(2, 3), ReLU(), View((-1,)))
    assert repr(model) == "Sequential(Linear(2, 3, bias=True), ReLU(), View((-1,)))"


@pytest.mark.parametrize("kind", [list, tuple])
def test_members_may_be_passed_as_a_list(kind: Any) -> None:
    members = Linear(2, 3), ReLU()
    model = Sequential(kind(members))
    assert tuple(model) == members
    assert list(model.named_params()) == ["0.weight", "0.bias"]
    with pytest.raises(TypeError, match="Sequential holds modules, got int"):
        Sequential([Linear(2, 3), 3])  # type: ignore[list-item]


def test_a_moving_average_follows_the_parameters_and_copies_buffers(tmp_path: Path) -> None:
    model = fl.nn.Sequential(fl.nn.Linear(3, 2), fl.nn.BatchNorm(2))
    average = fl.nn.ExponentialMovingAverage(model, 0.75)
    first, x = model.params()[0].array.copy(), fl.input(np.ones((4, 3), "float32"))
    np.testing.assert_array_equal(average(x).array, model.eval()(x).array)
    model.train()
    for _ in range(2):
        model.params()[0].array[...] += 1
        model[1].running_mean[...] += 1
        average.update(model)
    np.testing.assert_allclose(average.module.params()[0].array, first + 0.4375 + 0.25, rtol=1e-6)
    np.testing.assert_array_equal(average.module[1].running_mean, [2, 2])
    assert not average(x).calc_grad
    fl.save(tmp_path, module=[model, average])
    other = fl.nn.ExponentialMovingAverage(model, 0.75)
    fl.load(tmp_path, module=[model, other])
    np.testing.assert_array_equal(other(x).array, average(x).array)
    average.train()  # as a parent does
    np.testing.assert_array_equal(other(x).array, average(x).array)
    with pytest.raises(ValueError, match="missing"):
        average.update(fl.nn.Linear(3, 2))
    with pytest.raises(ValueError, match="shape"):  # that would be broadcast
        fl.nn.ExponentialMovingAverage(fl.nn.Linear(3, 2)).update(fl.nn.Linear(3, 1))
    with pytest.raises(ValueError, match="decay must be 0 to 1, got 2"):
        fl.nn.ExponentialMovingAverage(model, 2)


def test_a_moving_average_of_half_precision_is_float32() -> None:
    model = fl.nn.Linear(1, 1).astype("float16")
    average = fl.nn.ExponentialMovingAverage(model, 0.999)
    begin = average.module.weight.array.copy()
    model.weight.array[...] += 1
    for _ in range(9):
        average.update(model)
    expected = begin + (model.weight.array - begin) * (1 - 0.999**9)
    np.testing.assert_allclose(average.module.weight.array, expected, rtol=1e-5)


def test_a_moving_average_is_captured() -> None:
    def make() -> Any:
        fl.set_seed(0)
        model = fl.nn.Linear(3, 2)
        average = fl.nn.ExponentialMovingAverage(model, 0.5)
        loss_of = lambda x: ((model(fl.input(x)) ** 2).mean(), average(fl.input(x)))  # noqa: E731
        optimizer = fl.optim.SGDOptimizer(model.params(), 0.1)
        return training(optimizer, loss_of, lambda: average.update(model)), model, average

    compare(make, list(np.random.default_rng(0).random((5, 4, 3)).astype("float32")))
