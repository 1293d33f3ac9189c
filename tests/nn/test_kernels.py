"""Kernels of normalization, attention and elementwise functions, compared with array operations."""

import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.autograd import functions as F
from flashlight_py.autograd.functions.sequences import GATES
from tests.nn.oracle import Oracle, compare, weights_of, without_kernels
from tests.tables import for_each, pairs

RANDOM = np.random.default_rng(0)
MAY = RANDOM.random((2, 1, 70, 150)) < 0.5
MAY[0, 0, 3] = False  # all keys of this query are masked
ADDED = RANDOM.standard_normal((70, 150))
ROWS = RANDOM.standard_normal((5, 3, 301))
IMAGES = RANDOM.standard_normal((3, 6, 9, 11)) * [[[[3]], [[1]], [[9]], [[2]], [[5]], [[1]]]] + 4
LAST = np.ascontiguousarray(IMAGES.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
WEIGHT, BIAS = RANDOM.standard_normal((2, 6))
HEADS = tuple(RANDOM.standard_normal((2, 3, n, d)) for n, d in ((70, 16), (150, 16), (150, 8)))


SEQUENCES, WEIGHTS = RANDOM.standard_normal((9, 5, 35)), RANDOM.standard_normal((72, 55)) / 4


def attention(*options: Any) -> Callable[..., Any]:
    return lambda q, k, v: F.attention(q, k, v, *options)


def recurrent(kind: str, reverse: bool) -> Callable[..., Any]:
    """Return a function of the layer's states and last states, side by side."""
    return lambda x, *weights: F.concatenate(
        [F.reshape(y, (9, -1)) for y in F.recurrent(kind, x, weights, (), reverse)], 1
    )


FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[np.ndarray, ...]]] = {
    "layer_norm": (F.layer_norm, (ROWS, ROWS[0, 0], ROWS[0, 1])),
    "layer_norm_plain": (F.layer_norm, (ROWS,)),
    "rms_norm": (F.rms_norm, (ROWS, ROWS[0, 0])),
    "batch_norm": (F.batch_norm, (IMAGES, WEIGHT, BIAS)),
    "batch_norm_last": (F.batch_norm, (LAST, WEIGHT, BIAS)),
    "batch_norm_given": (lambda x, w, b: F.batch_norm(x, w, b, BIAS, WEIGHT**2 + 0.5),
        (LAST, WEIGHT, BIAS)),
    "batch_norm_flat": (F.batch_norm, (ROWS[0].T,)),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), (IMAGES, WEIGHT, BIAS)),
    "group_norm_last": (lambda x, w, b: F.group_norm(x, 3, w, b), (LAST, WEIGHT, BIAS)),
    "softmax": (F.softmax, (ROWS,)),
    "log_softmax": (F.log_softmax, (ROWS,)),
    "gelu": (F.gelu, (ROWS * 3,)),
    "gelu_by_tanh": (lambda x: F.gelu(x, True), (ROWS * 3,)),
    "silu_last": (F.silu, (LAST,)),
    "sigmoid": (F.sigmoid, (ROWS * 9,)),
    "relu": (F.relu, (RANDOM.standard_normal((2, 90, 99)),)),
    "relu_last": (F.relu, (np.tile(LAST.transpose(0, 2, 3, 1), 9).transpose(0, 3, 1, 2),)),
    "elu_last": (lambda x: F.elu(x, 0.7), (LAST - 4,)),
    "leaky_relu": (lambda x: F.leaky_relu(x, 1.5), (ROWS,)),
    "softplus": (lambda x: F.softplus(x, 1.5), (ROWS * 9,)),
    **{
        f"attention_{kind}_{causal}_{ratio}": (attention(mask, causal, ratio), HEADS)
        for kind, mask in (("plain", None), ("may", MAY), ("added", ADDED))
        for causal in (False, True)
        for ratio in (0.0, 0.3)
    },
    **{
        f"recurrent_{kind}_{reverse}": (recurrent(kind, reverse), (SEQUENCES, *(
            WEIGHTS[: GATES[kind] * 18, start:stop].squeeze()
            for start, stop in ((0, 35), (35, 53), (53, 54), (54, 55)))))
        for kind in GATES
        for reverse in (False, True)
    },
    "self_attention": (lambda x: F.self_attention(x, 4, None, True, 0.2),
        (RANDOM.standard_normal((2, 150, 24)),)),
}  # fmt: skip
OTHERS: dict[str, tuple[Callable[..., Any], tuple[np.ndarray, ...]]] = {
    "conv": (lambda x, w: F.conv2d(x, w, padding=1),
        (IMAGES, RANDOM.standard_normal((6, 6, 3, 3)))),
    "pool": (lambda x: F.pool2d(x, 3, 2, 1), (IMAGES,)),
    "pool_mean": (lambda x: F.pool2d(x, 3, 2, 1, "average"), (IMAGES,)),
    "linear": (F.linear, (ROWS, ROWS[0, :2])),
    "dropout": (lambda x: F.dropout(x, 0.3), (ROWS,)),
}  # fmt: skip
Convert = Callable[[np.ndarray], np.ndarray]


