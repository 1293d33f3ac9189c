"""All functions: gradients against central differences and torch, edge cases, errors."""

from typing import Any

import numpy as np
import pytest

from flashlight_py import nn
from flashlight_py.autograd import Variable, functions, gradcheck, input, param
from flashlight_py.autograd import functions as F
from flashlight_py.device import floating
from tests.autograd.cases import CASES, Case
from tests.nn.oracle import Oracle, compare, weights_of
from tests.tables import for_each

EVERY_CASE = for_each("case", CASES)


@EVERY_CASE
def test_gradient_equals_central_differences(case: Case) -> None:
    gradcheck(case.ours, case.arrays)


@EVERY_CASE
@for_each("size", [0, 1])
def test_gradient_has_the_input_shape_if_sizes_are_small(case: Case, size: int) -> None:
    sizes = {n for array in case.arrays for n in array.shape}
    for cut in (*({n} for n in sizes), sizes):
        kept = [tuple(slice(size if n in cut else n) for n in x.shape) for x in case.arrays]
        arrays = [x[part].copy() for x, part in zip(case.arrays, kept, strict=True)]
        try:
            case.ours(*map(param, arrays))
        # The constants of a case have different sizes. NumPy before 2.3 warns about some indices.
        except (ValueError, IndexError, DeprecationWarning):
            continue
        gradcheck(case.ours, arrays)


@EVERY_CASE
def test_value_and_gradient_equal_torch(case: Case, oracle: Oracle) -> None:
    variables = [param(array.astype("float64")) for array in case.arrays]
    named = dict(zip("abcdefghi", variables, strict=False))
    code, ours = f"y = {case.torch_code}", case.ours(*variables)
    compare(oracle, code, ours, named, 1e-11, 1e-13, **case.extra)


@for_each("dtype tolerance", [("float16", 1e-2), ("bfloat16", 1e-1), ("float32", 2e-5)])
@EVERY_CASE
def test_narrow_dtypes_equal_float64_and_gradients_share_no_memory(
    case: Case, dtype: str, tolerance: float
) -> None:
    narrow = [array.astype(floating(dtype, "")) for array in case.arrays]
    variables = [param(array) for array in narrow]
    wide = [param(array.astype("float64")) for array in narrow]
    result, expected = case.ours(*variables), case.ours(*wide)
    seed = weights_of(result.array)
    result.backward(seed)
    expected.backward(seed.astype("float64"))
    grads = [variable.grad for variable in variables]
    references = [expected.array, *(variable.grad for variable in wide)]
    for array, reference in zip((result.array, *grads), references, strict=True):
        assert array.dtype.name == dtype
        np.testing.assert_allclose(array.astype("f8"), reference, rtol=tolerance, atol=tolerance)
    for number, grad in enumerate(grads):
        for other in (seed, result.array, *narrow, *grads[:number]):
            assert not np.shares_memory(grad, other)


def test_cases_cover_every_function() -> None:
    checked_below = {"astype", "dropout", "index"}
    names = {case.name for case in CASES}
    for name in set(functions.__all__) - checked_below:
        assert any(case == name or case.startswith(name + "_") for case in names), name


@for_each("name", ["sum", "max", "min", "mean", "var", "cumsum"])
@for_each("shape axis", [((0,), 0), ((1, 0), 0), ((1, 0), 1), ((2, 0, 3), -2)])
def test_reductions_of_empty_axes_equal_numpy(name: str, shape: tuple[int, ...], axis: int) -> None:
    x = np.ones(shape)
    try:
        expected = getattr(np, name)(x, axis)
    except (ValueError, RuntimeWarning):  # NumPy warns and returns nan
        with pytest.raises(ValueError, match=r"expected elements|zero-size"):
            getattr(F, name)(x, axis)
    else:
        np.testing.assert_array_equal(getattr(F, name)(x, axis).array, expected)


def gradient(result: Variable, leaf: Variable) -> np.ndarray:
    F.sum(result).backward()
    return leaf.grad


