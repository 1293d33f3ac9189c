"""Sums and means of float16 and bfloat16 over more elements than these dtypes can count."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flashlight_py.autograd import functions as F
from flashlight_py.autograd import input, param
from flashlight_py.autograd.variable import Variable
from flashlight_py.optim import clip_grad_norm
from tests.tables import for_each

COUNT = 70_000  # above the largest float16
MANY = 5_000  # above the largest float16 integer n with n + 1 != n


narrow: np.dtype[Any] = np.dtype(np.float16)


@pytest.fixture(params=[np.float16, ml_dtypes.bfloat16], autouse=True)
def _dtype(request: pytest.FixtureRequest) -> None:
    global narrow  # noqa: PLW0603 - of all tests here
    narrow = np.dtype(request.param)


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, narrow)


def check(leaf: Variable, expected: float) -> None:
    """Check that every element of the gradient is ``expected``, rounded once."""
    assert leaf.grad.dtype == narrow
    assert np.all(leaf.grad == narrow.type(expected))
    assert narrow.type(expected) != 0


@for_each("axis", [None, 0])
def test_mean_gradient_is_computed_in_float32(axis: int | None) -> None:
    x = param(ones(COUNT))
    result = F.mean(x, axis)
    assert result.array == 1
    result.backward()
    check(x, 1 / COUNT)


def test_sums_are_computed_in_float32() -> None:
    x, bias = param(ones(MANY, 2)), param(ones(2))
    total = F.sum(x, 0)
    assert total.dtype == narrow
    assert np.all(total.array == narrow.type(MANY))
    F.sum(x + bias, 0).backward(ones(2))
    check(bias, MANY)


def test_bias_gradient_is_summed_in_float32() -> None:
    weight, bias = param(ones(2, 1)), param(ones(2))
    F.linear(input(ones(MANY, 1)), weight, bias).backward(ones(MANY, 2))
    check(bias, MANY)
    check(weight, MANY)


def test_mean_squared_error_is_computed_in_float32() -> None:
    prediction, target = param(2 * ones(COUNT)), param(ones(COUNT))
    loss = F.mean_squared_error(prediction, target)
    assert loss.dtype == narrow
    assert loss.array == 1
    loss.backward()
    check(prediction, 2 / COUNT)
    check(target, -2 / COUNT)


def test_cross_entropy_is_computed_in_float32() -> None:
    logs = param(-2 * ones(COUNT, 1))
    loss = F.categorical_cross_entropy(logs, input(np.zeros(COUNT, np.int64)))
    assert loss.array == 2
    loss.backward()
    check(logs, -1 / COUNT)


def test_variance_is_computed_in_float32() -> None:
    array = ones(COUNT)
    array[::2] = -1
    x = param(array)
    result = F.var(x)
    assert result.array == 1
    result.backward()
    np.testing.assert_allclose(x.grad, 2 / COUNT * array.astype(float), rtol=1e-2)


def test_extrema_share_gradients_in_float32() -> None:
    for function in (F.max, F.min):
        x = param(ones(COUNT))
        function(x).backward()
        check(x, 1 / COUNT)


def test_softmax_is_computed_in_float32() -> None:
    x = param(0 * ones(MANY, 2))
    F.softmax(x, 0).backward(ones(MANY, 2))
    assert np.all(F.softmax(x, 0).array == narrow.type(1 / MANY))
    logs = F.log_softmax(x, 0).array.astype(float)
    np.testing.assert_allclose(logs, -np.log(MANY), rtol=4e-3)
    assert np.abs(x.grad).max() < 1e-6


def test_other_dtypes_behave_as_in_numpy() -> None:
    integers = np.array([1, 2], np.int8)
    for function, expected in (
        (F.sum, "int64"),
        (F.softmax, "float16"),
        (F.log_softmax, "float16"),
    ):
        assert function(integers).dtype == expected


def test_clip_grad_norm_applies_small_factors_to_float16() -> None:
    x = param(ones(4))
    x.grad = np.full(4, 32_768, narrow)
    assert clip_grad_norm([x], 1e-3) == 65_536
    check(x, 1e-3 / 2)


@for_each("shapes", [((3, 4), (4, 5)), ((2, 3, 4), (4, 5)), ((4,), (4, 2))])
def test_products_are_computed_in_float32_and_rounded_once(shapes: Any) -> None:
    random = np.random.default_rng(0)
    a, b = (random.standard_normal(shape).astype(narrow) for shape in shapes)
    x, y = param(a), param(b)
    wide_x, wide_y = param(a.astype(np.float32)), param(b.astype(np.float32))
    result, wide = x @ y, wide_x @ wide_y
    assert np.array_equal(result.array, wide.array.astype(narrow))
    F.sum(result).backward()
    F.sum(wide).backward()
    for variable, other in ((x, wide_x), (y, wide_y)):
        assert np.array_equal(variable.grad, other.grad.astype(narrow))


def test_dropout_keeps_the_dtype() -> None:
    x = param(ones(3, 4))
    result = F.dropout(x, 0.3)
    result.backward(result.array)
    assert result.dtype == x.grad.dtype == narrow


@for_each("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_astype_accepts_the_name_bfloat16(dtype: str) -> None:
    x = param(np.ones(2, np.float32))
    result = F.astype(x, dtype)
    assert result.dtype.name == dtype
    result.backward(3 * result.array)
    assert x.grad.dtype == np.float32
    np.testing.assert_array_equal(x.grad, [3, 3])
