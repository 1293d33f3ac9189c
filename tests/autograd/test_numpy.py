"""NumPy's functions, comparisons and formats on variables: derivatives or errors."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.autograd import Variable
from flashlight_py.autograd.operators import _FUNCTIONS, _UFUNCS
from tests.cupy_stand_in import StandInCupy
from tests.nn.oracle import Oracle
from tests.nn.oracle import compare as compare_with_torch
from tests.tables import for_each
from tests.tape.steps import compare

ARITHMETIC = {"add", "subtract", "negative", "multiply", "divide", "power", "absolute"}
SECOND_NAMES = {"amax", "amin"}
RANDOM = np.random.default_rng(0)
A, B = RANDOM.random((2, 3, 4)) + 0.5
# By expression of torch: the NumPy expression of variables x and w and an array b.
LIKE_TORCH: dict[str, Callable[..., Any]] = {
    "-x * torch.exp(w) + torch.log(x)": lambda x, w, b: np.negative(x) * np.exp(w) + np.log(x),
    "b * x - b / w": lambda x, w, b: b * x - b / w,
    "b @ x.T + 2 ** w.T[0, 0]": lambda x, w, b: b @ x.T + np.float64(2) ** w.T[0, 0],
    "torch.maximum(x, b) / torch.minimum(b, w)": lambda x, w, b: (
        np.maximum(x, b) / np.minimum(b, w)),
    "torch.sin(x) * torch.cos(w)": lambda x, w, b: np.multiply(np.sin(x), np.cos(w)),
    "torch.tanh(x) + torch.log1p(w) - x.square()": (
        lambda x, w, b: np.subtract(np.tanh(x) + np.log1p(w), np.square(x))),
    "(x ** w).sqrt() + (x - w).abs()": lambda x, w, b: np.sqrt(np.power(x, w)) + np.abs(x - w),
    "x.sum(1, keepdim=True) * w.mean(0)": (
        lambda x, w, b: np.sum(x, 1, keepdims=True) * np.mean(w, axis=0)),
    "x.mean(0, keepdim=True) * w.sum() + (x.T @ b).sum()": (
        lambda x, w, b: x.mean(axis=0, keepdims=True) * w.sum() + (x.T @ b).sum()),
    "x.var(0) + w.amax(0) - w.amin(0)": (
        lambda x, w, b: np.var(x, axis=0, ddof=1) + np.max(w, 0) - np.amin(w, axis=0)),
    "x.std(0) + x.prod(0) + torch.flip(w, (0,))[0] * w.sort(1).values.ravel()[:4]": (
        lambda x, w, b: (
            np.std(x, 0, ddof=1) + np.prod(x, axis=0) + np.flip(w, 0)[0] * np.sort(w).flatten()[:4]
        )
    ),
    "torch.cat(x.split([1, 3], 1)[::-1], 1) * torch.cat(w.split(2, 1)[::-1], 1)": (
        lambda x, w, b: (
            np.concatenate(np.split(x, [1], axis=1)[::-1], 1)
            * np.concatenate(np.split(w, 2, 1)[::-1], 1)
        )
    ),
    "x[:, [2, 0, 2]] + w.ravel()[[1, 5, 1]] + x[[0, 0, 1]][:, :3]": lambda x, w, b: (
        np.take(x, [2, 0, 2], axis=-1) + np.take(w, [1, 5, 1]) + np.take(x, [0, 0, 1], 0)[:, :3]),
    "x[:, None].movedim(-1, 0).squeeze(2) * w.T": (
        lambda x, w, b: np.squeeze(np.moveaxis(np.expand_dims(x, 1), -1, 0), axis=2) * w.T),
    "x.expand(2, 3, 4) * F.pad(w, (1, 2))[:, 1:5]": (
        lambda x, w, b: np.broadcast_to(x, (2, 3, 4)) * np.pad(w, ((0, 0), (1, 2)))[:, 1:5]),
    "x.amax(0) * x.amin() + x.var(1)[0] + x.T.squeeze().flatten()[:4] + w.clone()[0]": (
        lambda x, w, b: (
            x.max(0) * x.min()
            + x.var(1, ddof=1)[0]
            + x.transpose().squeeze().flatten()[:4]
            + w.copy()[0]
        )
    ),
    "x.detach() * w.double() + x.transpose(1, 0).T": (
        lambda x, w, b: x.detach() * w.astype("f8") + x.transpose(1, 0).T),
    "x.cumsum(1) + torch.linalg.norm(w)": lambda x, w, b: np.cumsum(x, 1) + np.linalg.norm(w),
    "torch.cat([x, w], 1).reshape(4, 6).T": (
        lambda x, w, b: np.transpose(np.reshape(np.concatenate([x, w], axis=1), (4, 6)))),
    "torch.stack([x, w]).ravel() * x.tile(2, 1).ravel()": (
        lambda x, w, b: np.ravel(np.stack([x, w])) * np.ravel(np.tile(x, (2, 1)))),
    "torch.where(b > 1, x, w).clamp(0.6, 1.2)": (
        lambda x, w, b: np.clip(np.where(b > 1, x, w), 0.6, 1.2)),
    "torch.matmul(x, w.T) + x.mm(b.T)": lambda x, w, b: np.matmul(x, w.T) + np.dot(x, b.T),
    "x * 2 + 3 * w": lambda x, w, b: np.dot(x, 2.0) + np.dot(3, w),
    "torch.cat([x.ravel(), w.ravel()]) * 2": (
        lambda x, w, b: np.concatenate([x, w], axis=None) * 2),
    "x.ravel().cumsum(0) * w.ravel()": lambda x, w, b: np.cumsum(x) * np.ravel(w),
    "torch.einsum('ij,kj->ik', x, w)": lambda x, w, b: np.einsum("ij,kj->ik", x, w),
    "x.reshape(2, -1).mul(x.reshape((2, 6)))": lambda x, w, b: x.reshape(2, -1) * x.reshape((2, 6)),
}  # fmt: skip


@for_each("torch", LIKE_TORCH)
def test_numpy_functions_are_differentiated(torch: str, oracle: Oracle) -> None:
    x, w, b = fl.param(A), fl.param(B), B[::-1].copy()
    result = LIKE_TORCH[torch](x, w, b)
    assert isinstance(result, Variable)
    compare_with_torch(oracle, f"y = {torch}", result, {"x": x, "w": w}, 1e-12, b=b)


@for_each("torch", LIKE_TORCH)
def test_numpy_functions_are_captured(torch: str) -> None:
    def make() -> Any:
        x, y = fl.param(A.copy()), fl.param(B.copy())

        def step(b: np.ndarray) -> Any:
            x.zero_grad()
            y.zero_grad()
            loss = LIKE_TORCH[torch](x, y, b).sum()
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
