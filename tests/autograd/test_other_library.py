"""Computations stay in the array library of their data. A stand-in replaces CuPy."""

from typing import Any

import numpy as np
import pytest

from flashlight_py import kernels, nn
from flashlight_py.autograd import functions as F
from flashlight_py.autograd import input, native, param
from flashlight_py.optim import clip_grad_norm
from flashlight_py.random import set_seed
from tests.autograd.cases import CASES, Case
from tests.cupy_stand_in import StandInArray, StandInCupy
from tests.optim.test_optimizers import RULES
from tests.tables import for_each

# Functions that take NumPy arrays, such as labels. The training steps below test them.
OWN_ARRAYS = "categorical", "batch_norm_given", "attention_mask"
STRICT_CASES = [case for case in CASES if not case.name.startswith(OWN_ARRAYS)]


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the kernels that CuPy lacks."""
    monkeypatch.setattr(native, "_kernel", lambda name: None)


def plain(array: Any) -> np.ndarray:
    assert isinstance(array, StandInArray)
    return array.get()


@for_each("case", STRICT_CASES)
def test_values_and_gradients_equal_numpy(case: Case, strict: StandInCupy) -> None:
    ours = [param(array.copy()) for array in case.arrays]
    strict_variables = [param(strict.asarray(array.copy())) for array in case.arrays]  # type: ignore[arg-type]
    expected, result = case.ours(*ours), case.ours(*strict_variables)
    np.testing.assert_array_equal(plain(result.array), expected.array)
    expected.backward(np.ones(expected.shape))
    result.backward(strict.asarray(np.ones(expected.shape)))
    for one, other in zip(ours, strict_variables, strict=True):
        np.testing.assert_array_equal(plain(other.grad), one.grad)


@for_each("rule", ["sgd", "nesterov", "adam_decoupled"])
def test_training_equals_numpy(rule: str, strict: StandInCupy) -> None:
    arrays, labels = np.linspace(-1, 1, 12, dtype="float32").reshape(3, 4), np.array([0, 1, -1])
    losses: list[list[float]] = [], []
    for convert, result in zip((np.asarray, strict.asarray), losses, strict=True):
        set_seed(0)
        model = nn.Sequential(
            nn.Linear(4, 5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 2), nn.LogSoftmax()
        )
        model._replace_arrays(convert)  # type: ignore[arg-type]
        x, target = input(convert(arrays)), input(convert(labels))  # type: ignore[arg-type]
        optimizer = RULES[rule](model.params())
        set_seed(1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = nn.CategoricalCrossEntropy()(model(x), target)
            loss.backward()
            clip_grad_norm(model.params(), 0.5)
            optimizer.step()
            result.append(loss.scalar())
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 3


def test_gradient_buffers_are_written_in_place(strict: StandInCupy) -> None:
    weight = param(strict.asarray(np.ones((3, 2))))  # type: ignore[arg-type]
    buffer = weight.grad_buffer = strict.asarray(np.zeros((3, 2)))  # type: ignore[assignment]
    rows = input(strict.asarray(np.ones((1, 2))))  # type: ignore[arg-type]
    for expected in (1, 2):
        F.sum(F.linear(rows, weight)).backward()
        assert weight.grad is buffer
        np.testing.assert_array_equal(plain(buffer), np.full((3, 2), expected))


def test_stand_in_raises_like_cupy(strict: StandInCupy) -> None:
    """If the stand-in accepted NumPy arrays, the tests above could not fail."""
    array = strict.asarray(np.ones(2))
    for mix in (
        lambda: array + np.ones(2),
        lambda: np.ones(2) * array,
        lambda: np.exp(array),
        lambda: np.asarray(array),
        lambda: strict.maximum(array, np.zeros(2)),
    ):
        with pytest.raises(TypeError):
            mix()


def test_linear_relu_needs_one_launch_per_direction(strict: StandInCupy) -> None:
    set_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    model._replace_arrays(strict.asarray)  # type: ignore[arg-type]
    x = input(strict.asarray(np.linspace(-1, 1, 12, dtype="float32").reshape(3, 4)))  # type: ignore[arg-type]
    F.sum(model(x)).backward()
    together, slope = kernels._elementwise("bias_relu"), kernels._elementwise("relu_slope")
    assert (together.launches(), slope.launches()) == (1, 1)


@pytest.mark.parametrize("size", [1 << 14, (1 << 14) + 1])
def test_mean_square_error_uses_many_blocks_for_large_arrays(
    size: int, strict: StandInCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "_BLOCKS", 3)  # of 256 threads, which are real threads here
    pair = np.random.default_rng(0).standard_normal((2, size)).astype("float32")
    mean = F.mean_squared_error(*(input(strict.asarray(x)) for x in pair))  # type: ignore[arg-type]
    wide = pair[0].astype("float64") - pair[1]
    np.testing.assert_allclose(plain(mean.array), np.mean(wide * wide), rtol=1e-6)
    assert [kernel.launches() for kernel in strict.kernels] == [1] * (size > 1 << 14)


@for_each("shape", [(0, 3), (3, 0), (1, 3), (9, 3), (8, 1), (2, 5, 3)])
def test_add_bias_relu_accepts_any_shape(strict: StandInCupy, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    product, bias = rng.standard_normal(shape), rng.standard_normal(shape[-1:])
    out: Any = strict.asarray(product)
    kernels.add_bias_relu(out, strict.asarray(bias))  # type: ignore[arg-type]
    np.testing.assert_array_equal(plain(out), np.maximum(product + bias, 0))


def test_add_bias_relu_keeps_nan(strict: StandInCupy) -> None:
    parts = [np.array([[np.nan], [1.0]]), np.ones((1, 1)), np.zeros(1)]
    out = F.linear_relu(*(input(strict.asarray(part)) for part in parts))  # type: ignore[arg-type]
    np.testing.assert_array_equal(plain(out.array), parts[0])
