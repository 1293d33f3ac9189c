"""Operations with user-defined derivatives."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.device import array_module
from tests.cupy_stand_in import StandInCupy
from tests.tables import for_each
from tests.tape.steps import compare, training

X, W = np.random.default_rng(0).random((2, 3, 4)) + 0.5


@fl.autograd.function
def softplus(x: Any) -> Any:
    """Return log(1 + exp(x))."""
    e = array_module(x).exp(x)
    return array_module(x).log1p(e), lambda grad: grad * e / (1 + e)


@fl.autograd.function
def clipped_product(x: Any, w: Any, limit: float, scale: float = 1.0) -> Any:
    """Return x times w. Above a limit, the derivative is 0."""
    inside = x * w < limit
    return x * w * scale, lambda grad: (grad * w * scale * inside, grad * x * scale * inside)


@fl.autograd.function
def passed(x: Any) -> Any:
    return x, lambda grad: grad


def of_both(x: fl.Variable, w: Any) -> fl.Variable:
    s = softplus(x)
    return clipped_product(s, w, 1.0, scale=3.0) + clipped_product(s, s, 1.0) * s


def test_function_has_the_derivative_that_it_returns() -> None:
    x, w = fl.param(X), fl.param(W)
    result = of_both(x, w)
    s, slope = np.log1p(np.exp(X)), np.exp(X) / (1 + np.exp(X))
    np.testing.assert_allclose(result.array, 3 * s * W + s**3, rtol=1e-14)
    result.backward(grad := np.linspace(0.5, 1.5, X.size).reshape(X.shape))
    np.testing.assert_allclose(w.grad, 3 * grad * s * (s * W < 1), rtol=1e-12)
    of_s = 3 * W * (s * W < 1) + s**2 + 2 * s**2 * (s * s < 1)
    np.testing.assert_allclose(x.grad, grad * of_s * slope, rtol=1e-12)
    assert softplus.__doc__ == "Return log(1 + exp(x))."


def test_gradcheck_accepts_functions() -> None:
    fl.gradcheck(softplus, [X])
    fl.gradcheck(lambda x, w: clipped_product(x, w, 1e9, scale=3.0), [X, W])
    fl.gradcheck(lambda x: clipped_product(x, W, 1e9), [X])


def test_function_records_nothing_without_gradients() -> None:
    for x in (fl.input(X), fl.no_grad(X), X):
        result = softplus(x)
        assert isinstance(result, fl.Variable)
        assert not result.calc_grad
        assert not result.has_history


def test_function_gradients_share_no_memory() -> None:
    x, seed = fl.param(X.copy()), np.ones_like(X)
    kept = np.full_like(X, 2)
    returning = fl.autograd.function(lambda x, w: (x + w, lambda grad: (kept, kept)))
    (passed(x) + x).backward(seed)
    returning(x, x).backward(seed)
    returning(x, x).backward(seed)
    assert not any(np.shares_memory(x.grad, array) for array in (seed, kept, x.array))
    assert (seed.max(), kept.max(), x.grad.min(), x.grad.max()) == (1, 2, 10, 10)


def test_capture_replays_functions() -> None:
    def make() -> Any:
        x = fl.param(X.copy())
        optimizer = fl.optim.SGDOptimizer([x], 0.1)
        return training(optimizer, lambda w: of_both(passed(x), fl.input(w)).sum()), x

    compare(make, [W * number for number in range(1, 6)])


def test_recompute_repeats_functions() -> None:
    class Block(fl.nn.Module):
        def __init__(self) -> None:
            self.weight = fl.param(W.copy())

        def forward(self, x: fl.Variable, scale: float = 1.0) -> fl.Variable:
            return of_both(x, self.weight) * scale

    grads = []
    for block in (Block(), fl.recompute(Block())):
        block(fl.input(X), scale=2.0).sum().backward()
        grads.append(block.weight.grad)
    np.testing.assert_array_equal(*grads)


def test_function_works_with_another_array_library(strict: StandInCupy) -> None:
    x = fl.param(strict.asarray(X))  # type: ignore[arg-type]
    of_both(x, strict.asarray(W)).sum().backward()  # type: ignore[arg-type]
    assert type(x.grad) is type(x.array)


def backward_of(gradients: Callable[[Any], Any]) -> Callable[[fl.Variable], Any]:
    operation = fl.autograd.function(lambda x, w: (x * 2, gradients))
    return lambda x: operation(x, W).backward(X)


def test_function_accepts_none_as_gradient() -> None:
    x, w = fl.param(X.copy()), fl.param(W.copy())
    of_second = fl.autograd.function(lambda x, w: (x * w, lambda grad: (None, grad * 3)))
    (of_second(x * 2, w) + x).sum().backward()
    np.testing.assert_array_equal(x.grad, np.ones_like(X))
    np.testing.assert_array_equal(w.grad, np.full_like(W, 3))
    assert backward_of(lambda grad: (None, grad))(x) is None
    np.testing.assert_array_equal(x.grad, np.ones_like(X))

    def make() -> Any:
        x, w = fl.param(X.copy()), fl.param(W.copy())
        optimizer = fl.optim.SGDOptimizer([x, w], 0.1)
        return training(optimizer, lambda factor: of_second(x, w * factor).sum()), x, w

    compare(make, [W * number for number in range(1, 6)])


WRONG: dict[str, tuple[Callable[[fl.Variable], Any], type[Exception], str]] = {
    "one": (backward_of(lambda grad: grad), ValueError, r"\[\(3, 4\), None\].*got \[\(3, 4\)\]"),
    "three": (backward_of(lambda grad: (grad,) * 3), ValueError, "one gradient per array"),
    "shape": (backward_of(lambda grad: (grad[:2], None)), ValueError, r"\(2, 4\), None"),
    "number": (backward_of(lambda grad: (1.0, None)), ValueError, "'float'"),
    "no function": (fl.autograd.function(lambda x: x), TypeError, "lambda> must return an array"),
    "no array": (fl.autograd.function(lambda x: ("", str)), TypeError, "expected a NumPy, CuPy"),
    "integers": (fl.autograd.function(lambda x: (x > 1, str)), TypeError, "dtype, got bool"),
    "by name": (lambda x: clipped_product(W, 1.0, w=x), TypeError, "Pass variables by position"),
}  # fmt: skip


@for_each("result_kind", WRONG)
def test_function_raises_for_invalid_results(result_kind: str) -> None:
    call, kind, words = WRONG[result_kind]
    with pytest.raises(kind, match=words):
        call(fl.param(X))


def test_function_names_a_changed_variable() -> None:
    x = fl.param(X.copy())
    loss = softplus(x).sum()
    x.array = W
    with pytest.raises(
        RuntimeError, match=r"a variable of shape \(3, 4\) was changed after function\(\)"
    ):
        loss.backward()
