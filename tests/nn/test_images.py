"""Convolution and pooling: kernels, array operations and torch agree for all options."""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py import libraries
from flashlight_py.autograd import Variable, gradcheck, param
from flashlight_py.autograd import functions as F
from flashlight_py.autograd.functions import convolution
from flashlight_py.nn import Conv2D, Linear, Module, Pool2D, ReLU, Sequential, Upsample, View
from tests.nn.oracle import Oracle, weights_of
from tests.tables import for_each
from tests.tape.steps import compare, training

Shape = tuple[int, ...]
Options = dict[str, Any]


class Conv(NamedTuple):
    """Shapes of input and weight, and options. From 32 channels, 3 x 3 kernels use tiles."""

    name: str
    x: Shape
    weight: Shape
    options: Options = {}  # noqa: RUF012 - of a NamedTuple


CONVOLUTIONS = [
    Conv("plain", (2, 3, 5, 6), (4, 3, 3, 3)),
    Conv("one channel", (2, 1, 9, 9), (2, 1, 5, 5), {"padding": 4}),
    Conv("by tiles", (2, 32, 6, 8), (32, 32, 3, 3), {"padding": 1}),
    Conv("by tiles that are cut", (2, 33, 5, 7), (35, 33, 3, 3), {"padding": (0, 2)}),
    Conv("by several blocks of tiles", (12, 32, 32, 32), (150, 32, 3, 3), {"padding": 1}),
    Conv("by tiles of a long image", (1, 40, 9, 4), (32, 40, 3, 3), {"padding": "same"}),
    Conv("stride", (2, 16, 7, 7), (16, 16, 3, 3), {"stride": 2, "padding": 1}),
    Conv("every pair", (2, 4, 8, 8), (6, 4, 2, 3),
        {"stride": (1, 2), "padding": (1, 0), "dilation": (2, 1)}),
    Conv("groups", (2, 4, 7, 7), (6, 2, 3, 3), {"groups": 2, "padding": 1, "stride": 2}),
    Conv("depthwise", (2, 9, 7, 8), (9, 1, 3, 3), {"groups": 9, "padding": 2, "dilation": 2}),
    Conv("depthwise to several", (2, 3, 4, 4), (6, 1, 3, 3), {"groups": 3}),
    Conv("1 x 1", (3, 5, 4, 4), (7, 5, 1, 1)),
    Conv("1 x 1, stride", (3, 4, 5, 5), (6, 4, 1, 1), {"stride": 2}),
    Conv("1 x 1, groups", (3, 4, 5, 5), (6, 2, 1, 1), {"groups": 2}),
    Conv("1 x 1, padding", (2, 2, 3, 3), (2, 2, 1, 1), {"padding": 2}),
    Conv("several chunks", (7, 30, 20, 20), (3, 30, 7, 7), {"padding": 3}),
    Conv("chunks of rows", (1, 5, 80, 90), (9, 5, 2, 2), {"padding": 2, "stride": (1, 2)}),
    Conv("stride beyond the window", (2, 3, 9, 11), (4, 3, 2, 1), {"stride": (3, 4)}),
    Conv("elements that meet no image", (2, 3, 2, 2), (4, 3, 3, 3), {"padding": 6, "dilation": 5}),
]  # fmt: skip
POOLS: list[tuple[Options, str]] = [
    ({"kernel": 2}, "F.max_pool2d(x, 2)"),
    ({"kernel": 3, "stride": 2, "padding": 1}, "F.max_pool2d(x, 3, 2, 1)"),
    ({"kernel": (2, 3), "stride": 1, "padding": (1, 0)}, "F.max_pool2d(x, (2, 3), 1, (1, 0))"),
    ({"kernel": 2, "mode": "average"}, "F.avg_pool2d(x, 2)"),
    ({"kernel": 3, "stride": 2, "padding": 1, "mode": "average"}, "F.avg_pool2d(x, 3, 2, 1)"),
    (
        {"kernel": 3, "stride": 1, "padding": 1, "mode": "average", "count_padding": False},
        "F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)",
    ),
]
TOLERANCES: dict[str, Any] = {
    "float64": {"rtol": 1e-11, "atol": 1e-11},
    "float32": {"rtol": 2e-4, "atol": 2e-4},
    "float16": {"rtol": 4e-3, "atol": 4e-3},
}


def convolved(variables: list[Variable], case: Conv) -> Variable:
    x, weight, bias = variables
    return F.conv2d(x, weight, bias, **case.options)


