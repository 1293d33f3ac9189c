"""Sizes of any integer type, initial values, and training in every floating dtype."""

import copy
import math
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py import nn
from flashlight_py.autograd import functions as F
from flashlight_py.autograd import input, param
from flashlight_py.device import floating
from flashlight_py.nn import Module, init
from flashlight_py.optim import clip_grad_norm
from flashlight_py.random import set_seed
from tests.tables import for_each
from tests.tape.steps import compare, training

# Layers and the shape of their inputs, by the integer type of the sizes.
OF_SIZES: dict[str, tuple[Callable[[Any], Module], tuple[int, ...]]] = {
    "Linear": (lambda i: nn.Linear(i(200), i(3)), (2, 200)),
    "PReLU": (lambda i: nn.PReLU(i(4)), (2, 4)),
    "LayerNorm": (lambda i: nn.LayerNorm(i(4)), (2, 4)),
    "LayerNorm of two": (lambda i: nn.LayerNorm((i(2), i(4))), (3, 2, 4)),
    "RMSNorm": (lambda i: nn.RMSNorm(i(4)), (2, 4)),
    "GroupNorm": (lambda i: nn.GroupNorm(i(2), i(4)), (2, 4)),
    "BatchNorm": (lambda i: nn.BatchNorm(i(4)), (2, 4)),
    "Conv2D": (lambda i: nn.Conv2D(i(4), i(6), i(3), i(2), i(1), i(1), i(2)), (2, 4, 5, 5)),
    "Conv2D of pairs": (lambda i: nn.Conv2D(i(100), i(2), (i(1), i(3)), (i(1), i(2)), (0, i(1))),
        (1, 100, 3, 5)),
    "Pool2D": (lambda i: nn.Pool2D(i(2), i(1), i(1)), (1, 2, 4, 4)),
    "RNN": (lambda i: nn.RNN("lstm", i(3), i(100), i(2)), (2, 3, 3)),
    "MultiheadAttention": (lambda i: nn.MultiheadAttention(i(100), i(2)), (1, 3, 100)),
    "Transformer": (lambda i: nn.Transformer(i(100), i(2), layers=i(1)), (1, 3, 100)),
    "PositionEmbedding": (lambda i: nn.PositionEmbedding(i(20), i(20)), (1, 4, 20)),
    "SinusoidalPositionEmbedding": (lambda i: nn.SinusoidalPositionEmbedding(i(200), i(8)),
        (1, 4, 8)),
}  # fmt: skip


@for_each("kind", [np.int64, np.uint8])
@for_each("name", OF_SIZES)
def test_layers_accept_any_integer_type_as_size(name: str, kind: Any) -> None:
    make, shape = OF_SIZES[name]
    x, results = fl.input(np.linspace(-1, 1, math.prod(shape)).reshape(shape)), []
    for integer_type in (int, kind):
        fl.set_seed(0)
        module = make(integer_type)
        y = module(x)
        result = y[0] if isinstance(y, tuple) else y
        results.append((re.sub("0x[0-9a-f]+", "", repr(module)), result.array.tolist()))
    assert results[0] == results[1]
    for wrong in (bool, float, np.bool_, np.float64):
        with pytest.raises(TypeError, match=r"must be an integer|not iterable"):
            make(wrong)


NOT_OF_ONE = {"Pool2D": "padding exceeds the window", "SinusoidalPositionEmbedding": "even sizes"}


@for_each("name", [name for name in OF_SIZES if name not in NOT_OF_ONE])
def test_layers_have_correct_gradient_shapes_if_sizes_are_one(name: str) -> None:
    make, shape = OF_SIZES[name]
    module = make(lambda _: 1)
    y = module(fl.param(np.ones((2, *[1] * (len(shape) - 1)), np.float32)))
    F.sum(y[0] if isinstance(y, tuple) else y).backward()
    assert [p.grad.shape for p in module.params()] == [p.shape for p in module.params()]


def test_functions_accept_numpy_integers() -> None:
    x, weight = np.ones((1, 4, 5, 5), np.float32), np.ones((4, 2, 3, 3), np.float32)
    two, one = np.int64(2), np.uint8(1)
    options = (two, (one, np.int32(0)), one, two)
    result = F.conv2d(x, weight, None, *options)
    assert np.array_equal(result.array, F.conv2d(x, weight, None, 2, (1, 0), 1, 2).array)
    assert np.array_equal(F.pool2d(x, two, one, one).array, F.pool2d(x, 2, 1, 1).array)
    for wrong in (True, 2.0, np.float32(2), np.True_):
        with pytest.raises(ValueError, match="groups must divide"):
            F.conv2d(x, weight, groups=wrong)  # type: ignore[arg-type]


def test_linear_has_the_initial_values_of_flashlight() -> None:
    set_seed(0)
    layer = nn.Linear(50, 400)
    assert nn.Linear(3, 2, bias=False).bias is None
    for array, bound in ((layer.weight.array, math.sqrt(3 / 50)), (layer.bias.array, 50**-0.5)):
        assert array.dtype == "float32"
        assert np.abs(array).max() <= bound
        assert np.abs(array).max() > 0.95 * bound
        assert array.mean() == pytest.approx(0, abs=bound / 10)


@for_each(
    "draw std",
    [
        (lambda n: init.uniform(n, -1, 1), math.sqrt(1 / 3)),
        (lambda n: init.normal(n, 0, 2), 2),
        (lambda n: init.kaiming_uniform(n, 25), 0.2),
        (lambda n: init.kaiming_normal(n, 25), 0.2),
        (lambda n: init.glorot_uniform(n, 20, 30), 0.2),
        (lambda n: init.glorot_normal(n, 20, 30), 0.2),
    ],
)
def test_initial_values_have_the_documented_spread(draw: Any, std: float) -> None:
    set_seed(0)
    array = draw((100, 200))
    assert array.dtype == "float32"
    assert array.shape == (100, 200)
    assert array.std() == pytest.approx(std, rel=0.03)
    assert array.mean() == pytest.approx(0, abs=std / 20)


def test_dropout_acts_only_in_training() -> None:
    set_seed(0)
    x, layer = input(np.ones(1000, "float32")), nn.Dropout(0.5)
    assert set(layer(x).array.tolist()) == {0.0, 2.0}
    assert layer.eval()(x) is x


def test_dir_lists_layers_before_their_import() -> None:
    code = "from flashlight_py import nn; names = dir(nn)\n"
    code += "assert {*nn.__all__} <= {*names} and len({*names}) == len(names)"
    subprocess.run([sys.executable, "-c", code], check=True)


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


COUNT = 70_000  # above the largest float16
MANY = 5_000  # above the largest float16 integer n with n + 1 != n
NARROW = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
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


@for_each("dtype", NARROW)
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


@for_each("dtype", NARROW)
def test_clip_grad_norm_applies_small_factors(dtype: Any) -> None:
    x = param(ones(4).astype(dtype))
    x.grad = np.full(4, 32_768, dtype)
    assert clip_grad_norm([x], 1e-3) == 65_536
    assert x.grad.dtype == dtype
    assert np.all(x.grad == dtype.type(1e-3 / 2))


@for_each("dtype", NARROW)
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


@for_each("dtype", NARROW)
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
