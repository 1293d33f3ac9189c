"""User-defined functions with a derivative, and NumPy's functions of variables."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.autograd import Variable
from flashlight_py.autograd.operators import _FUNCTIONS, _UFUNCS
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


ARITHMETIC = {"add", "subtract", "negative", "multiply", "divide", "power", "absolute"}
SECOND_NAMES = {"amax", "amin"}
RANDOM = np.random.default_rng(0)
A, B = RANDOM.random((2, 3, 4)) + 0.5
# NumPy expressions of variables or arrays x and w and an array b.
EXPRESSIONS: list[Callable[..., Any]] = [
    lambda x, w, b: np.negative(x) * np.exp(w) + np.log(x),
    lambda x, w, b: b * x - b / w,
    lambda x, w, b: b @ x.T + np.float64(2) ** w.T[0, 0],
    lambda x, w, b: np.maximum(x, b) / np.minimum(b, w),
    lambda x, w, b: np.multiply(np.sin(x), np.cos(w)),
    lambda x, w, b: np.subtract(np.tanh(x) + np.log1p(w), np.square(x)),
    lambda x, w, b: np.sqrt(np.power(x, w)) + np.abs(x - w),
    lambda x, w, b: np.sum(x, 1, keepdims=True) * np.mean(w, axis=0),
    lambda x, w, b: x.mean(axis=0, keepdims=True) * w.sum() + (x.T @ b).sum(),
    lambda x, w, b: np.var(x, axis=0, ddof=1) + np.max(w, 0) - np.amin(w, axis=0),
    lambda x, w, b: np.std(x, 0, ddof=1) + np.prod(x, axis=0) + np.flip(w, 0)[0],
    lambda x, w, b: np.sort(w).flatten()[:4] * x,
    lambda x, w, b: np.concatenate(np.split(x, [1], axis=1)[::-1], 1) * np.split(w, 2, 1)[1][:, :1],
    lambda x, w, b: np.take(x, [2, 0, 2], axis=-1) + np.take(w, [1, 5, 1]),
    lambda x, w, b: np.take(x, [0, 0, 1], 0)[:, :3],
    lambda x, w, b: np.squeeze(np.moveaxis(np.expand_dims(x, 1), -1, 0), axis=2) * w.T,
    lambda x, w, b: np.broadcast_to(x, (2, 3, 4)) * np.pad(w, ((0, 0), (1, 2)))[:, 1:5],
    lambda x, w, b: x.max(0) * x.min() + x.var(1, ddof=1)[0] + w.copy()[0],
    lambda x, w, b: x.transpose().squeeze().flatten()[:4] * w.astype("f8"),
    lambda x, w, b: np.cumsum(x, 1) + np.linalg.norm(w),
    lambda x, w, b: np.transpose(np.reshape(np.concatenate([x, w], axis=1), (4, 6))),
    lambda x, w, b: np.ravel(np.stack([x, w])) * np.ravel(np.tile(x, (2, 1))),
    lambda x, w, b: np.clip(np.where(b > 1, x, w), 0.6, 1.2),
    lambda x, w, b: np.matmul(x, w.T) + np.dot(x, b.T),
    lambda x, w, b: np.dot(x, 2.0) + np.dot(3, w),
    lambda x, w, b: np.concatenate([x, w], axis=None) * 2,
    lambda x, w, b: np.cumsum(x) * np.ravel(w),
    lambda x, w, b: np.einsum("ij,kj->ik", x, w),
    lambda x, w, b: x.reshape(2, -1) * x.reshape((2, 6)) + w.sum(),
]


@for_each("function", EXPRESSIONS)
def test_numpy_functions_are_differentiated(function: Callable[..., Any]) -> None:
    b = B[::-1].copy()
    result = function(fl.param(A), fl.param(B), b)
    assert isinstance(result, Variable)
    np.testing.assert_allclose(result.array, function(A, B, b), rtol=1e-14)
    fl.gradcheck(lambda x, w: function(x, w, b) + 0 * (x.sum() + w.sum()), [A, B], tolerance=1e-5)


@for_each("function", EXPRESSIONS)
def test_numpy_functions_are_captured(function: Callable[..., Any]) -> None:
    def make() -> Any:
        x, y = fl.param(A.copy()), fl.param(B.copy())

        def step(b: np.ndarray) -> Any:
            x.zero_grad()
            y.zero_grad()
            loss = function(x, y, b).sum()
            loss.backward()
            return loss, np.multiply(np.float32(2), x), np.maximum(b, x), np.where(b > 1, x, 0.0)

        return step, x, y

    compare(make, [A * number for number in range(1, 6)], eager=2)  # NumPy makes an array of 2


def test_numpy_functions_work_with_another_library(strict: StandInCupy) -> None:
    x = fl.param(strict.asarray(A))  # type: ignore[arg-type]
    for of in (np.exp, np.sum, lambda x: np.stack([x, x]), lambda x: x.reshape(4, 3)[x.T > 1]):
        assert type(of(x).array) is type(x.array)


def test_docs_list_the_differentiated_numpy_functions() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    names = {function.__name__ for function in (*_FUNCTIONS, *_UFUNCS)} - ARITHMETIC - SECOND_NAMES
    assert not [name for name in names if f"{name}`" not in page]


REFUSED: dict[str, Callable[..., Any]] = {
    "numpy.sign": np.sign,
    "numpy.partition": lambda x: np.partition(x, 2),
    "numpy.add.reduce": np.add.reduce,
    "numpy.sum with dtype": lambda x: np.sum(x, dtype=np.float32),
    "numpy.sum has": lambda x: np.sum(x, 0, np.float32),
    "numpy.add with out": lambda x: np.add(A, x, out=A.copy()),
    "numpy.linalg.norm": lambda x: np.linalg.norm(x, 2),
    "numpy.array_split": lambda x: np.array_split(x, 2)[0],
}


@for_each("name", REFUSED)
def test_functions_without_derivative_raise_type_error(name: str) -> None:
    words = r".* of shape \(3, 4\) that needs a gradient.*fl\.autograd\.functions.*variable\.array"
    with pytest.raises(TypeError, match=name + words):
        REFUSED[name](fl.param(A))
    expected = REFUSED[name](A)
    np.testing.assert_array_equal(REFUSED[name](fl.input(A)), expected)


@for_each("sections", [[1, 100], [-1], [], 2, np.int64(4)])
def test_split_of_a_variable_equals_numpy(sections: Any) -> None:
    x = fl.param(A)
    for part, expected in zip(np.split(x, sections, 1), np.split(A, sections, 1), strict=True):
        np.testing.assert_array_equal(part.numpy(), expected)
    with pytest.raises(IndexError):
        np.take(x, [0], axis=5)


def test_out_and_dot_raise_type_error_for_variables() -> None:
    x = fl.param(np.ones((2, 2, 2)))
    with pytest.raises(TypeError, match="out must be an array, got a Variable"):
        np.add(A, A, out=x)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="at most 2 dimensions"):
        np.dot(x, x)


def test_functions_without_derivative_return_arrays() -> None:
    x, y = fl.param(A), fl.param(B)
    for compared, expected in (
        *((x < y, A < B), (x <= 1, A <= 1), (x > B, A > B), (x >= y, A >= B)),
        *((B < x, B < A), (np.equal(x, y), A == B), (np.isnan(x), np.isnan(A))),  # noqa: SIM300
    ):
        assert type(compared) is np.ndarray
        np.testing.assert_array_equal(compared, expected)
    assert (np.argmax(x), np.shape(x), np.ndim(x)) == (A.argmax(), (3, 4), 2)
    assert np.allclose(x, A)
    assert np.zeros_like(x).shape == (3, 4)
    np.testing.assert_array_equal(np.where(fl.input(A > 1), A, B), np.where(A > 1, A, B))


def test_equality_compares_objects() -> None:
    x, y = fl.param(A), fl.param(A)
    assert x != y
    assert [x, y].index(y) == 1
    assert len({x, y, x}) == 2


def test_variable_of_one_element_converts_to_a_number() -> None:
    loss = fl.param(np.full((1, 1), 1.2345)) * 2
    assert f"{loss:.3f} {loss:>8.1e}" == "2.469  2.5e+00"
    assert f"{loss}" == str(loss)
    assert loss.item() == 2.469
    assert type(loss.item()) is float
    for read in (lambda x: f"{x:.3f}", lambda x: x.item()):
        with pytest.raises(ValueError, match=r"exactly one element, got shape \(3, 4\)"):
            read(fl.param(A))