@contextlib.contextmanager
def in_array_operations() -> Iterator[None]:
    """Disable the kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolution, "kernel", lambda *_: None)
        yield


NATIVE_AND_NOT = for_each("context", [contextlib.nullcontext, in_array_operations])
# Kernels of two dtypes, and array operations.
METHODS: list[tuple[Any, str]] = [
    (contextlib.nullcontext, "float32"),
    (contextlib.nullcontext, "float64"),
    (in_array_operations, "float64"),
]


def arrays_of(case: Conv, dtype: str = "float64") -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = case.x, case.weight, case.weight[:1]
    return [(rng.normal(size=shape) / 2).astype(dtype) for shape in shapes]


def images(dtype: str = "float64") -> np.ndarray:
    """Return images with distinct values. 10 channels are no multiple of a vector's length."""
    values = np.random.default_rng(0).permutation(2 * 10 * 6 * 8) / 500
    return values.reshape(2, 10, 6, 8).astype(dtype)


def equals_torch(oracle: Oracle, code: str, function: Any, **arrays: np.ndarray) -> None:
    expected = oracle(f"y = {code}", [*arrays], **arrays)
    for context, dtype in METHODS:
        variables = [param(array.astype(dtype)) for array in arrays.values()]
        with context():
            result = function(*variables)
            result.backward(weights_of(result.array))
        assert result.dtype == dtype
        for name, array in zip(
            ("y", *arrays), (result.array, *(v.grad for v in variables)), strict=True
        ):
            largest = np.abs(expected[name]).max()
            np.testing.assert_allclose(
                array / largest,
                expected[name] / largest,
                **TOLERANCES[dtype],
                err_msg=f"{name} {dtype} {context.__name__}",
            )


@for_each("case", CONVOLUTIONS)
def test_convolution_equals_torch(case: Conv, oracle: Oracle) -> None:
    x, weight, bias = arrays_of(case)
    code = f"F.conv2d(x, weight, bias, **{case.options})"
    arrays = {"x": x, "weight": weight, "bias": bias}
    equals_torch(oracle, code, lambda *variables: convolved([*variables], case), **arrays)


@for_each("options torch_code", POOLS)
def test_pools_equal_torch(options: Options, torch_code: str, oracle: Oracle) -> None:
    equals_torch(oracle, torch_code, lambda x: F.pool2d(x, **options), x=images())


@NATIVE_AND_NOT
def test_max_pooling_prefers_nan_and_the_first_of_equal_elements(context: Any) -> None:
    x = param(np.array([1.0, 1.0, np.nan, 2.0]).repeat(9).reshape(1, 4, 3, 3))
    x.array[0, 3, 1, 0] = np.nan
    with context():
        result = F.pool2d(x, 3)
        result.backward(np.ones((1, 4, 1, 1)))
    np.testing.assert_array_equal(result.array.reshape(-1), [1, 1, np.nan, np.nan])
    assert [int(np.flatnonzero(channel)[0]) for channel in x.grad[0, [0, 1, 3]]] == [0, 0, 3]
    assert x.grad.sum() == 4


@NATIVE_AND_NOT
def test_half_precision_is_rounded_once(context: Any) -> None:
    variables = [param(array) for array in arrays_of(CONVOLUTIONS[0], "float16")]
    wide = [param(variable.array.astype("float32")) for variable in variables]
    functions: tuple[Any, ...] = (
        F.conv2d,
        lambda x, *_: F.pool2d(x, 2),
        lambda x, *_: F.pool2d(x, 2, mode="average"),
    )
    for function in functions:
        with context():
            ours, expected = function(*variables), function(*wide)
            ours.backward(np.ones(ours.shape, "float16"))
            expected.backward(np.ones(ours.shape, "float32"))
        assert ours.dtype == "float16"
        np.testing.assert_array_equal(ours.array, expected.array.astype("float16"))
    for variable, other in zip(variables, wide, strict=True):
        assert variable.grad.dtype == "float16"
        np.testing.assert_allclose(variable.grad, other.grad, **TOLERANCES["float16"])


def test_dtypes_are_promoted_and_gradients_keep_their_own() -> None:
    x, weight, bias = (param(array) for array in arrays_of(CONVOLUTIONS[0]))
    narrow = param(weight.array.astype("float32"))
    result = F.conv2d(x, narrow, bias)
    assert result.dtype == "float64"
    result.backward(np.ones(result.shape))
    assert narrow.grad.dtype == "float32"


def test_layer_chain_keeps_channels_last() -> None:
    x = param(arrays_of(CONVOLUTIONS[2], "float32")[0])
    first = F.relu(F.conv2d(x, param(np.ones((16, 32, 3, 3), "float32")), padding=1))
    result = F.pool2d(first, 2)
    for array in (first.array, result.array):
        assert array.transpose(0, 2, 3, 1).flags.c_contiguous


