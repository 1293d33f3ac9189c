"""Functions of the package, of NumPy and of optimizers: replays have the bits of eager steps."""

import copy
import functools
import subprocess
import sys
import warnings
from collections.abc import Callable
from io import BytesIO
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.tape import lowering, program
from flashlight_py.tape.recording import Note
from tests.autograd.cases import CASES, Case
from tests.optim.test_optimizers import RULES, Make
from tests.tables import for_each
from tests.tape.steps import compare, is_same, training

F = fl.autograd.functions
Array = np.ndarray[Any, Any]
X = np.random.default_rng(0).random((10, 3, 4)) * 4 - 2
# Indexing by Booleans returns a shape that depends on the values.
CAPTURED = [case for case in CASES if case.name != "index_mask"]
DTYPES = for_each("dtype", ["float32", "float64"])
# Neighbours in a table have different dtypes. The slow test has the other dtype of each row.
IN_TURN = pytest.mark.parametrize("turn", [0, pytest.param(1, marks=pytest.mark.slow)])


@IN_TURN
@for_each("number case", enumerate(CAPTURED))
def test_replay_of_functions_equals_eager(number: int, case: Case, turn: int) -> None:
    dtype = ("float32", "float64")[(number + turn) % 2]

    def make() -> Any:
        params = [fl.param(array.astype(dtype)) for array in case.arrays]

        def loss_of(*noise: np.ndarray) -> Any:
            operands = [param + fl.input(item) for param, item in zip(params, noise, strict=True)]
            out = case.ours(*operands)
            return (out * out).sum(), out

        return training(fl.optim.SGDOptimizer(params, 1e-4, momentum=0.5), loss_of), params

    random = np.random.default_rng(1)
    shapes = [array.shape for array in case.arrays]
    noise = [[np.asarray(random.random(s) / 100, dtype) for s in shapes] for _ in range(5)]
    # NumPy creates the indices of pad internally. The second call shows that they are constant.
    compare(make, map(tuple, noise), eager=2 if case.name == "pad_reflect" else 1)


@IN_TURN
@for_each("number make_optimizer", enumerate(RULES.values()), RULES)
def test_replay_of_optimizers_equals_eager(number: int, make_optimizer: Make, turn: int) -> None:
    dtype = ("float32", "float64")[(number + turn) % 2]

    def make() -> Any:
        fl.set_seed(3)
        model = fl.nn.Sequential(fl.nn.Linear(5, 7), fl.nn.Tanh(), fl.nn.Linear(7, 3)).astype(dtype)
        optimizer = make_optimizer(model.params())

        def loss_of(x: np.ndarray, y: np.ndarray) -> Any:
            return F.categorical_cross_entropy(F.log_softmax(model(fl.input(x))), fl.input(y))

        return training(optimizer, loss_of), optimizer, model

    def change(number: int, optimizer: Any, model: Any) -> None:
        optimizer.lr = 1e-3 / (1 + number)  # read by every replay

    random = np.random.default_rng(1)
    calls = [(random.random((4, 5)), random.integers(-1, 3, 4)) for _ in range(10)]
    compare(make, [(x.astype(dtype), y) for x, y in calls], change)


@DTYPES
def test_each_replay_computes_a_norm(dtype: str) -> None:
    def make() -> Any:
        fl.set_seed(1)
        model = fl.nn.Sequential(fl.nn.Linear(3, 5), fl.nn.Linear(5, 1)).astype(dtype)
        optimizer = fl.optim.SGDOptimizer(model.params(), lr=0.1, momentum=0.9)
        clip = lambda: fl.optim.clip_grad_norm(model.params(), 0.5)  # noqa: E731
        return training(optimizer, lambda x: (model(fl.input(x)) ** 2).mean(), clip), model

    # Some values are equal, which must not make the norm a constant.
    compare(make, np.random.default_rng(0).random((4, 4, 3)).astype(dtype).repeat(5, axis=0))


def changing(change: Callable[[Array, Array], Any], of: Callable[[Array], Array] = np.copy) -> Any:
    """Return a step that calls ``change`` with a new array and its argument."""

    def step(x: Array) -> Any:
        y = of(x * 2)
        change(y, x)
        return y

    return step


def number_and_view(view_of: Callable[[Any], Any]) -> Callable[[Array], Any]:
    def step(x: Array) -> Any:
        number = x.sum()
        view = view_of(number)
        view += 1
        return number, view

    return step