def results_of(name: str, convert: Convert) -> list[np.ndarray]:
    function, arrays = {**FUNCTIONS, **OTHERS}[name]
    fl.set_seed(0)
    variables = [fl.param(convert(array)) for array in arrays]
    result = function(*variables)
    result.backward(weights_of(result.array))
    return [result.array, *(v.grad for v in variables)]


@for_each("dtype", ["float16", "float32", "float64"])
@for_each("name", FUNCTIONS)
def test_kernels_equal_operations(name: str, dtype: str) -> None:
    by_kernels = results_of(name, lambda x: x.astype(dtype))
    with without_kernels():
        in_numpy = results_of(name, lambda x: x.astype(dtype))
    digits = {"float16": 1e-3, "float32": 1e-5, "float64": 1e-12}[dtype]
    for one, other in zip(by_kernels, in_numpy, strict=True):
        assert one.dtype == other.dtype == dtype
        size = float(np.abs(other).max())
        np.testing.assert_allclose(one, other, rtol=digits, atol=digits * max(1, size))


STRANGE: dict[str, Convert] = {
    "swapped": lambda x: x.astype(x.dtype.newbyteorder()),
    "unaligned": lambda x: (
        np.frombuffer(b" " + x.tobytes(), "u1")[1:].view(x.dtype).reshape(x.shape)
    ),
}