# Functions, inputs at kinks or at the ends of their range, values, and slopes of the documentation.
SLOPES: dict[str, tuple[Any, Any, Any, Any]] = {
    "relu": (F.relu, [-1, 0, 1], [0, 0, 1], [0, 0, 1]),
    "abs": (F.abs, [-1, 0, 1], [1, 0, 1], [-1, 0, 1]),
    "clamp": (lambda x: F.clamp(x, -1, 1), [-2, -1, 1, 2], [-1, -1, 1, 1], [0, 1, 1, 0]),
    "maximum": (lambda x: F.maximum(x, param(np.ones(1))), [1], [1], [0.5]),
    "minimum": (lambda x: F.minimum(param(np.ones(1)), x), [1], [1], [0.5]),
    "max": (lambda x: F.max(x, 1), [[1, 1, 1, 1], [0, 0, 2, 2]], [1, 2],
        [[0.25] * 4, [0, 0, 0.5, 0.5]]),
    "min": (lambda x: F.min(x, 1), [[1, 1, 1, 1], [0, 0, 2, 2]], [1, 0],
        [[0.25] * 4, [0.5, 0.5, 0, 0]]),
    "pow": (lambda x: x ** param(np.array([0.0, 1, 2])), [0, 0, 0], [1, 0, 0], [0, 1, 0]),
    "exponent": (lambda x: param(np.zeros(3)) ** x, [0, 1, 2], [1, 0, 0], [0, 0, 0]),
    "std": (lambda x: F.std(x, 1), [[0.5] * 3] * 2, [0, 0], np.zeros((2, 3))),
    **{f"norm {p}": (lambda x, p=p: F.norm(x, p, 1), np.zeros((2, 3)), [0, 0], np.zeros((2, 3)))
        for p in (1, 2, 3.5, np.inf)},
    "sigmoid": (F.sigmoid, [-1e4, 1e4], [0, 1], [0, 0]),
    "softmax": (F.softmax, [[1e4, 0, -1e4]], [[1, 0, 0]], [[0, 0, 0]]),
    "log_softmax": (F.log_softmax, [[1e4, 0, -1e4]], [[0, -1e4, -2e4]], [[-2, 1, 1]]),
    "softmax of a number": (lambda x: F.softmax(x, -1), 3, 1, 0),
    "log_softmax of a number": (lambda x: F.log_softmax(x, 0), 3, 0, 0),
    "logsumexp": (lambda x: F.logsumexp(x, 1), [[1e4, 0], [-np.inf, -np.inf], [3, -np.inf]],
        [1e4, -np.inf, 3], [[1, 0], [0, 0], [1, 0]]),
}  # fmt: skip


@for_each("name", SLOPES)
def test_functions_have_the_documented_slopes_at_kinks_and_limits(name: str) -> None:
    function, values, expected, slopes = SLOPES[name]
    x = param(np.array(values, "float64"))
    result = function(x)
    np.testing.assert_array_equal(result.array, expected)
    np.testing.assert_array_equal(gradient(result, x), slopes)


def test_logsumexp_accepts_infinite_and_integer_terms() -> None:
    assert F.logsumexp(np.array([np.inf, 0.0])).array == np.inf
    small = np.array([[1, 255]], "u1")
    np.testing.assert_allclose(F.logsumexp(small).array, np.log(np.exp(small.astype("f8")).sum()))


def test_astype_copies_if_the_dtype_is_the_same_and_integers_end_the_graph() -> None:
    x = param(np.ones(2, "float32"))
    assert not np.shares_memory(F.astype(x, "float32").array, x.array)
    assert not F.astype(x, "int64").calc_grad


def test_cross_entropy_ignores_samples_and_infinite_losses() -> None:
    for logs, labels, expected, grad in (
        (np.zeros((2, 3)), [-1, -1], 0, np.zeros((2, 3))),
        (np.array([[-np.inf, 0], [-1, -1]]), [-1, 1], 1, [[0, 0], [0, -1]]),
    ):
        x = param(logs)
        loss = F.categorical_cross_entropy(x, input(np.array(labels)))
        assert loss.scalar() == expected
        np.testing.assert_array_equal(gradient(loss, x), grad)


def test_cross_entropy_accepts_several_batch_dimensions() -> None:
    labels = np.array([[0, 1], [2, 3], [1, 1]])
    logs = param(np.log(np.full((3, 2, 4), 0.25)))
    loss = F.categorical_cross_entropy(logs, input(labels), "none")
    np.testing.assert_allclose(loss.array, np.full((3, 2), np.log(4)))


def entropy(labels: Any, reduction: str = "mean") -> Any:
    return F.categorical_cross_entropy(np.zeros((2, 3)), np.array(labels), reduction)


