"""Gradient clipping by the norm over all gradients, and by element."""

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flashlight_py.autograd import param
from flashlight_py.optim import SGDOptimizer, clip_grad_norm, clip_grad_value
from tests.tables import for_each
from tests.tape.steps import compare, training


@for_each(
    "first limit norm scaled",
    [
        ([3, 0], 1, 5, [[0.6, 0], [0, 0.8]]),
        ([3, 0], 5, 5, [[3, 0], [0, 4]]),
        ([3e30, 4e30], 1, 5e30, [[0.6, 0.8], [0, 8e-31]]),  # squares overflow
        ([math.inf, 0], 1, math.inf, [[math.inf, 0], [0, 4]]),
        ([math.nan, 0], 1, math.nan, [[math.nan, 0], [0, 4]]),
    ],
)
def test_clip_grad_norm_scales_all_gradients_in_place(
    first: list[float], limit: float, norm: float, scaled: list[list[float]]
) -> None:
    a, b, without = (param(np.zeros(2, "float32")) for _ in range(3))
    a.grad, b.grad = grads = np.array(first, "float32"), np.array([0, 4], "float32")
    np.testing.assert_allclose(clip_grad_norm([a, b, without], limit), norm, rtol=1e-6)
    np.testing.assert_allclose(grads, scaled, rtol=1e-6)
    assert [a.grad is grads[0], b.grad is grads[1], without.grad] == [True, True, None]


def test_clip_grad_norm_handles_missing_gradients_and_bad_arguments() -> None:
    variables = [param(np.zeros(1))]
    assert clip_grad_norm(variables, 1) == 0
    with pytest.raises(ValueError, match="max_norm must be at least 0"):
        clip_grad_norm(variables, -1)
    with pytest.raises(ValueError, match="at least one parameter"):
        clip_grad_norm([], 1)


@for_each("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_clip_grad_value_limits_each_element_in_place(dtype: str) -> None:
    dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    a, b = param(np.zeros(4, dtype)), param(np.zeros(1, dtype))
    a.grad = grad = np.array([-3, 0.5, 2, math.nan], dtype)
    clip_grad_value([a, b], 1)
    assert a.grad is grad
    np.testing.assert_array_equal(grad.astype("f4"), [-1, 0.5, 1, math.nan])
    assert b.grad is None
    with pytest.raises(ValueError, match="clip_value must be at least 0"):
        clip_grad_value([a], -1)


@for_each("dtype", ["float16", "float32"])
def test_clipping_ignores_numpy_errstate(dtype: str) -> None:
    a = param(np.zeros(5, dtype))
    a.grad = np.array([-3, 1e-7, 0.5, math.inf, math.nan], dtype)
    expected = a.grad.copy()
    with np.errstate(all="raise"):
        clip_grad_value([a], 1e300)
        np.testing.assert_array_equal(a.grad, expected)
        clip_grad_value([a], 1e-300)
        np.testing.assert_array_equal(a.grad, [0, 0, 0, 0, math.nan])
        a.grad = np.array([4e4, 0, 1e-7, -3e4, 0], dtype)
        assert clip_grad_norm([a], 1) == pytest.approx(5e4, rel=1e-3)
    np.testing.assert_allclose(a.grad, [0.8, 0, 2e-12, -0.6, 0], rtol=1e-3, atol=1e-7)


def test_clip_grad_value_is_captured() -> None:
    def make() -> Any:
        x = param(np.ones((3, 4), "float32"))
        loss_of = lambda factor: (x * factor).sum()  # noqa: E731
        return training(SGDOptimizer([x], 0.1), loss_of, lambda: clip_grad_value([x], 2.0)), x

    compare(make, [np.asarray(number, "float32") for number in range(5)])