# NumPy rejects some of these.
CALLS: dict[str, Callable[[Array], Any]] = {
    "out of one": lambda x: (y := np.zeros_like(x[0, 0, ...]), np.dot(x[0], x[1], y), y)[1:],
    "out of method by position": changing(lambda y, x: x.cumsum(0, None, y)),
    "list of sums": changing(lambda y, x: y[0].__setitem__(slice(3), [x.sum(), x.max(), 0.0])),
    "sum with list of sums": lambda x: x[0, :2] + [x.sum(), x.max()],
    "choice of list of sums": lambda x: np.where(x[0, :2] > 0, [x.sum(), x.max()], 0),
    "median that overwrites": changing(lambda y, x: np.median(y, 0, None, True)),
    "median that overwrites by name": changing(lambda y, x: np.median(y, overwrite_input=True)),
    "flat elements of transposed": changing(lambda y, x: y.T.flat.__setitem__(slice(2), 7.0)),
    "real parts that are set": changing(lambda y, x: setattr(y, "real", 3.0), lambda x: x + 1j),
    "elements that are set": changing(lambda y, x: setattr(y, "flat", 3.0)),
    "shape that is set": changing(lambda y, x: setattr(y, "shape", (4, 3))),
    "truth value": lambda x: (x > 0)[0, 0],
    "max by position": lambda x: (np.max(x, 0, None, True), x.max(0, None, True)),
    "mean by position": lambda x: (np.mean(x, 0, None, None, True), x.mean(0, None, None, True)),
    "any by position": lambda x: np.any(x > 0, 0, None, True),
    "clip by name": lambda x: (np.clip(x, min=-1, max=1), np.clip(x, max=0.5)),
    "results that share memory": lambda x: np.unravel_index(x.argsort(None), x.shape),
    "row at a number": changing(lambda y, x: np.add(row := y[abs(y[0]).argmax() % 3], 1, out=row)),
    "number and its view": number_and_view(lambda number: number[...]),
    "number and its reshaped view": number_and_view(lambda number: number.reshape(1)),
    "number and a view by function": number_and_view(lambda number: np.reshape(number, 1)),
    "number by function": lambda x: (np.transpose(x.sum()), np.squeeze(x.max())),
    "number that is filled": lambda x: (n := x.sum(), n.fill(3), n)[2],
    "parts of a number": lambda x: (x.sum().imag, x.sum().real, x.sum().T),
    "all by position": lambda x: ((x > 0).all(0, None), np.all(x > 0, 1), x.any(1, dtype="?")),
    "no room": lambda x: ((x > 0).view("u1") < 300, np.clip(x.view("u1"), -1, 300)),
    "round": lambda x: (round(x.sum(), 1), round(x.max())),
    "memory": lambda x: bytes((x * 2).data) and x,
    "few and more": lambda x: (x[0, :2] * 2, x[:2, :2] * 2, x[:2, :2].T * 2, x.reshape(-1)[:4] * 2),
    "method of numbers of Python": lambda x: x.sum().is_integer(),
    "array of one for a number": changing(lambda y, x: y[0].__setitem__(0, x[0, :1])),
    "array of two for a number": changing(lambda y, x: y[0].__setitem__(0, x[0, :2])),
    "list for a number": changing(lambda y, x: y[0].__setitem__(0, [x[0, 0]])),
    "more dimensions": changing(lambda y, x: y.__setitem__(0, x[:1, None])),
    "number that is written to": lambda x: np.copyto(x.max(), x.sum()),
    "number that is put to": lambda x: np.put(x.max(), 0, 1.0),
    "number for a result": lambda x: np.add(x[0], 1.0, out=x.max()),
    "copyto by name": changing(lambda y, x: np.copyto(dst=y, src=x)),
    "file that is written": lambda x: np.save(BytesIO(), x),
    "elements of a number": lambda x: (n := x.sum(), n.flat.__setitem__(0, 2.0), n * x)[2],
    "file of a number": lambda x: np.save(BytesIO(), x.sum()),
    "powers in place": changing(lambda y, x: y.__ipow__(0.5), lambda x: abs(x).astype(int)),
    "counts": lambda x: x[0].repeat(abs(x[0]).astype(int)),
    "copies of a number": lambda x: copy.deepcopy(x.sum().item()),
    "objects": lambda x: (y := x.astype("O"), y.__setitem__(0, x.sum()), y.tolist())[2],
}


