"""Training of a small model in every floating dtype, also in storage-only dtypes."""

import copy
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.autograd import functions as F
from flashlight_py.device import floating
from tests.tables import for_each
from tests.tape.steps import compare, training

DTYPES = ("float16", "bfloat16", "float32", "float64")
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda params: fl.optim.SGDOptimizer(params, 0.1),
    "momentum": lambda params: fl.optim.SGDOptimizer(params, 0.1, momentum=0.9),
    "adam": lambda params: fl.optim.AdamOptimizer(params, 0.05),
}


def model_of(dtype: Any) -> Any:
    fl.set_seed(0)
    layers = (fl.nn.Linear(6, 8), fl.nn.ReLU(), fl.nn.Linear(8, 3), fl.nn.LogSoftmax())
    return fl.nn.Sequential(*layers).astype(dtype)


def train(model: Any, optimizer: Any, steps: int = 10, rows: slice = slice(16)) -> list[float]:
    dtype = model.params()[0].dtype
    x = np.random.default_rng(0).standard_normal((16, 6)).astype(dtype)
    labels = fl.input(np.arange(16)[rows] % 3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.categorical_cross_entropy(model(fl.input(x[rows])), labels)
        loss.backward()
        assert loss.dtype == dtype
        assert {param.grad.dtype for param in model.params()} == {dtype}
        fl.optim.clip_grad_norm(model.params(), 1.0)
        optimizer.step()
        losses.append(float(loss.scalar()))
    return losses


@for_each("optimizer", OPTIMIZERS)
@for_each("dtype", DTYPES)
def test_training_reduces_the_loss_in_every_dtype(dtype: str, optimizer: str) -> None:
    model, exact = model_of(dtype), model_of("float64")
    losses = train(model, OPTIMIZERS[optimizer](model.params()))
    other = train(exact, OPTIMIZERS[optimizer](exact.params()))
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(
        losses, other, atol={"bfloat16": 0.05, "float16": 0.01}.get(dtype, 1e-5)
    )
    assert {param.dtype.name for param in model.params()} == {dtype}


@for_each("dtype", DTYPES)
def test_load_state_dict_casts_between_dtypes(dtype: str) -> None:
    model, wide = model_of(dtype), model_of("float64")
    wide.load_state_dict(model.state_dict())
    before = {name: array.copy() for name, array in model.state_dict().items()}
    model.load_state_dict(wide.state_dict())
    for name, array in model.state_dict().items():
        assert np.array_equal(array, before[name]), name
    state = dict(model.state_dict(), **{"0.bias": np.ones(8, np.complex64)})
    with pytest.raises(TypeError, match="complex64"):
        model.load_state_dict(state)


@for_each("dtype", DTYPES)
def test_checkpoint_resumes_bit_for_bit_in_every_dtype(dtype: str, tmp_path: Any) -> None:
    model = model_of(dtype)
    optimizer = fl.optim.AdamOptimizer(model.params(), 0.05)
    train(model, optimizer, 3)
    fl.save(tmp_path / dtype, model, optimizer=optimizer)
    expected = train(model, optimizer, 3)
    other = model_of(dtype)
    resumed = fl.optim.AdamOptimizer(other.params(), 0.05)
    fl.load(tmp_path / dtype, other, optimizer=resumed)
    assert train(other, resumed, 3) == expected


def test_modules_accept_dtype_names() -> None:
    assert fl.nn.Linear(2, 2, dtype="bfloat16").weight.dtype.name == "bfloat16"
    assert copy.deepcopy(model_of("bfloat16")).params()[0].dtype.name == "bfloat16"
    for wrong in ("int32", "complex64"):
        with pytest.raises(TypeError, match=f"real floating dtype, got {wrong}"):
            model_of(wrong)


@for_each("dtype", DTYPES)
def test_captured_step_equals_eager_in_every_dtype(dtype: str) -> None:
    def make() -> Any:
        model = model_of(dtype)
        optimizer = fl.optim.AdamOptimizer(model.params(), 0.05)
        loss_of = fl.nn.CategoricalCrossEntropy()
        return training(optimizer, lambda x, y: loss_of(model(x), y)), model, optimizer

    x = np.random.default_rng(0).standard_normal((16, 6)).astype(floating(dtype, ""))
    compare(make, [(x, np.arange(16) % 3)] * 6)
