"""Sums and means of float16 and bfloat16 over more elements than these dtypes can count."""

from typing import Any

import ml_dtypes
import numpy as np

from flashlight_py.autograd import functions as F
from flashlight_py.autograd import param
from flashlight_py.optim import clip_grad_norm
from tests.tables import for_each

COUNT = 70_000  # above the largest float16
MANY = 5_000  # above the largest float16 integer n with n + 1 != n
DTYPES = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
LABELS = np.zeros(COUNT, np.int64)


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float16)


ALTERNATING = ones(COUNT)
ALTERNATING[::2] = -1
# Functions, inputs, and the value and gradients that are expected after one rounding.
LARGE: dict[str, tuple[Any, tuple[np.ndarray, ...], float, tuple[Any, ...]]] = {
    "mean": (F.mean, (ones(COUNT),), 1, (1 / COUNT,)),
    "mean of an axis": (lambda x: F.mean(x, 0), (ones(COUNT),), 1, (1 / COUNT,)),
    "sum": (lambda x: F.sum(x, 0), (ones(MANY, 2),), MANY, (1,)),
    "sum of a broadcast": (
        lambda x, bias: F.sum(x + bias, 0), (ones(MANY, 2), ones(2)), 2 * MANY, (1, MANY)),
    "linear": (F.linear, (ones(MANY, 1), ones(2, 1), ones(2)), 2, (2, MANY, MANY)),
    "mean_squared_error": (
        F.mean_squared_error, (2 * ones(COUNT), ones(COUNT)), 1, (2 / COUNT, -2 / COUNT)),
    "cross_entropy": (lambda x: F.categorical_cross_entropy(x, LABELS), (-2 * ones(COUNT, 1),), 2,
        (-1 / COUNT,)),
    "var": (F.var, (ALTERNATING,), 1, (2 / COUNT * ALTERNATING.astype(float),)),
    "max": (F.max, (ones(COUNT),), 1, (1 / COUNT,)),
    "min": (F.min, (ones(COUNT),), 1, (1 / COUNT,)),
    "softmax": (lambda x: F.softmax(x, 0), (0 * ones(MANY, 2),), 1 / MANY, (0,)),
    "log_softmax": (lambda x: F.log_softmax(x, 0), (0 * ones(MANY, 2),), -np.log(MANY), (0,)),
}  # fmt: skip


@for_each("dtype", DTYPES)
@for_each("name", LARGE)
def test_large_arrays_are_computed_in_float32_and_rounded_once(name: str, dtype: Any) -> None:
    function, arrays, value, slopes = LARGE[name]
    variables = [param(array.astype(dtype)) for array in arrays]
    result = function(*variables)
    result.backward(np.ones_like(result.array))
    rtol = {"log_softmax": 4e-3, "var": 1e-2}.get(name, 0)
    atol = 1e-6 if name.endswith("softmax") else 0  # of gradients that are 0
    results = result.array, *(variable.grad for variable in variables)
    for array, expected in zip(results, (value, *slopes), strict=True):
        assert array.dtype == dtype
        rounded = np.broadcast_to(np.asarray(expected).astype(dtype).astype(float), array.shape)
        np.testing.assert_allclose(array.astype(float), rounded, rtol, atol)


def test_other_dtypes_behave_as_in_numpy() -> None:
    integers = np.array([1, 2], np.int8)
    for function, expected in (
        (F.sum, "int64"),
        (F.softmax, "float16"),
        (F.log_softmax, "float16"),
    ):
        assert function(integers).dtype == expected


@for_each("dtype", DTYPES)
def test_clip_grad_norm_applies_small_factors(dtype: Any) -> None:
    x = param(ones(4).astype(dtype))
    x.grad = np.full(4, 32_768, dtype)
    assert clip_grad_norm([x], 1e-3) == 65_536
    assert x.grad.dtype == dtype
    assert np.all(x.grad == dtype.type(1e-3 / 2))


@for_each("dtype", DTYPES)
@for_each("shapes", [((3, 4), (4, 5)), ((2, 3, 4), (4, 5)), ((4,), (4, 2))])
def test_products_are_computed_in_float32_and_rounded_once(shapes: Any, dtype: Any) -> None:
    random = np.random.default_rng(0)
    narrow = [param(random.standard_normal(shape).astype(dtype)) for shape in shapes]
    wide = [param(variable.array.astype(np.float32)) for variable in narrow]
    for variables in (narrow, wide):
        F.sum(variables[0] @ variables[1]).backward()
    assert np.array_equal((narrow[0] @ narrow[1]).array, (wide[0] @ wide[1]).array.astype(dtype))
    for variable, other in zip(narrow, wide, strict=True):
        assert np.array_equal(variable.grad, other.grad.astype(dtype))


@for_each("dtype", DTYPES)
def test_dropout_keeps_the_dtype(dtype: Any) -> None:
    x = param(ones(3, 4).astype(dtype))
    result = F.dropout(x, 0.3)
    result.backward(result.array)
    assert result.dtype == x.grad.dtype == dtype


@for_each("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_astype_accepts_the_name_bfloat16(dtype: str) -> None:
    x = param(np.ones(2, np.float32))
    result = F.astype(x, dtype)
    assert result.dtype.name == dtype
    result.backward(3 * result.array)
    assert x.grad.dtype == np.float32
    np.testing.assert_array_equal(x.grad, [3, 3])