def test_convolution_skips_unneeded_gradients_and_rereads_shards() -> None:
    x, weight, _ = arrays_of(CONVOLUTIONS[0])
    filters = param(weight)
    F.sum(F.conv2d(fl.input(x), filters)).backward()
    assert filters.grad is not None
    images, kept = param(x), fl.input(weight)
    result = F.conv2d(images, kept)
    kept.placement = kept  # any object
    again = F.conv2d(images, kept)
    kept.data = weight * 2
    F.sum(result).backward()
    first = images.grad
    images.zero_grad()
    F.sum(again).backward()
    np.testing.assert_allclose(images.grad, 2 * first)


def network() -> Module:
    fl.set_seed(0)
    first = Conv2D(1, 16, 3, padding=1), ReLU(), Pool2D(2)
    second = Conv2D(16, 16, 3, padding="same", bias=False), ReLU()
    third = Conv2D(16, 8, 3, stride=2, groups=2), Pool2D(2, 1, mode="average")
    return Sequential(first, second, third, View((-1, 8)), Linear(8, 3))


@NATIVE_AND_NOT
def test_captured_step_has_the_same_bits(context: Any) -> None:
    def make() -> Any:
        model = network()
        optimizer = fl.optim.SGDOptimizer(model.params(), 0.1)
        return training(optimizer, lambda x: F.mean(model(fl.input(x)) ** 2)), model

    with context():
        compare(make, np.random.default_rng(0).normal(size=(5, 4, 1, 12, 12)).astype("float32"))


def test_layers_have_the_documented_initial_values() -> None:
    layer = Conv2D(8, 6, (3, 5), stride=2, padding=1, groups=2)
    fan_in = 4 * 3 * 5
    assert layer.weight.shape == (6, 4, 3, 5)
    assert np.abs(layer.weight.array).max() <= np.sqrt(3 / fan_in)
    assert np.abs(layer.bias.array).max() <= 1 / np.sqrt(fan_in)
    assert repr(layer) == (
        "Conv2D(8, out_channels=6, kernel=(3, 5), stride=(2, 2), dilation=(1, 1), "
        "padding=(1, 1), groups=2)"
    )
    assert repr(Pool2D(3, 2)) == "Pool2D((3, 3), stride=(2, 2), padding=(0, 0), mode='max')"
    assert Conv2D(1, 1, 1, bias=False).bias is None
    x = fl.input(np.zeros((2, 8, 9, 9), "float32"))
    assert layer(x).shape == (2, 6, 5, 4)


@NATIVE_AND_NOT
def test_padding_gets_no_gradient_of_a_maximum(context: Any) -> None:
    x = fl.param(np.full((1, 1, 1, 2), -np.inf))
    with context():
        F.sum(F.pool2d(x, 3, 1, 1)).backward()
    np.testing.assert_array_equal(x.grad, [[[[2, 0]]]])


def conv(x: Shape, weight: Shape, bias: Shape | None = None, **options: Any) -> Any:
    added = None if bias is None else fl.input(np.zeros(bias))
    return F.conv2d(fl.input(np.zeros(x)), fl.input(np.zeros(weight)), added, **options)


def pool(x: Shape, *options: Any) -> Any:
    return F.pool2d(fl.input(np.zeros(x)), *options)