ONE = np.ones(1, int)
# Calls with a variable of shape (3, 4), and their errors.
INVALID: list[tuple[Any, str]] = [
    (lambda x: F.linear(x, input(np.ones((2, 5)))), r"\[\.\.\., 5\].*got \(3, 4\)"),
    (lambda x: F.linear(x, x, input(np.ones(4))), r"bias of shape \(3,\).*got \(4,\)"),
    (lambda x: F.linear(x, input(np.ones(4))), r"weight of shape \[out, in\], got \(4,\)"),
    (lambda x: F.linear(input(np.array(1.0)), x), r"\[\.\.\., 4\].*got \(\)"),
    (lambda x: F.mean_squared_error(x, x[0]), r"\(3, 4\), got \(4,\)"),
    (lambda x: F.mean_squared_error(x[:0], x[:0]), r"size 0.*\(0, 4\), \(0, 4\)"),
    (F.clamp, "got None for both"),
    (lambda x: F.clamp(x, 2, 1), "must not exceed"),
    (lambda x: F.sum(x, 2), "got 2"),
    (lambda x: F.sum(x, (0, -2)), "distinct"),
    (lambda x: F.mean(x[:0]), "expected elements"),
    (lambda x: F.var(x[:1], 0, ddof=1), "more than ddof"),
    (lambda x: F.softmax(x, 2), r"softmax: axis must be .* shape \(3, 4\), got 2"),
    (lambda x: F.log_softmax(x, -3), r"log_softmax: axis must be .* got -3"),
    (lambda x: F.softmax(x[:, :0]), r"softmax: expected inputs without .* size 0.*\(3, 0\)"),
    (lambda x: F.embedding(x, ONE, 9), "embedding: padding_idx must be in .* got 9"),
    (lambda x: F.log_softmax(x[:0], 0), r"log_softmax: expected inputs without .*\(0, 4\)"),
    (lambda x: F.transpose(x, (0, 0)), r"each of 2 axes once, got \(0, 0\)"),
    (lambda x: F.concatenate([]), "got an empty list"),
    (lambda x: F.reshape(x, (5, 5)), "reshape"),
    (lambda x: x @ 2.0, "matmul: expected shapes with axes"),
    (lambda x: x @ x, "mismatch"),
    (lambda x: x + np.ones(3), "broadcast"),
    (lambda x: F.gelu(x, "erf"), "'none', 'tanh' or a bool, got 'erf'"),
    (lambda x: nn.GELU("erf"), "'none', 'tanh' or a bool, got 'erf'"),
    *[(lambda x, ratio=ratio: F.dropout(x, ratio), "at least 0 and below 1")
        for ratio in (-0.1, 1, 2.0, float("nan"))],
    (lambda x: entropy([0, 3]), r"targets of 0..2, or .* got target 3"),
    (lambda x: entropy([0, -2]), "target -2"),
    (lambda x: entropy([0, 1, 2]), r"shape \(2,\) .* got \(3,\)"),
    (lambda x: entropy([0, 1], "median"), "got 'median'"),
]  # fmt: skip