@for_each("action", ["ignore", "error"])
@for_each("case", CALLS.values(), CALLS)
def test_replay_of_calls_equals_eager(case: Callable[[Array], Any], action: Any) -> None:
    def step(x: Array) -> Any:
        try:
            return case(x)
        except (ValueError, TypeError, DeprecationWarning) as error:
            return isinstance(error, TypeError)

    with warnings.catch_warnings():  # outside the step, as replays run no Python code
        warnings.simplefilter(action, DeprecationWarning)
        compare(lambda: step, X, reason=None)


LIMITED = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (1 << 34, 1 << 34))
from tests.tape.test_functions import CALLS, X, compare
compare(lambda: CALLS["sum with list of sums"], X)
"""


@pytest.mark.slow
def test_replay_handles_high_addresses() -> None:
    """Stand-ins had unreadable addresses on machines that could not reserve a terabyte."""
    subprocess.run([sys.executable, "-c", LIMITED], check=True, timeout=60)


RANDOM = np.random.default_rng(0)
SPECIAL = [0, 1, -1.5, 2.5, -0.0, np.nan, np.inf, -np.inf]
EXPONENTS = (9, 1), (70,), (9, 70), (1,), ()  # per row, per column, per element, and one for all


def of_matrices(shape: tuple[int, int]) -> list[tuple[Array, Array]]:
    choices = [[1.5, 2.5], [0.0, -0.0, 1.5], [-0.0, -1.5]] * 6
    return [
        (RANDOM.choice(choice, shape), RANDOM.choice(choice, shape[::-1])) for choice in choices
    ]


def of_powers(dtype: str, shape: tuple[int, ...]) -> list[tuple[Array, Array]]:
    bases = RANDOM.random((10, 9, 70)).astype(dtype) * 3
    exponents = RANDOM.choice(np.array([-1.0, 2.0, 0.5, 0.0, 3.0], dtype), (10, *shape))
    return [(base, np.asarray(exponent)) for base, exponent in zip(bases, exponents, strict=True)]


def classes(x: Array) -> Any:
    operands = x, x.mean(), x.mean(keepdims=True), x[0, 0], x[:1, :1]
    kinds = float, np.floating, np.generic, np.ndarray
    are = [isinstance(operand, kinds[number]) for operand in operands for number in range(4)]
    return x * 2, are, np.isscalar(x.sum())


def limits(x: Array) -> Any:
    kinds = np.maximum, np.minimum, np.fmax, np.fmin
    return [(f(x, y), f(y, x), f(x[:, ::2], y)) for f in kinds for y in (0.0, -0.0, x[:, :1])]


def products(x: Array, y: Array) -> Any:
    return x @ y, np.dot(x, y), np.outer(x, y)


def powers(x: Array, y: Array) -> Any:
    """NumPy computes reciprocals, roots and squares if the exponent is constant in a loop."""
    return np.power(x, y), np.power(x[:, ::2].T, 2.0), x**y, (+x)[::-1, ::-1].__ipow__(2.5)


def truths(x: Array) -> Array:
    """Some of NumPy's loops write to wrong elements of strided results. Replays do the same."""
    result = np.stack([x, -x]) > 2
    for ufunc in (np.isnan, np.isinf, np.isfinite, np.signbit):
        ufunc(x, out=result.T[:, 1])
        ufunc(x, out=result.reshape(-1)[::2])
    return result


# Functions with calls. Each shape and dtype needs a recording.
VALUES: dict[Callable[..., Any], list[Any]] = {
    classes: [X],
    limits: [RANDOM.choice([0.0, -0.0, np.nan], (4, 9, 7))],
    products: [of_matrices(shape) for shape in ((1, 1), (1, 5), (5, 1))],
    powers: [of_powers(dtype, shape) for dtype in ("f4", "f8") for shape in EXPONENTS],
    lambda x: x.sum(keepdims=True): [RANDOM.choice([1.5, np.nan, -np.nan], (20, 5000))],
    truths: [[RANDOM.choice(SPECIAL, 70)] * 5],
}


@for_each("step", VALUES)
def test_replay_of_values_equals_eager(step: Callable[..., Any]) -> None:
    for calls in VALUES[step]:
        compare(lambda: step, calls)