@for_each("layout", STRANGE)
@for_each("name", [*FUNCTIONS, *OTHERS])
def test_kernels_accept_unaligned_and_swapped_arrays(name: str, layout: str) -> None:
    strange = results_of(name, STRANGE[layout])
    if name != "dropout" or layout == "unaligned":  # without the kernel, other numbers are drawn
        for one, other in zip(strange, results_of(name, lambda x: x), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


@for_each("name", ["batch_norm", "batch_norm_last", "group_norm_last", "silu_last", "relu_last"])
def test_results_and_gradients_keep_the_memory_layout(name: str) -> None:
    result, gradient = results_of(name, lambda x: x.astype("float32"))[:2]
    strides = FUNCTIONS[name][1][0].astype("float32").strides
    assert result.strides == strides
    assert gradient.strides == strides


@for_each("name", ["layer_norm", "batch_norm_last", "group_norm"])
def test_variance_is_accurate_for_large_means(name: str) -> None:
    function, (x, *rest) = FUNCTIONS[name]
    exact, single = (
        function(*[fl.input((array + 5000 * (array is x)).astype("float32").astype(dtype))
                   for array in (x, *rest)]).array
        for dtype in ("float64", "float32")
    )  # fmt: skip
    np.testing.assert_allclose(single, exact, rtol=1e-3, atol=2e-3)


@for_each("function", [F.gelu, F.silu, F.sigmoid, lambda x: F.gelu(x, True)])
def test_float32_functions_are_accurate(function: Callable[..., Any]) -> None:
    """The error is relative to the value, also in the tails."""
    x = np.concatenate([np.linspace(-9, 9, 5001), np.geomspace(1e-30, 80, 500)]).astype("float32")
    both = [function(fl.input(x.astype(dtype))).array for dtype in ("float32", "float64")]
    np.testing.assert_allclose(*both, rtol=2e-5, atol=1e-30)
    np.testing.assert_allclose(*both, rtol=1e-6, atol=2e-7)


def test_kernels_propagate_nan() -> None:
    rows = np.ones((3, 40), "float32")
    rows[1, 7] = np.nan
    for function in (F.softmax, F.log_softmax, F.layer_norm, F.rms_norm):
        assert np.isnan(function(fl.input(rows)).array).any(1).tolist() == [False, True, False]
    for function in (F.gelu, F.silu, F.sigmoid):
        assert (np.isnan(function(fl.input(rows)).array) == np.isnan(rows)).all()
    q = rows[None, None]
    assert np.isnan(F.attention(q, q, q).array).all()


@for_each("causal", [False, True])
def test_attention_with_mask_equals_torch(causal: bool, oracle: Oracle) -> None:
    """A query whose keys are all masked gets 0. torch returns nan."""
    may = MAY.copy()
    may[..., 0] = True
    leaves = {name: fl.param(array) for name, array in zip("qkv", HEADS, strict=True)}
    both = may & (np.tril(np.ones((70, 150), bool)) | (not causal))
    code = "y = F.scaled_dot_product_attention(q, k, v, may)"
    result = F.attention(*leaves.values(), may, causal)
    compare(oracle, code, result, leaves, 1e-10, 1e-12, may=both)
    nothing = F.attention(*HEADS, MAY).array[0, :, 3]
    np.testing.assert_array_equal(nothing, np.zeros_like(nothing))


@for_each("dtype", ["float32", "float64"])
@for_each("least", [0, -1e6, -1e9, -1e38])
def test_attention_is_accurate_for_large_scores(least: float, dtype: str) -> None:
    """If all scores of a row are equal, the weights are 1 / n in both passes."""
    q, k = (fl.param(np.zeros((1, 1, 8, 4), dtype)) for _ in range(2))
    v = fl.param(RANDOM.standard_normal((1, 1, 8, 4)).astype(dtype))
    F.attention(q, k, v, np.full((8, 8), least, dtype)).sum().backward()
    np.testing.assert_allclose(v.grad, np.ones_like(v.array), rtol=1e-6)


def test_attention_does_not_store_all_scores() -> None:
    """With 1,024 positions, the float32 scores of one head need 4 MiB."""
    x = fl.param(RANDOM.standard_normal((1, 1024, 48)).astype("float32"))
    F.sum(F.self_attention(x, 1)).backward()
    tracemalloc.start()
    F.sum(F.self_attention(x, 1, None, True, 0.1)).backward()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


@for_each("shape", [(100_000,), (50, 20, 10, 10)])
def test_dropout_zeroes_the_expected_share(shape: tuple[int, ...]) -> None:
    fl.set_seed(0)
    x = fl.param(np.ones(shape, "float32"))
    results = [F.dropout(x, 0.3) for _ in range(2)]
    for result in results:
        assert set(np.unique(result.array)) == {np.float32(0), np.float32(1 / 0.7)}
        assert abs((result.array == 0).mean() - 0.3) < 0.006  # four standard deviations
    both = np.mean((results[0].array == 0) & (results[1].array == 0))
    assert abs(both - 0.09) < 0.004
    neighbours = results[0].array.reshape(-1) == 0
    assert abs((neighbours[1:] & neighbours[:-1]).mean() - 0.09) < 0.004
    results[0].backward(np.ones(shape, "float32"))
    np.testing.assert_array_equal(x.grad, results[0].array)


@for_each("axes", [(0, 3, 1, 2), (0, 2, 1, 3), (3, 2, 1, 0)])
def test_dropout_gradient_may_have_another_layout(axes: tuple[int, ...]) -> None:
    x = fl.param(np.ones((2, 5, 4, 3), "float32").transpose(axes))
    result = F.dropout(x, 0.5)
    result.backward(np.ones(x.shape, "float32"))
    np.testing.assert_array_equal(x.grad, result.array)


def test_attention_dropout_keeps_the_mean() -> None:
    fl.set_seed(0)
    q, v = np.zeros((4, 4, 200, 8), "float32"), np.ones((4, 4, 200, 8), "float32")
    result = F.attention(q, q, v, dropout=0.4).array
    assert abs(result.mean() - 1) < 0.005
    assert abs(result[..., 0].std() - (0.4 / 0.6 / 200) ** 0.5) < 0.003


@for_each("dtype context", pairs(["int64", "uint8", "bool"], [nullcontext, without_kernels]))
@for_each(
    "function",
    [
        *(F.layer_norm, F.rms_norm, F.batch_norm),
        lambda x: F.group_norm(x, 2),
        lambda x: F.dropout(x, 0.5),
        lambda x: F.pool2d(x, 2),
        lambda x: F.pool2d(x, 2, mode="average"),
        lambda x: F.mean_squared_error(x, x),
        lambda x: F.mean_absolute_error(x[:1], x[1:2]),
        lambda x: F.binary_cross_entropy_with_logits(x, x),
        lambda x: F.categorical_cross_entropy(x, np.zeros((3, 6, 9), int)),
    ],
)
def test_norms_convert_integers_to_float64(function: Any, dtype: str, context: Any) -> None:
    results = []
    for x in (IMAGES.astype(dtype), IMAGES.astype(dtype).astype("float64")):
        fl.set_seed(0)
        with context():
            results.append(function(fl.input(x)))
    assert results[0].dtype == results[1].dtype == "float64"
    np.testing.assert_array_equal(results[0].array, results[1].array)


X = np.zeros((2, 6, 4), "float32")
ERRORS: dict[str, Callable[[], Any]] = {
    r"layer_norm: expected input of shape \[\.\.\., 3\] .* got \(2, 6, 4\)": (
        lambda: F.layer_norm(X, np.ones(3))),
    r"layer_norm: dimensions must be 1 to 1 for shape \(3,\), got 2": (
        lambda: F.layer_norm(np.ones(3), dimensions=2)),
    r"LayerNorm: shape\[1\] must be at least 1, got 0": lambda: fl.nn.LayerNorm((2, 0)),
    r"RMSNorm: size must be at least 1, got 0": lambda: fl.nn.RMSNorm(0),
    r"GroupNorm: channels must be at least 1, got 0": lambda: fl.nn.GroupNorm(1, 0),
    r"BatchNorm: channels must be at least 1, got 0": lambda: fl.nn.BatchNorm(0),
    r"GroupNorm: expected input of shape \[N, 4, \.\.\.\], got \(2, 6, 4\)": (
        lambda: fl.nn.GroupNorm(2, 4)(fl.input(X))),
    r"group_norm: groups must divide the 6 channels .*, got 4": lambda: F.group_norm(X, 4),
    r"GroupNorm: groups must divide 6 channels, got 4": lambda: fl.nn.GroupNorm(4, 6),
    r"group_norm: expected input of shape \[N, C, \.\.\.\], not empty, got \(0, 6\)": (
        lambda: F.group_norm(np.ones((0, 6)), 2)),
    r"batch_norm: expected weight of shape \(6,\) .* \(2, 6, 4\), got \(4,\)": (
        lambda: F.batch_norm(X, np.ones(4))),
    r"batch_norm: mean and variance must have shape \(6,\).* got \(4,\) and \(4,\)": (
        lambda: F.batch_norm(X, None, None, np.ones(4), np.ones(4))),
    r"expected more than one value per channel, got input of shape \(1, 6\)": (
        lambda: fl.nn.BatchNorm(6)(fl.input(np.ones((1, 6))))),
    r"BatchNorm: expected input of shape \[N, 5, \.\.\.\], got \(2, 6, 4\)": (
        lambda: fl.nn.BatchNorm(5)(fl.input(X))),
    r"MultiheadAttention: heads must divide dim 6, got 4": (
        lambda: fl.nn.MultiheadAttention(6, 4)),
    r"MultiheadAttention: expected .* positions, 6\], got \(2, 6, 4\)": (
        lambda: fl.nn.MultiheadAttention(6, 2)(fl.input(X))),
    r"attention: expected q .* got \(1, 2, 6, 4\), \(1, 2, 6, 3\) and \(1, 2, 6, 3\)": (
        lambda: F.attention(X[None], X[None, ..., 1:], X[None, ..., 1:])),
    r"a mask that broadcasts to .* = \(1, 2, 6, 6\), got shape \(6, 5\)": (
        lambda: F.attention(X[None], X[None], X[None], np.ones((6, 5), bool))),
    r"attention: .* size 0 .* got \(1, 2, 6, 4\), \(1, 2, 0, 4\), \(1, 2, 0, 4\)": (
        lambda: F.attention(X[None], X[None, :, :0], X[None, :, :0])),
    r"attention: .* size 0 .* got \(1, 2, 6, 0\), \(1, 2, 6, 0\), ": (
        lambda: F.attention(X[None, ..., :0], X[None, ..., :0], X[None])),
    r"self_attention: expected .* by 3 heads, got \(2, 6, 4\)": lambda: F.self_attention(X, 3),
    r"Transformer: norm must be one of \('pre', 'post'\), got 'none'": (
        lambda: fl.nn.Transformer(4, 2, norm="none")),
    r"PositionEmbedding: expected .* at most 5, 4\], got \(2, 6, 4\)": (
        lambda: fl.nn.PositionEmbedding(5, 4)(fl.input(X))),
}  # fmt: skip


@for_each("pattern", ERRORS)
def test_errors_name_the_layer_and_shapes(pattern: str) -> None:
    with pytest.raises(ValueError, match=pattern):
        ERRORS[pattern]()


@for_each("function", [F.sigmoid, F.gelu, F.silu, lambda x: F.dropout(x, 0.5)])
def test_backward_accepts_numpy_scalars_as_gradients(function: Any) -> None:
    x = fl.param(np.ones((), np.float32))
    (function(x) * fl.input(np.ones(3, np.float32))).sum().backward()
    assert x.grad.shape == ()


TOO_LARGE = """
import resource
import numpy as np
import flashlight_py as fl

conv2d = fl.autograd.functions.conv2d
x, weight = np.ones((1, 2048, 4, 4), np.float32), np.zeros((2048, 2048, 3, 3), np.float32)
conv2d(x[:, :16].copy(), weight[:16, :16].copy(), padding=1)
step = fl.capture(lambda a, b: conv2d(fl.input(a), b, padding=1).array)
for limited in (step, lambda a, b: conv2d(a, b, padding=1)):
    if limited is step:
        step(x, weight)
    size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 100 * 2**20, -1))
    try:
        limited(x, weight)
    except MemoryError:
        print("MemoryError")
    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
"""


@pytest.mark.slow
def test_kernel_raises_memory_error_without_memory() -> None:
    command = [sys.executable, "-c", TOO_LARGE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.split() == ["MemoryError"] * 2, done.stderr


ONE_CHANNEL, FILTERS = IMAGES[:, :1], RANDOM.standard_normal((2, 1, 3, 3))
RESIZED: dict[str, tuple[Callable[..., Any], tuple[np.ndarray, ...]]] = {
    "layer_norm": (F.layer_norm, (ROWS, ROWS[0, 0])),
    "group_norm": (lambda x, w: F.group_norm(x, 2, w), (IMAGES, WEIGHT)),
    "log_softmax": (lambda x: F.log_softmax(x * 1), (ROWS,)),
    "attention": (F.attention, (*HEADS, MAY)),
    "self_attention": FUNCTIONS["self_attention"],
    "conv2d": (lambda x: F.conv2d(x, fl.param(FILTERS)), (ONE_CHANNEL,)),
}


@for_each("name", RESIZED)
def test_backward_raises_runtime_error_if_an_array_was_resized(name: str) -> None:
    """The kernel may have a view of the resized array, for example for images of one channel."""
    function, arrays = RESIZED[name]
    for index in range(len(arrays)):
        variables = [fl.Variable(array.copy(), array.dtype != bool) for array in arrays]
        result = function(*variables)
        loss = (result + 1).sum()
        (result if name == "log_softmax" else variables[index]).array.resize(0, refcheck=False)
        with pytest.raises(RuntimeError, match=r"got 0; call backward\(\) before you resize"):
            loss.backward()