@for_each("call match", INVALID)
def test_functions_raise_value_error_for_invalid_arguments(call: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        call(param(np.ones((3, 4))))


def test_cross_entropy_raises_type_error_for_floating_labels() -> None:
    with pytest.raises(TypeError, match="integers, got float64"):
        entropy([0.0, 1.0])


def test_dropout_of_ratio_zero_returns_its_input() -> None:
    x = param(np.ones(2))
    assert F.dropout(x, 0) is x


def test_index_accepts_variables() -> None:
    x, where = param(np.arange(3.0)), input(np.array([2, 2]))
    np.testing.assert_array_equal(gradient(x[where], x), [0, 0, 2])
    with pytest.raises(IndexError):
        x[5]


@for_each(
    "x largest",
    [
        (np.array([1.0, 3.0, 3.0]), [1, 2, 0]),
        (np.array([np.nan, -1.0, 0.0]), [2, 1, 0]),
        (np.array([0, 5, 3, 5], "u1"), [1, 3, 2]),
        (np.array([-(2**63), 0, 5]), [2, 1, 0]),
        (np.array([0, 2**64 - 1, 1], "u8"), [1, 2, 0]),
        (np.array([False, True, False]), [1, 0, 2]),
    ],
)
def test_topk_returns_the_largest_values_and_their_indices(x: np.ndarray, largest: Any) -> None:
    values, indices = F.topk(x, 3)
    assert indices.array.tolist() == largest
    assert not indices.calc_grad
    np.testing.assert_array_equal(values.array, x[largest])


@for_each("dtype", ["uint8", "int32", "uint64"])
def test_indices_may_have_any_integer_dtype(dtype: str) -> None:
    """The array has 600 elements, more than an 8-bit index can count."""
    x, index = np.arange(600.0).reshape(200, 3), np.array([[0, 150, 199]]).astype(dtype)
    np.testing.assert_array_equal(F.gather(x, index, 0).array, [[0, 451, 599]])
    weight = param(x)
    np.testing.assert_array_equal(F.embedding(weight, index).array, x[[[0, 150, 199]]])
    F.sum(F.embedding(weight, index)).backward()
    assert weight.grad.sum(1)[[0, 150, 199]].tolist() == [3, 3, 3]


@for_each("dtype", ["uint8", "uint64", "bool", "int64"])
def test_integers_are_cast(dtype: str) -> None:
    for function in (F.softmax, F.log_softmax):
        integers = np.array([[3, 0, 1, 1]]).astype(dtype)
        expected = function(input(integers.astype(np.float64))).array
        np.testing.assert_array_equal(function(input(integers)).array, expected)
    x = param(np.full(2, 0.5, np.float32))
    loss = F.mean_squared_error(x, input(np.array([1, 0]).astype(dtype)))
    assert (loss.dtype, loss.scalar()) == (np.float32, 0.25)


@for_each("shape", [(0, 4), (0, 2, 4)])
def test_functions_accept_empty_batches(shape: tuple[int, ...]) -> None:
    x, w, b = param(np.ones(shape)), param(np.ones((3, 4))), param(np.ones(3))
    assert F.linear(x, w, b).shape == (*shape[:-1], 3)
    np.testing.assert_array_equal(gradient(F.linear(x, w, b), w), np.zeros((3, 4)))
    np.testing.assert_array_equal(b.grad, np.zeros(3))
    for function in (F.softmax, F.log_softmax):
        assert gradient(function(x), x).shape == shape


@for_each(
    "function arrays error words",
    [
        # The factor counts as a constant, so the gradient is half of the full derivative.
        (lambda x: x * x.array, [np.ones(2)], AssertionError, "input 0, element 0: expected"),
        (lambda x, y: x * 2.0, [np.ones(2)] * 2, AssertionError, "no gradient of input 1"),
        (F.log, [-np.ones(1)], AssertionError, "nan"),
        (F.exp, [np.ones(2, "float32")], TypeError, "float64 arrays, got float32"),
    ],
)
def test_gradcheck_raises_for_wrong_gradients_and_keeps_arrays(
    function: Any, arrays: list[np.ndarray], error: type[Exception], words: str
) -> None:
    before = np.copy(arrays)
    with np.errstate(all="ignore"), pytest.raises(error, match=words):
        gradcheck(function, arrays)
    np.testing.assert_array_equal(arrays, before)


OPERATORS = {"add", "sub", "mul", "div", "pow", "maximum", "minimum", "matmul", "where"}


@EVERY_CASE
def test_functions_use_arrays_as_constants(case: Case) -> None:
    first, *others = case.arrays
    assert case.ours(param(first), *others).calc_grad
    name = case.name.partition("_")[0]
    if name in OPERATORS - {"pow"} or case.name == "pow":
        with pytest.raises(TypeError, match=r"got ndarray and ndarray.* by fl.input"):
            case.ours(first, *others)
    elif name not in ("index", "pow"):  # NumPy uses its own operators
        assert not case.ours(first, *others).calc_grad


@for_each("mode", ["constant", "edge", "reflect", "symmetric", "wrap"])
@for_each("width", [1, (2, 1), ((0, 1), (2, 0))])
def test_pad_equals_numpy_and_central_differences(mode: str, width: Any) -> None:
    x = np.arange(12.0).reshape(3, 4)
    np.testing.assert_array_equal(F.pad(x, width, mode).array, np.pad(x, width, mode))
    gradcheck(lambda v: F.pad(v, width, mode), [x])
    np.testing.assert_array_equal(F.pad(np.ones(1), 1, constant_values=7).array, [7, 1, 7])


def test_sort_equals_numpy_if_elements_are_equal_or_nan() -> None:
    x = np.array([[2.0, np.nan, 1.0, 2.0], [0.0, -0.0, np.inf, -np.inf]])
    for axis in (0, 1, -1):
        np.testing.assert_array_equal(F.sort(x, axis).array, np.sort(x, axis))