def test_overflowing_numbers_raise_like_numpy() -> None:
    def step(x: Array) -> Any:
        integers = np.zeros_like(x, np.int8)
        integers[1:] = x.max()
        integers[0, 1:3] = [x.max(), 0]
        return integers

    refused = [X[0] + number for number in (np.nan, np.inf, 300.0)]
    compare(lambda: step, [*X, *refused], raises="ValueError|OverflowError", eager=4)
    for value in (300, np.nan, 1j):
        with pytest.raises((ValueError, TypeError, OverflowError)):
            [fl.capture(lambda x, to=value: step(x).fill(to))(X[0]) for _ in range(3)]


THREE = np.arange(3)
UNUSED: dict[str, tuple[Callable[[Array, Array], Any], Array, str]] = {
    "power": (np.power, THREE - 1, "ValueError"),
    "number": (lambda x, y: x[2] ** y.min(), THREE - 1, "ValueError"),
    "index": (lambda x, y: x[y], THREE + 1, "IndexError"),
    "set": (lambda x, y: x.copy().__setitem__(y, 0), THREE + 1, "IndexError"),
    "fit": (lambda x, y: x.astype("i1").__setitem__(0, y.max()), THREE + 300, "OverflowError"),
}


@for_each("name", UNUSED)
def test_unused_calls_raise_in_replays(name: str) -> None:
    call, refused, error = UNUSED[name]

    def step(x: Array, y: Array) -> Any:
        call(x, y)
        return x + y

    calls = [(THREE, THREE.copy())] * 6 + [(THREE, refused)]
    compare(lambda: step, calls, raises=error, eager=2)


LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "as it is": lambda x: x,
    "transposed": lambda x: x.T,
    "by columns": lambda x: x.reshape(x.shape[::-1], order="F"),
    "reversed": lambda x: x.reshape(-1)[::-1],
    "reversed in both": lambda x: x[::-1, ::-1],
    "every other": lambda x: x[:, ::2],
    "from the second": lambda x: x.reshape(-1)[1:],
    "row for each": lambda x: np.broadcast_to(x[0], x.shape),
    "one": lambda x: x[0, :1],
    "one of a row": lambda x: x[:1, :1],
    "one reversed": lambda x: x[0, :1][::-1],
}
UFUNCS = {var for var in vars(np).values() if isinstance(var, np.ufunc) and var.nout == 1}


@pytest.mark.parametrize("dtypes", ["?bIqfdD", pytest.param("BhHiQeF", marks=pytest.mark.slow)])
def test_replay_of_layouts_equals_eager(dtypes: str) -> None:
    """The bits of NumPy's results depend on the strides."""
    for dtype in dtypes:
        replay_of_layouts_equals_eager(dtype)


def replay_of_layouts_equals_eager(dtype: str) -> None:
    random = np.random.default_rng(0)
    with np.errstate(all="ignore"):
        values = random.choice(SPECIAL, (2, 70 * 3)) + random.choice(SPECIAL, (2, 70 * 3)) * 1j
        x, y = (values.real if dtype not in "FD" else values).astype(dtype).reshape(2, 70, 3)
        # For the integer 0, ARM returns the loop's conversion of infinity.
        undefined = {np.power, *([] if dtype in "efdFD" else [np.reciprocal])}
        for ufunc in sorted(UFUNCS - undefined, key=lambda function: function.__name__):
            parts = [x, y][: ufunc.nin]

            def step(*parts: Array, do: np.ufunc = ufunc) -> list[Any]:
                return [do(*map(layout, parts)) for layout in LAYOUTS.values()]

            try:
                step(*parts)
            except (TypeError, ValueError):  # unsupported dtype, or a matrix product
                continue
            compare(lambda: step, [tuple(parts)] * 2)


@DTYPES
def test_replay_of_sums_after_operations_equals_eager(dtype: str) -> None:
    """NumPy adds halves of the whole array, but replays compute other operations in strips."""

    def step(x: Array) -> Any:
        error = x - 0.5
        return (error * error).sum(), error.mean(), abs(x).sum(keepdims=True), x.T.sum(), error * 2

    random = np.random.default_rng(0)
    for size in (1, 7, 8, 130, 2047, 2048, 2049, 4100, 12345, 100003):
        arrays = [random.standard_normal(size).astype(dtype) for _ in range(5)]
        compare(lambda: step, arrays)
    compare(lambda: step, [-np.zeros((100, 50), dtype)] * 5)


