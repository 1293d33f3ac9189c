"""Variables: accepted and rejected values, stored arrays, random numbers of the process."""

import copy
import operator
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.autograd import Variable, input, no_grad, param
from flashlight_py.autograd import functions as F
from flashlight_py.random import generator, set_seed
from tests.cupy_stand_in import StandInArray, StandInCupy
from tests.parallel.trees import Tensor
from tests.tables import for_each


def test_variable_has_the_properties_of_its_array() -> None:
    array = np.ones((2, 3), "float32")
    for variable, calc_grad in (
        *((input(array), False), (no_grad(array), False), (param(array), True)),
        *((Variable(array), False), (Variable(array, calc_grad=True), True)),
    ):
        assert (variable.array is array, variable.numpy() is array) == (True, True)
        assert (variable.calc_grad, variable.grad) == (calc_grad, None)
        assert (variable.shape, variable.ndim, variable.size) == ((2, 3), 2, 6)
        assert variable.dtype == "float32"
        assert variable.detach().array is array
        assert not np.shares_memory(variable.copy().array, array)
    assert repr(param(np.array([1.0]))) == "Variable(array([1.]), calc_grad=True)"
    variable.calc_grad = False
    assert not (variable * 2.0).calc_grad
    variable.array = new = np.zeros((2, 3), "float32")
    assert variable.array is new
    assert not (param(array) * 2).detach().calc_grad


def test_variable_accepts_scalars_and_dlpack_arrays() -> None:
    x = param(np.float32(3))  # type: ignore[arg-type]
    assert isinstance(x.array, np.ndarray)
    assert x.dtype == "float32"
    assert input(np.array([[2.5]])).scalar() == 2.5
    assert isinstance(input(np.array(1)).scalar(), int)
    array = np.ones(3)
    assert np.shares_memory(input(Tensor(array)).array, array)  # type: ignore[arg-type]


def test_dlpack_exports_constants_without_a_copy() -> None:
    array = np.ones(3)
    for variable in (input(array), param(array).detach()):
        assert np.shares_memory(np.from_dlpack(variable), array)
    assert not np.shares_memory(np.from_dlpack(input(array), copy=True), array)
    array.flags.writeable = False
    assert not np.from_dlpack(input(array)).flags.writeable
    for variable in (param(array), param(array) * 2):
        with pytest.raises(BufferError, match=r"shape \(3,\) that needs a.*variable\.array"):
            np.from_dlpack(variable)


