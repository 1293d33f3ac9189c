"""Functions and layers have the same results and gradients on a GPU and on the CPU."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.autograd import functions as F
from flashlight_py.device import device_of, to_device
from tests.autograd.cases import CASES, Case
from tests.autograd.test_other_library import OWN_ARRAYS
from tests.gpu import verbs
from tests.nn.oracle import weights_of
from tests.nn.test_images import CONVOLUTIONS, POOLS, Conv, arrays_of, images
from tests.nn.test_like_torch import ROWS, Row, call, made, variables_of

pytestmark = pytest.mark.gpu

# Tolerance relative to an array's largest value: sums have another order, and a mean far from 0
# loses digits.
TOLERANCES = {"float32": 1e-4, "float64": 1e-11}
EVERY_DTYPE = pytest.mark.parametrize("dtype", TOLERANCES)
FUNCTIONS = [case for case in CASES if not case.name.startswith(OWN_ARRAYS)]


def gpu() -> str:
    verbs.cupy()
    return fl.distributed.use_local_device()


def run(function: Callable[..., Any], leaves: list[Any], device: str) -> list[np.ndarray]:
    """Return the value of a function of the leaves, and all their gradients, on ``device``."""
    operands = [v if v.calc_grad else v.array for v in leaves]
    for variable in leaves:
        variable.data = to_device(variable.data, device)
    result = function(*leaves)
    result.backward(to_device(weights_of(result.numpy()), device))
    results = [result.array, *(v.grad for v in operands if isinstance(v, fl.Variable))]
    for array in results:
        assert array is not None
        assert device_of(array) == device
    return [to_device(array, "cpu") for array in results]


def close(got: list[np.ndarray], expected: list[np.ndarray], dtype: str) -> None:
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype
        most = TOLERANCES[dtype] * max(1.0, float(abs(other).max(initial=0)))
        np.testing.assert_allclose(one, other, rtol=TOLERANCES[dtype], atol=most)


def compare(function: Callable[..., Any], arrays: Callable[[], Any], dtype: str) -> None:
    expected, got = (run(function, [*map(fl.param, arrays())], device) for device in ("cpu", gpu()))
    close(got, expected, dtype)


@EVERY_DTYPE
@pytest.mark.parametrize("case", FUNCTIONS, ids=[case.name for case in FUNCTIONS])
def test_functions_on_the_gpu_equal_the_cpu(case: Case, dtype: str) -> None:
    compare(case.ours, lambda: [array.astype(dtype) for array in case.arrays], dtype)


@EVERY_DTYPE
@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_layers_on_the_gpu_equal_the_cpu(row: Row, dtype: str) -> None:
    results = []
    for device in ("cpu", gpu()):
        module = made(row, dtype).to(device)
        inputs = variables_of(row, dtype)
        leaves = [*inputs, *module.params()]
        results.append(run(lambda *_, m=module, x=inputs: call(row, m, x), leaves, device))
    close(results[1], results[0], dtype)


@EVERY_DTYPE
@pytest.mark.parametrize("case", CONVOLUTIONS, ids=[case.name for case in CONVOLUTIONS])
def test_convolutions_on_the_gpu_equal_the_cpu(case: Conv, dtype: str) -> None:
    compare(lambda *v: F.conv2d(*v, **case.options), lambda: arrays_of(case, dtype), dtype)


@EVERY_DTYPE
@pytest.mark.parametrize("options", [options for options, _ in POOLS], ids=str)
def test_pools_on_the_gpu_equal_the_cpu(options: dict[str, Any], dtype: str) -> None:
    compare(lambda x: F.pool2d(x, **options), lambda: [images(dtype)], dtype)


def gpt() -> tuple[fl.nn.Module, np.ndarray]:
    """Return a decoder of 2 layers with a linear layer that reduces each position to one number."""
    layers = fl.nn.Embedding(11, 16), fl.nn.Transformer(16, 2, layers=2, causal=True)
    tokens = np.random.default_rng(2).integers(0, 11, (4, 9))
    return fl.nn.Sequential(*layers, fl.nn.LayerNorm(16), fl.nn.Linear(16, 10)), tokens


def convolutional() -> tuple[fl.nn.Module, np.ndarray]:
    layers = fl.nn.Conv2D(1, 16, 3, padding=1), fl.nn.BatchNorm(16), fl.nn.ReLU(), fl.nn.Pool2D(2)
    body = fl.nn.Conv2D(16, 16, 3, padding=1), fl.nn.GroupNorm(4, 16), fl.nn.GELU()
    head = fl.nn.View((-1, 16 * 16)), fl.nn.Linear(16 * 16, 10)
    x = np.random.default_rng(3).standard_normal((8, 1, 8, 8)).astype("float32")
    return fl.nn.Sequential(*layers, fl.nn.Residual(fl.nn.Sequential(*body)), *head), x


def losses(
    make: Callable[[], tuple[fl.nn.Module, np.ndarray]], half: str | None, device: str
) -> list[float]:
    """Train for some steps, with a loss scale if ``half`` is a dtype; return the losses."""
    fl.set_seed(0)
    model, x = make()
    labels = np.arange(x.size if x.ndim == 2 else len(x)) % 10
    model.to(device)
    optimizer = fl.optim.AdamOptimizer(model.params(), 1e-3, weight_decay=0.01)
    scaler = fl.amp.DynamicScaler(256.0, enabled=half is not None)
    inputs, targets = (to_device(array, device) for array in (x, labels))
    results = []
    for _ in range(5):
        optimizer.zero_grad()
        with fl.amp.autocast(half or "float16", enabled=half is not None):
            logits = F.reshape(model(fl.input(inputs)), (-1, 10))
            loss = fl.nn.CategoricalCrossEntropy()(F.log_softmax(logits), fl.no_grad(targets))
        scaler.scale(loss).backward()
        scaler.unscale(optimizer)
        fl.optim.clip_grad_norm(model.params(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        results.append(loss.scalar())
    return results


@pytest.mark.parametrize("half", [None, "float16"])
@pytest.mark.parametrize("make", [gpt, convolutional])
def test_models_on_the_gpu_train_like_on_the_cpu(make: Any, half: str | None) -> None:
    """In half precision, GPU and CPU round products at different points."""
    expected, got = (losses(make, half, device) for device in ("cpu", gpu()))
    assert got[-1] < got[0]
    np.testing.assert_allclose(got, expected, rtol=2e-2 if half else 2e-4)
