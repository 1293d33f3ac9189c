"""Leaves whose values change between a forward pass and its backward pass."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.autograd import Variable, param
from flashlight_py.autograd import functions as F
from tests.tables import for_each


def step(model: fl.nn.Module) -> None:
    for variable in model.params():
        variable.grad = np.ones(variable.shape)
    fl.optim.SGDOptimizer(model.params(), lr=0.5).step()
    for variable in model.params():
        variable.zero_grad()


def assign(model: fl.nn.Module) -> None:
    weight = model.params()[0]
    weight.array = weight.array + 1


def load(model: fl.nn.Module) -> None:
    model.load_state_dict({name: array + 1 for name, array in model.state_dict().items()})


def assign_and_toggle(model: fl.nn.Module) -> None:
    assign(model)
    for on in (False, True):
        model.params()[0].calc_grad = on


CHANGES = [step, assign, load]
LOSSES: dict[str, Callable[[fl.nn.Module, Variable], Variable]] = {
    "linear": lambda model, x: model(x),
    "relu": lambda model, x: F.relu(model.params()[0]),
    "recompute": lambda model, x: fl.recompute(model)(x),
    "exp": lambda model, x: F.exp(model.params()[0]),
    "mul": lambda model, x: model.params()[0] * model.params()[0],
    # Views of the parameter show the change, in every operation.
    "transpose": lambda model, x: x @ model.params()[0].T,
}


def made() -> tuple[fl.nn.Module, Variable]:
    return fl.nn.Sequential(fl.nn.Linear(2, 2)).astype(np.float64), param(np.ones((3, 2)))


@for_each("change", [*CHANGES, assign_and_toggle])
@for_each("name", LOSSES)
def test_backward_raises_if_the_package_changed_a_leaf(name: str, change: Any) -> None:
    model, x = made()
    loss, again = (LOSSES[name](model, x).sum() for _ in range(2))
    again.backward(retain_graph=True)
    for variable in (*model.params(), x):
        variable.zero_grad()
    change(model)
    for graph in (loss, again):
        with pytest.raises(RuntimeError, match=rf"was changed after {name}\(\) had used it"):
            graph.backward()
    assert all(variable.grad is None for variable in (*model.params(), x))
    LOSSES[name](model, x).sum().backward()  # a recomputed pass has no error
    assert model.params()[0].grad is not None


@for_each("function", [F.linear, F.linear_relu])
def test_backward_names_linear_if_its_weight_or_input_changed(function: Any) -> None:
    x, weight, bias = np.ones((3, 2)), np.ones((2, 2)), np.ones(2)
    for learns in range(3):
        args = [fl.input(variable) for variable in (x, weight, bias)]
        args[learns].calc_grad = True
        loss = function(*args).sum()
        args[learns].array = args[learns].array + 1
        with pytest.raises(RuntimeError, match=r"was changed after linear\(\) had used it"):
            loss.backward()


@for_each("change", CHANGES)
def test_backward_works_if_the_graph_lacks_the_changed_leaf(change: Any) -> None:
    (model, x), (other, _) = made(), made()
    change(other)
    loss = model(x).sum()
    change(other)
    loss.backward(retain_graph=True)
    loss.backward()
    np.testing.assert_array_equal(model.params()[1].grad, [6, 6])  # sum of both passes


def test_result_that_became_a_leaf_can_change_and_train() -> None:
    made_of_data = Variable(np.ones(2)) * 2.0
    made_of_data.calc_grad = True
    made_of_data.array = np.full(2, 3.0)
    F.sum(made_of_data * made_of_data).backward()
    np.testing.assert_array_equal(made_of_data.grad, [6, 6])


def test_parameter_without_gradient_is_not_marked_as_changed() -> None:
    model, x = made()
    loss = model(x).sum()
    fl.optim.SGDOptimizer(model.params(), lr=0.5).step()
    loss.backward()
    assert model.params()[0].grad is not None


TABLE, LOGS = np.arange(12.0).reshape(4, 3), np.log(np.full((2, 3, 4), 0.25))
INTEGERS: dict[str, tuple[Any, Callable[[Any, Any], Variable], Any]] = {
    "embedding": (TABLE, F.embedding, [1, 3, 1]),
    "gather": (TABLE, lambda x, index: F.gather(x, index, 0), [[1, 3, 1]]),
    "scatter_add": (TABLE, lambda x, index: F.scatter_add(x, index, x[:1] * 2, 0), [[1, 3, 1]]),
    "index": (TABLE, lambda x, index: x[index], [1, 3, 1]),
    "index by a tuple": (TABLE, lambda x, index: x[:, index], [1, 2, 1]),
    "labels": (TABLE, F.categorical_cross_entropy, [1, 2, 1, 0]),
    "targets": (LOGS, F.connectionist_temporal_classification, [[1, 2], [3, 1]]),
    "input lengths": (LOGS,
        lambda x, lengths: F.connectionist_temporal_classification(x, TARGETS, lengths), [2, 3]),
    "target lengths": (
        LOGS,
        lambda x, lengths: F.connectionist_temporal_classification(x, TARGETS, None, lengths),
        [1, 2],
    ),
}  # fmt: skip
TARGETS = np.array([[1, 2], [3, 1]])


@for_each("value", [0, 2, 4, 10**7, -(10**7)])
@for_each("name", INTEGERS)
def test_gradients_use_copies_of_integer_inputs(name: str, value: int) -> None:
    array, function, values = INTEGERS[name]
    gradients = []
    for is_refilled in (False, True):
        x, integers = param(array.copy()), np.array(values)
        loss = (function(x, integers) ** 2).sum()
        if is_refilled:
            integers[...] = value
        loss.backward()
        gradients.append(x.grad)
    np.testing.assert_array_equal(*gradients)