IMAGES, WEIGHT = (2, 4, 5, 5), (6, 4, 3, 3)
BAD: list[tuple[Any, type[Exception], str]] = [
    (lambda: conv((2, 3, 5, 5), WEIGHT), ValueError,
        r"conv2d: .*\[batch, 4, .*\(6, 4, 3, 3\).*\(2, 3, 5, 5\)"),
    (lambda: conv((4, 5, 5), WEIGHT), ValueError, r"conv2d: .*got \(4, 5, 5\)"),
    (lambda: conv((0, 4, 5, 5), WEIGHT), ValueError, r"conv2d: .*not empty, got \(0, 4, 5, 5\)"),
    (lambda: conv(IMAGES, (6, 4, 3)), ValueError, r"conv2d: .*weight.*\(6, 4, 3\)"),
    (lambda: conv(IMAGES, (6, 4, 6, 3)), ValueError, r"conv2d: .*\(2, 4, 5, 5\).* got 6 x 3"),
    (lambda: conv(IMAGES, WEIGHT, dilation=3), ValueError, r"conv2d: .* got 7 x 7"),
    (lambda: conv(IMAGES, WEIGHT, (4,)), ValueError,
        r"conv2d: expected bias of shape \(6,\).*\(4,\)"),
    (lambda: conv(IMAGES, WEIGHT, groups=4), ValueError,
        r"conv2d: groups must divide the 6.*got 4"),
    (lambda: conv(IMAGES, WEIGHT, groups=2), ValueError,
        r"\[batch, 8, .*groups=2, not empty, got \(2, 4, 5, 5\)"),
    (lambda: conv(IMAGES, WEIGHT, stride=0), ValueError,
        "conv2d: stride must be at least 1 .* got 0"),
    (lambda: conv(IMAGES, WEIGHT, stride=1.5), TypeError,
        "conv2d: stride must be an integer or a pair"),
    (lambda: conv(IMAGES, WEIGHT, padding=-1), ValueError, "conv2d: padding must be at least 0"),
    (lambda: conv(IMAGES, WEIGHT, padding=10**9), ValueError,
        r"conv2d: results .* shape \(2, 6, 2000000003, 2000000003\)"),
    (lambda: pool(IMAGES, 2, 2**63), ValueError, r"pool2d: stride must .* 2\*\*31, got 9223"),
    (lambda: conv(IMAGES, WEIGHT, padding="same", stride=2), ValueError,
        "conv2d: padding='same' must"),
    (lambda: pool(IMAGES, 6), ValueError, r"pool2d: .*\(2, 4, 5, 5\).* got 6 x 6"),
    (lambda: pool((4, 5, 5), 2), ValueError, r"pool2d: .*got \(4, 5, 5\)"),
    (lambda: pool((0, 4, 5, 5), 2), ValueError, r"pool2d: .*not empty"),
    (lambda: pool(IMAGES, 2, 2, 2), ValueError, "pool2d: padding must be at most half"),
    (lambda: pool(IMAGES, 2, 2, 0, "least"), ValueError, "pool2d: mode must be 'max' or 'average'"),
    (lambda: Conv2D(3, 4, 3, groups=2), ValueError,
        r"Conv2D: groups must divide in_channels \(3\)"),
    (lambda: Conv2D(0, 4, 3), ValueError, "Conv2D: in_channels must be at least 1, got 0"),
    (lambda: Conv2D(3, 4.0, 3), TypeError, "Conv2D: out_channels must be an integer"),  # type: ignore[arg-type]
    (lambda: Conv2D(3, 4, (3, 3, 3)), TypeError, "Conv2D: kernel must be"),  # type: ignore[arg-type]
    (lambda: Conv2D(3, 4, 2, padding="same"), ValueError, "Conv2D: padding='same' must"),
    (lambda: Pool2D(0), ValueError, "Pool2D: kernel must be at least 1"),
    (lambda: Pool2D(2, mode="mean"), ValueError, "Pool2D: mode must be"),
]  # fmt: skip


@for_each("call error words", BAD)
def test_bad_input_is_rejected(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()


@NATIVE_AND_NOT
def test_gradients_of_a_transposed_convolution_equal_central_differences(context: Any) -> None:
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=shape) for shape in ((2, 4, 3, 2), (4, 3, 3, 2), (6,))]
    options = (2, 3), (1, 0), (1, 2), 2, (1, 2)
    with context():
        gradcheck(lambda *variables: convolution.conv_transpose2d(*variables, *options), arrays)


def test_infinite_pixel_affects_neighbours_only_in_bilinear_mode() -> None:
    x = np.zeros((4, 4))
    x[0, 0] = np.inf
    result = Upsample(2, "bilinear")(fl.input(x)).array
    np.testing.assert_array_equal(result, np.pad(np.full((3, 3), np.inf), (0, 5)))


@for_each("shape", [(2, 3, 4), (1, 1), (1, 2, 5, 1)])
def test_gradients_of_bilinear_upsampling_equal_central_differences(shape: Any) -> None:
    gradcheck(Upsample((2, 3), "bilinear"), [np.random.default_rng(0).normal(size=shape)])


@for_each("shape outs", [((9, 64, 16, 16), 64), ((2, 256, 4, 4), 200), ((3, 8, 99, 99), 12)])
def test_results_of_several_threads_are_equal_in_each_run(shape: Any, outs: int) -> None:
    names = "openblas_get_num_threads", "openblas_set_num_threads"
    for get_threads, set_threads in [*libraries.functions_of("openblas", *names)][:1]:
        before, results = get_threads(), []
        for threads in (1, 3, 2, 2, before):
            set_threads(threads)
            sizes = (outs, shape[1], 3, 3), (outs,), shape
            x = [param(np.random.default_rng(0).normal(size=size)) for size in sizes]
            (result := F.conv2d(x[2], *x[:2], padding=1)).sum().backward()
            results.append([result.array, *(v.grad for v in x)])
        for one, *others, again, _ in zip(*results, strict=True):
            np.testing.assert_allclose(others, [one, one], atol=1e-9)
            np.testing.assert_array_equal(others[1], again)
