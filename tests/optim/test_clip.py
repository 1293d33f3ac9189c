"""Clipping by the joint norm."""

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from flashlight_py.autograd import Variable, param
from flashlight_py.optim import clip_grad_norm, clip_grad_value
from tests.tape.steps import compare


def three() -> list[Variable]:
    """Gradients of joint norm 5, and a parameter without one."""
    a, b, c = (param(np.zeros(2, "float32")) for _ in range(3))
    a.grad, b.grad = np.array([3, 0], "float32"), np.array([0, 4], "float32")
    return [a, b, c]


def test_scales_all_together_in_place() -> None:
    variables = three()
    grads = [v.grad for v in variables]
    assert clip_grad_norm(variables, 1) == 5
    np.testing.assert_allclose(variables[0].grad, [0.6, 0], rtol=1e-6)
    np.testing.assert_allclose(variables[1].grad, [0, 0.8], rtol=1e-6)
    assert all(v.grad is g for v, g in zip(variables, grads, strict=True))


def test_leaves_small_gradients_alone() -> None:
    variables = three()
    assert clip_grad_norm(variables, 5) == 5
    np.testing.assert_array_equal(variables[1].grad, [0, 4])


def test_no_gradient_at_all() -> None:
    assert clip_grad_norm([param(np.zeros(1))], 1) == 0


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_norm_that_is_not_finite_leaves_gradients_as_they_are(value: float) -> None:
    variables = three()
    variables[0].grad[0] = value
    assert not math.isfinite(clip_grad_norm(variables, 1))
    np.testing.assert_array_equal(variables[1].grad, [0, 4])


def test_squares_do_not_overflow() -> None:
    x = param(np.zeros(2, "float32"))
    x.grad = np.array([3e30, 4e30], "float32")
    assert clip_grad_norm([x], 1) == pytest.approx(5e30, rel=1e-6)
    np.testing.assert_allclose(x.grad, [0.6, 0.8], rtol=1e-6)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="max_norm must be at least 0"):
        clip_grad_norm(three(), -1)
    with pytest.raises(ValueError, match="at least one parameter"):
        clip_grad_norm([], 1)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
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


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_limits_outside_the_range_of_the_dtype_are_silent_if_numpy_raises(dtype: str) -> None:
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

        def step(factor: np.ndarray) -> Any:
            x.zero_grad()
            (x * factor).sum().backward()
            clip_grad_value([x], 2.0)
            return x.grad

        return step, x

    compare(make, [np.asarray(number, "float32") for number in range(5)])
