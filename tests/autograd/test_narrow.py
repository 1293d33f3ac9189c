"""float16 with more elements than it can count: sums, means and their gradients."""

from __future__ import annotations

import numpy as np
import pytest

from flashlight_py.autograd import functions as F
from flashlight_py.autograd import input, param
from flashlight_py.autograd.variable import Variable
from flashlight_py.optim import clip_grad_norm

COUNT = 70_000  # above the largest number of float16
MANY = 5_000  # above what it can count by ones


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float16)


def check(leaf: Variable, expected: float) -> None:
    """Every element of the gradient is ``expected``, rounded once."""
    assert leaf.grad is not None
    assert leaf.grad.dtype == np.float16
    assert np.all(leaf.grad == np.float16(expected))
    assert np.float16(expected) != 0


@pytest.mark.parametrize("axis", [None, 0])
def test_the_gradient_of_a_mean(axis: int | None) -> None:
    x = param(ones(COUNT))
    result = F.mean(x, axis)
    assert result.array == 1
    result.backward()
    check(x, 1 / COUNT)


def test_sums_over_a_dimension_and_over_broadcast_ones() -> None:
    x, bias = param(ones(MANY, 2)), param(ones(2))
    total = F.sum(x, 0)
    assert total.dtype == np.float16
    assert total.array.tolist() == [MANY, MANY]
    F.sum(x + bias, 0).backward(ones(2))
    check(bias, MANY)


def test_the_gradient_of_a_bias() -> None:
    weight, bias = param(ones(2, 1)), param(ones(2))
    F.linear(input(ones(MANY, 1)), weight, bias).backward(ones(MANY, 2))
    check(bias, MANY)
    check(weight, MANY)


def test_the_mean_of_squared_differences() -> None:
    prediction, target = param(2 * ones(COUNT)), param(ones(COUNT))
    loss = F.mean_squared_error(prediction, target)
    assert loss.dtype == np.float16
    assert loss.array == 1
    loss.backward()
    check(prediction, 2 / COUNT)
    check(target, -2 / COUNT)


def test_the_mean_of_cross_entropies() -> None:
    logs = param(-2 * ones(COUNT, 1))
    loss = F.categorical_cross_entropy(logs, input(np.zeros(COUNT, np.int64)))
    assert loss.array == 2
    loss.backward()
    check(logs, -1 / COUNT)


def test_the_variance() -> None:
    array = ones(COUNT)
    array[::2] = -1
    x = param(array)
    result = F.var(x)
    assert result.array == 1
    result.backward()
    assert x.grad is not None
    np.testing.assert_allclose(x.grad, 2 / COUNT * array.astype(float), rtol=5e-3)


def test_extrema_share_among_many() -> None:
    for function in (F.max, F.min):
        x = param(ones(COUNT))
        function(x).backward()
        check(x, 1 / COUNT)


def test_softmax_over_many_classes() -> None:
    x = param(np.zeros((MANY, 2), np.float16))
    F.softmax(x, 0).backward(ones(MANY, 2))
    assert np.all(F.softmax(x, 0).array == np.float16(1 / MANY))
    np.testing.assert_allclose(F.log_softmax(x, 0).array, -np.log(MANY), rtol=1e-3)
    assert x.grad is not None
    assert not x.grad.any()


def test_other_dtypes_are_numpy_s() -> None:
    whole = np.array([1, 2], np.int8)
    for function, expected in (
        (F.sum, "int64"),
        (F.softmax, "float16"),
        (F.log_softmax, "float16"),
    ):
        assert function(whole).dtype == expected


def test_clipping_by_a_small_factor() -> None:
    x = param(ones(4))
    x.grad = np.full(4, 32_768, np.float16)
    assert clip_grad_norm([x], 1e-3) == 65_536
    check(x, 1e-3 / 2)
