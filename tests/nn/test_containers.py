"""Containers and Sequential."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flashlight_py.autograd import Variable, input
from flashlight_py.nn import Container, Linear, ReLU, Sequential, Tanh, View


def test_sequential_chains_what_was_given_and_added() -> None:
    model = Sequential(Linear(2, 3), Tanh())
    model.add(Linear(3, 1))
    x = input(np.ones((4, 2), "float32"))
    expected = x
    for position in range(3):
        expected = model[position](expected)
    np.testing.assert_array_equal(model(x).array, expected.array)
    assert len(model) == 3


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
