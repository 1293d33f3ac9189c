"""What NumPy allows: ways to call its functions, and to change arrays, that recordings see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.tape.steps import assert_same_bits, compare

Array = np.ndarray[Any, Any]
X = np.random.default_rng(0).random((10, 3, 4)) * 4 - 2


def changing(change: Callable[[Array, Array], Any], of: Callable[[Array], Array] = np.copy) -> Any:
    """Return a step that calls ``change`` with a new array and its argument."""

    def step(x: Array) -> Any:
        y = of(x * 2)
        change(y, x)
        return y

    return step


def add_one(view: Array) -> None:
    view += 1


def filled_number(x: Array) -> Any:
    number = x.sum()
    number.fill(3)
    return number


def with_gaps(x: Array) -> Array:
    return np.where(x > 0, x, np.nan)


def number_and_view(view_of: Callable[[Any], Any]) -> Callable[[Array], Any]:
    def step(x: Array) -> Any:
        number = x.sum()
        view = view_of(number)
        view += 1
        return number, view

    return step


ROW = slice(None), 0
CASES: dict[str, Callable[[Array], Any]] = {
    "out of cumsum by position": changing(lambda y, x: np.cumsum(x, 0, None, y)),
    "out of dot by position": changing(lambda y, x: np.dot(x[:, :3].copy(), x, y)),
    "out of one": lambda x: (y := np.zeros_like(x[0, 0, ...]), np.dot(x[0], x[1], y), y)[1:],
    "out of take by position": changing(lambda y, x: x.take([0, 2, 1], 0, y)),
    "out of concatenate by position": changing(lambda y, x: np.concatenate([x[1:], x[:1]], 0, y)),
    "out of method by position": changing(lambda y, x: x.cumsum(0, None, y)),
    "mask of copyto by position": changing(lambda y, x: np.copyto(y, x, "same_kind", x > 0)),
    "list of sums": changing(lambda y, x: y.__setitem__(ROW, [x.sum(), x.max(), 0.0])),
    "sum with list of sums": lambda x: x[0, :2] + [x.sum(), x.max()],
    "choice of list of sums": lambda x: np.where(x[0, :2] > 0, [x.sum(), x.max()], 0),
    "nan_to_num": changing(lambda y, x: np.nan_to_num(y, copy=False), with_gaps),
    "nan_to_num by position": changing(lambda y, x: np.nan_to_num(y, False), with_gaps),
    "median that overwrites": changing(lambda y, x: np.median(y, 0, None, True)),
    "median that overwrites by name": changing(lambda y, x: np.median(y, overwrite_input=True)),
    "flat elements": changing(lambda y, x: y.flat.__setitem__(slice(2), x[0, :2])),
    "flat elements of transposed": changing(lambda y, x: y.T.flat.__setitem__(slice(2), 7.0)),
    "real parts that are set": changing(lambda y, x: setattr(y, "real", 3.0), lambda x: x + 1j),
    "elements that are set": changing(lambda y, x: setattr(y, "flat", 3.0)),
    "shape that is set": changing(lambda y, x: setattr(y, "shape", (4, 3))),
    "truth value": lambda x: (x > 0)[0, 0],
    "sum by position": lambda x: (np.sum(x, 0, None, None, True), x.sum(1, None, None, True)),
    "max by position": lambda x: (np.max(x, 0, None, True), x.max(0, None, True)),
    "mean by position": lambda x: (np.mean(x, 0, None, None, True), x.mean(0, None, None, True)),
    "any by position": lambda x: np.any(x > 0, 0, None, True),
    "clip by name": lambda x: (np.clip(x, min=-1, max=1), np.clip(x, max=0.5)),
    "clip of nothing": lambda x: np.clip(x, None, None),
    "reshape by columns": lambda x: (np.reshape(x, -1, "F"), np.reshape(x, (4, 3), order="F")),
    "axis that is no int": lambda x: (x.sum(axis=np.int64(0)), x.max(np.int8(-1))),
    "lists in concatenate": lambda x: np.concatenate([x[0], [1.0, 2.0]]),
    "one of two outs": changing(lambda y, x: np.divmod(x, 0.5, out=(y, None))),
    "results that share memory": lambda x: np.unravel_index(x.argsort(None), x.shape),
    "row at a number": changing(lambda y, x: add_one(y[abs(y[0]).argmax() % 3])),
    "number and its view": number_and_view(lambda number: number[...]),
    "number and its reshaped view": number_and_view(lambda number: number.reshape(1)),
    "number and a view by function": number_and_view(lambda number: np.reshape(number, 1)),
    "number by function": lambda x: (np.transpose(x.sum()), np.squeeze(x.max())),
    "number that is filled": filled_number,
    "parts of a number": lambda x: (x.sum().imag, x.sum().real, x.sum().T),
    "all by position": lambda x: ((x > 0).all(0, None), np.all(x > 0, 1), x.any(1, dtype="?")),
    "numbers that have no room": lambda x: (
        (x > 0).view("u1") < 300,
        np.clip(x.view("u1"), -1, 300),
    ),
    "round": lambda x: (round(x.sum(), 1), round(x.max())),
    "memory": lambda x: bytes((x * 2).data) and x,
    "method of numbers of Python": lambda x: x.sum().is_integer(),
}


@pytest.mark.parametrize("step", CASES.values(), ids=CASES)
def test_calls(step: Callable[[Array], Any]) -> None:
    captured = compare(step, [(x,) for x in X])
    assert captured.reason or captured.replays == 7


@pytest.mark.parametrize("product", [np.matmul, np.dot, np.outer], ids=lambda f: f.__name__)
@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (5, 1)], ids=str)
def test_signs_of_zeros_in_products(product: Any, shape: tuple[int, int]) -> None:
    random = np.random.default_rng(0)

    def pairs(*values: float) -> Iterator[tuple[Array, Array]]:
        for _ in range(6):
            yield random.choice(values, shape), random.choice(values, shape[::-1])

    step = compare(product, [*pairs(1.5, 2.5), *pairs(0.0, -0.0, 1.5), *pairs(-0.0, -1.5)])
    assert step.replays == 15


@pytest.mark.parametrize("exponent", ["each row", "each column", "every", "one", "number"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_powers(exponent: str, dtype: str) -> None:
    """NumPy takes reciprocals, roots and squares where the exponent stays the same in a loop."""
    random = np.random.default_rng(0)
    shapes = {"each row": (9, 1), "each column": (70,), "every": (9, 70), "one": (1,), "number": ()}

    def pairs() -> Iterator[tuple[Array, Array]]:
        for _ in range(10):
            exponents = random.choice([-1.0, 2.0, 0.5, 0.0, 3.0], shapes[exponent])
            yield random.random((9, 70)).astype(dtype) * 3, np.asarray(exponents, dtype)

    step = compare(lambda x, y: (np.power(x, y), np.power(x[:, ::2].T, 2.0), x**y), [*pairs()])
    assert step.replays == 7


def test_powers_that_are_none() -> None:
    step = compare(np.power, [(np.arange(3), np.arange(3) + n) for n in range(6)])
    assert step.replays == 3
    with pytest.raises(ValueError, match="negative integer powers"):
        step(np.arange(3), np.arange(3) - 2)


def test_errors_of_numbers_that_arrays_have_no_room_for() -> None:
    def step(x: Array) -> Any:
        whole = np.zeros_like(x, np.int8)
        whole[1:] = x.max()
        whole[0, 1:3] = [x.max(), 0]
        return whole

    captured = compare(step, [(x,) for x in X])
    assert captured.replays == 7
    for number, error in ((np.nan, ValueError), (np.inf, OverflowError), (300.0, OverflowError)):
        for call in (step, captured):
            with pytest.raises(error):
                call(X[0] + number)
    for value in (300, np.nan, 1j):
        with pytest.raises((ValueError, TypeError, OverflowError)):
            [fl.capture(lambda x, to=value: step(x).fill(to))(X[0]) for _ in range(3)]


def test_errors_of_what_nobody_uses() -> None:
    def step(x: Array, y: Array) -> Any:
        np.power(x, y)
        x[y]
        return x + y

    captured = compare(step, [(np.arange(3), np.arange(3)) for _ in range(6)])
    assert captured.replays == 3
    for y, error in ((np.arange(3) - 1, ValueError), (np.arange(3) + 1, IndexError)):
        with pytest.raises(error):
            captured(np.arange(3), y)


PARTS: dict[str, Callable[[Array, Array], Any]] = {
    "index": lambda y, x: y.__setitem__(np.array([0, 2]), 1.0),
    "mask": lambda y, x: np.copyto(y, x, where=x > 0),
    "out": lambda y, x: np.sqrt(abs(x), out=y, where=x > 0),
    "at": lambda y, x: np.add.at(y, [0, 2], 1.0),
}


@pytest.mark.parametrize("change", PARTS.values(), ids=PARTS)
def test_gradients_of_which_a_part_is_written(change: Callable[[Array, Array], Any]) -> None:
    """The step reads the rest, so another gradient in its place is another recording."""

    def make() -> Any:
        weight = fl.param(np.arange(3.0))

        def step(x: Array) -> Any:
            change(weight.grad, x)
            return weight.grad * 1

        return weight, step

    (one, eager), (other, captured) = make(), make()
    captured = fl.capture(captured)
    kept = [x[0, :3].copy() for x in X]  # alive, so that each has an address of its own
    for number, x in enumerate(X):
        if number not in (1, 2, 3, 4):
            one.grad, other.grad = kept[number].copy(), kept[number]
        assert_same_bits(eager(x[1, :3]), captured(x[1, :3].copy()))
        assert_same_bits(one.grad, other.grad)
    assert captured.replays == 2


class State:
    def __init__(self) -> None:
        self.array = np.arange(12.0).reshape(3, 4)
        self.before: list[Array] = []

    def return_old(self, x: Array) -> Any:
        old = self.array
        self.array = old * 0.5 + x
        return old, old[1:]

    def keep_old(self, x: Array) -> Any:
        self.before.append(self.array)
        self.array = self.array * 0.5 + x


@pytest.mark.parametrize("name", ["return_old", "keep_old"])
def test_state_that_gets_another_array(name: str) -> None:
    eager, captured = State(), State()
    step = fl.capture(getattr(captured, name))
    with pytest.warns(RuntimeWarning, match="stays eager"):
        results = [(getattr(eager, name)(x), step(x)) for x in X]
    for one, other in results:
        assert_same_bits(one, other)
    assert_same_bits(eager.array, captured.array)
    assert_same_bits(eager.before, captured.before)


def test_rows_of_every_second_element() -> None:
    """A row that is laid out once for many is not read behind its last element."""
    step = compare(lambda x: x[:, :5] + x[-1, ::2], [(x.repeat(3, 1)[:, :9].copy(),) for x in X])
    assert step.replays == 7