@for_each("dtype", "iefdFD")
@for_each("shape", [(3, 9001), (9001, 3), (7, 10, 3)])
def test_replay_of_row_and_column_sums_equals_eager(dtype: str, shape: tuple[int, ...]) -> None:
    def step(x: Array) -> Any:
        y = x * x.dtype.type(3)
        return [part.sum(axis) for part in (y, y.T, y + y) for axis in (0, -1, None)]

    compare(lambda: step, np.random.default_rng(0).normal(0, 9, (4, *shape)).astype(dtype))


def test_sums_remain_calls_if_the_order_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def more_digits(x: Array, axis: int | None) -> Any:
        return np.sum(x, axis, dtype="f8").astype(x.dtype)

    fake = {"__version__": "9 (a fake)", "sum": more_digits}
    monkeypatch.setattr(lowering, "np", SimpleNamespace(**{**vars(np), **fake}))
    probe = functools.cache(lowering._longest_sum.__wrapped__)
    monkeypatch.setattr(lowering, "_longest_sum", probe)
    groups = list[Any]()
    lowered = lambda *args: groups.extend(lowering.lowered(*args)) or groups  # noqa: E731
    monkeypatch.setattr(program, "lowered", lowered)
    step = fl.capture(lambda x: (x * 2).sum(0))
    with pytest.warns(RuntimeWarning, match=r"NumPy 9 \(a fake\) adds floats in an order that"):
        results = [step(x) for x in X]
    assert all(is_same(a, (x * 2).sum(0)) for a, x in zip(results, X, strict=True))
    assert step.replays == len(X) - 1
    assert [group.function for group in groups if isinstance(group, Note)] == [np.add.reduce]


def memory_of_what_ends(x: Array, y: Array) -> Any:
    """A result may reuse the memory of an operand or strip that no later operation reads."""
    one = x * 2
    two = one + y
    three = np.maximum(two, one)
    four = three * y[0]
    five = four.T - three.T
    two += 1
    five *= 3
    return two.sum(0), five.T + one[::-1], four.reshape(-1)[::2] * 1, three.max(1), five


def beside_a_view_of_an_argument(x: Array, y: Array) -> Any:
    """An argument and a created array have different numbers."""
    return y[::-1], x * 2, y + 1, x[:, ::-1], x


def rows_of_every_second_element(x: Array, y: Array) -> Any:
    """Repeat a row with stride 2, which must not be read past its last element."""
    columns = x.shape[1] + 1
    return x[:, : columns // 2] + x[-1, columns % 2 :: 2]


@for_each("step", [memory_of_what_ends, beside_a_view_of_an_argument, rows_of_every_second_element])
@for_each("shape", [(300, 70), (3, 5000), (5000, 3), (128, 128), (64, 64)])
def test_replay_of_aliases_equals_eager(step: Callable[..., Any], shape: tuple[int, int]) -> None:
    random = np.random.default_rng(0)
    compare(lambda: step, [tuple(random.standard_normal((2, *shape))) for _ in range(5)])


def test_empty_products_cast_to_another_dtype() -> None:
    """Without elements, no comparison shows that ``dot`` can replace ``matmul`` and its casts."""

    def step(x: Array, y: Array) -> Array:
        y @= x
        return y

    compare(lambda: step, [(np.ones((3, 3)), np.ones((0, 3), np.float32))] * 4)


def test_batches_of_a_step_share_memory_and_native_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    groups, begin, sizes = list[Any](), program._begin, list[int]()
    lowered = lambda *args: groups.extend(lowering.lowered(*args)) or groups  # noqa: E731
    monkeypatch.setattr(program, "lowered", lowered)
    monkeypatch.setattr(program, "_begin", lambda x: sizes.append(x.nbytes) or begin(x))
    layers = fl.nn.Conv2D(3, 8, 3, 1, 1), fl.nn.BatchNorm(8), fl.nn.ReLU()
    ends = fl.nn.Pool2D(32, mode="average"), fl.nn.View((2, -1)), fl.nn.LogSoftmax()
    model, criterion = fl.nn.Sequential(*layers, *ends), fl.nn.CategoricalCrossEntropy()

    def step(images: Array, labels: Array) -> None:
        for x, y in zip(images, labels, strict=True):  # each batch checks its labels
            criterion(model(fl.input(x)), fl.no_grad(y)).backward()

    for count in (1, 8):
        images = np.random.default_rng(0).random((count, 2, 3, 32, 32), np.float32)
        fl.capture(step)(images, np.zeros((count, 2), np.int64))
    assert max(sizes) < 1.2 * sizes[0]
    assert not any(isinstance(x.function, np.ufunc) for x in groups if isinstance(x, Note))