def test_dlpack_forwards_all_options_to_cupy(
    strict: StandInCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, method in {"": lambda _, **options: options, "_device": lambda _: (2, 1)}.items():
        monkeypatch.setattr(StandInArray, f"__dlpack{name}__", method, raising=False)
    variable = input(strict.asarray(np.ones(3)))  # type: ignore[arg-type]
    options = {"stream": 7, "max_version": (1, 0), "dl_device": (1, 0), "copy": True}
    assert variable.__dlpack__(**options) == options
    assert variable.__dlpack_device__() == (2, 1)


@for_each("dtype", ["int64", "bool", "complex64", "U3", "datetime64[s]", "object"])
def test_param_raises_type_error_unless_floating(dtype: str) -> None:
    array = np.empty(2, dtype)
    with pytest.raises(TypeError, match="floating dtype"):
        param(array)
    variable = input(array)
    with pytest.raises(TypeError, match="floating dtype"):
        variable.calc_grad = True


# Errors of a leaf x of shape (2,), or of a result y of x.
WRONG: list[tuple[Callable[[Any, Any], object], type[Exception], str]] = [
    (lambda x, y: setattr(x, "array", np.ones(3)), ValueError, r"\(2,\), got \(3,\)"),
    (lambda x, y: setattr(x, "array", np.ones(2, "f4")), TypeError, "float64, got float32"),
    (lambda x, y: setattr(x, "array", [1.0, 1.0]), TypeError, "list"),
    (lambda x, y: x.scalar(), ValueError, r"shape \(2,\)"),
    (lambda x, y: input(np.ones(1)).backward(), RuntimeError, "calc_grad=True"),
    (lambda x, y: y.backward(), ValueError, r"one element, got shape \(2,\)"),
    (lambda x, y: y.backward(np.ones(3)), ValueError, r"\(2,\), got \(3,\)"),
    (lambda x, y: y.backward(np.ones(2, "f4")), TypeError, "float64, got float32"),
    (lambda x, y: y.backward([1.0, 1.0]), TypeError, "list"),
    (lambda x, y: x.register_grad_hook(3), TypeError, "callable, got int"),
    (lambda x, y: y.register_grad_hook(print), ValueError, "leaf"),
    (lambda x, y: setattr(y, "calc_grad", False), ValueError, "expected a leaf"),
    *[(lambda x, y, value=value: Variable(value), TypeError, type(value).__name__)
        for value in ([1.0, 2.0], 3.0, "text", None, object())],
    *[(lambda x, y, name=name: getattr(x, name), AttributeError,
        f"^a Variable x has no attribute '{name}'$")
        for name in ("nonsense", "__len_hint__", "_private", "__array_interface__")],
    (lambda x, y: x * [1.0, 2.0], TypeError, "list"),
    (lambda x, y: x + "2", TypeError, "str"),
    (lambda x, y: x + None, TypeError, "NoneType"),
    (lambda x, y: F.add(x.array, 1.0), TypeError, "at least one Variable, got ndarray and float"),
]  # fmt: skip


@for_each("call error words", WRONG)
def test_invalid_calls_raise_and_change_nothing(call: Any, error: Any, words: str) -> None:
    x = param(np.ones(2))
    y = x * 2.0
    with pytest.raises(error, match=words):
        call(x, y)
    y.backward(np.ones(2))
    assert (x.array.tolist(), x.grad.tolist()) == ([1, 1], [2, 2])


def test_copies_have_new_arrays_without_graph_and_hook() -> None:
    x = param(np.ones(2))
    x.register_grad_hook(lambda _: pytest.fail("hooks are not copied"))
    y = x * 2.0
    for duplicate in (copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert duplicate.calc_grad
        assert not np.shares_memory(duplicate.array, x.array)
        F.sum(duplicate).backward()
    np.testing.assert_array_equal(copy.deepcopy(y).array, y.array)


@for_each("other", [2, 2.0, np.float64(2), np.full(3, 2, "float32")])
def test_operators_accept_numbers_and_arrays_on_both_sides(other: Any) -> None:
    array = np.array([1, 2, 4], "float32")
    x = param(array)
    pairs = [(-x, -array), (abs(-x), array)]
    for of in (operator.add, operator.sub, operator.mul, operator.truediv, operator.pow):
        pairs += [(of(x, other), of(array, 2)), (of(other, x), of(2, array))]
    for result, expected in pairs:
        assert isinstance(result, Variable)
        assert result.dtype == "float32"
        np.testing.assert_array_equal(result.array, expected)


@for_each("narrow", ["float16", "float32"])
def test_operators_promote_like_numpy_and_gradients_keep_dtypes(narrow: str) -> None:
    wide = {"float16": "float32", "float32": "float64"}[narrow]
    a, b = param(np.full(3, 2, narrow)), param(np.full(3, 3, wide))
    product = a * b * 2.0  # a Python number keeps the dtype
    assert product.array.dtype == wide
    product.backward(np.ones(3, wide))
    assert (a.grad.dtype, b.grad.dtype) == (narrow, wide)
    assert (a.grad.tolist(), b.grad.tolist()) == ([6] * 3, [4] * 3)
    integers = input(np.array([1, 2]))
    assert ((integers + 1).dtype, (integers * 0.5).dtype) == ("int64", "float64")


class TestAsAnArray:
    """NumPy operations on variables: the correct result or an error."""

    def test_asarray_returns_the_array_without_gradient(self) -> None:
        x = input(np.array([[1.0, 5.0], [3.0, 2.0]]))
        assert np.asarray(x) is x.array
        assert np.array(x).tolist() == x.array.tolist()
        assert not np.shares_memory(np.array(x), x.array)
        assert np.asarray(x, np.float32).dtype == np.float32
        assert np.argmax(x) == 1
        assert x.__array__(copy=True) is not x.array
        assert np.stack([x, x]).shape == (2, 2, 2)
        assert np.array([x, x]).shape == (2, 2, 2)
        assert np.argmax(input(np.array([0, 1]))) == 1

    @for_each("function", [np.asarray, np.array, np.copy])
    def test_asarray_raises_type_error_with_gradient(self, function: Any) -> None:
        with pytest.raises(TypeError, match=r"shape \(2, 2\) that needs a gradient.*numpy\(\)"):
            function(param(np.ones((2, 2))))
        with pytest.raises(TypeError, match="needs a gradient"):
            function([param(np.ones((2, 2))) * 2])

    def test_variable_converts_to_python_numbers(self) -> None:
        x = param(np.array([[2.5]]))
        assert (float(x), int(x), bool(x), bool(x * 0)) == (2.5, 2, True, False)
        for number in (float, int, bool):
            with pytest.raises(ValueError, match="exactly one element"):
                number(param(np.ones(2)))

    def test_len_and_iter_use_the_first_dimension(self) -> None:
        x = param(np.arange(6.0).reshape(3, 2))
        assert len(x) == 3
        assert [row.array.tolist() for row in x] == [[0, 1], [2, 3], [4, 5]]
        for row in x:
            F.sum(row).backward()
        assert x.grad.tolist() == [[1, 1]] * 3
        for ask in (len, list):
            with pytest.raises(TypeError, match="with dimensions"):
                ask(param(np.array(1.0)))


@for_each("name", ["exp", "std", "clip", "requires_grad", "view", "permute", "ravel",
                                  "unsqueeze", "clone", "numel", "dim", "dot", "to", "cpu",
                                  "tolist", "argmax", "cumsum", "expand", "half",
                                  "contiguous"])  # fmt: skip
def test_attribute_error_names_a_valid_replacement(name: str) -> None:
    x, y = param(np.ones((2, 2))), param(np.ones((2, 2)))
    with pytest.raises(AttributeError, match=f"a Variable x has no attribute '{name}'. Use") as e:
        getattr(x, name)
    words = str(e.value).partition(". Use ")[2]
    more = {"axis": 0, "shape": (4,), "axes": (1, 0), "device": "cpu", "dtype": "f2"}
    words = words.replace("to(x, shape)", "to(x, (3, 2, 2))")
    words = words.replace("cumsum(x)", "cumsum(x, 0)").replace("clip(x)", "clip(x, 0)")
    assert eval(words, {"fl": fl, "np": np, "x": x, "y": y, **more}) is not None
    assert not hasattr(x, name)


def test_seed_restarts_the_generator() -> None:
    draws = []
    for seed in (3, 3, np.int64(4)):
        set_seed(seed)  # type: ignore[arg-type]
        draws.append(generator().random(5))
    np.testing.assert_array_equal(draws[0], draws[1])
    assert (draws[0] != draws[2]).all()
    assert generator() is generator(np)
    assert (generator().random(5) != draws[2]).all()


@for_each("seed error", [(-1, ValueError), (1.5, TypeError), ("1", TypeError), (True, TypeError)])
def test_set_seed_raises_for_invalid_seeds(seed: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="set_seed"):
        set_seed(seed)
