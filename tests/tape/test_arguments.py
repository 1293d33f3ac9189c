"""Arguments of all layouts, dtypes and values, alone and with memory in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.tape.steps import assert_same_bits, compare

X = (np.random.default_rng(0).random((24, 6, 4)) * 2 - 1).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class Named:
    name: str
    scale: float = dataclasses.field(compare=False)


def unaligned(x: np.ndarray) -> np.ndarray:
    held = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    held[...] = x
    return held


def several(x: np.ndarray) -> Any:
    return x * 2, x.sum(0), x.sum(-1), x.sum(), x[1], np.cumsum(x), x.T.copy(), x.mean()


LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "fortran": np.asfortranarray,
    "transposed": lambda x: x.T,
    "reversed": lambda x: x[::-1].copy()[::-1],
    "reversed twice": lambda x: x.copy()[::-1, ::-1],
    "every second": lambda x: x.copy()[::2],
    "columns": lambda x: x.copy()[:, 1:3],
    "broadcast": lambda x: np.broadcast_to(x[0].copy(), (3, 4)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    compare(several, [(LAYOUTS[layout](x),) for x in X[:8]])


def test_layouts_in_turn() -> None:
    ways = [np.array, *LAYOUTS.values()]
    step = compare(several, [(ways[i % len(ways)](x[:4]),) for i, x in enumerate(X)])
    assert step.reason == ""


def test_contiguous_arguments_are_replayed_beside_others() -> None:
    step = compare(several, [(x,) for x in X[:5]] + [(x.T.copy().T,) for x in X[5:9]])
    assert step.replays == 2


ALIASES: dict[str, Callable[[Any, Any], Any]] = {
    "read": lambda x, y: x * 2 + y,
    "written": lambda x, y: (np.add(x, 1, out=x), np.multiply(y, 2, out=y), x + y),
}


@pytest.mark.parametrize("step", ALIASES.values(), ids=ALIASES)
def test_two_arguments_may_be_the_same_array(step: Callable[..., Any]) -> None:
    apart = [(X[i].copy(), X[i + 5].copy()) for i in range(5)]
    same = [(each, each) for each in X[10:15].copy()]
    compare(step, [*apart, *same, *apart])
    compare(step, [*same, *apart, *same])


def test_two_arguments_may_overlap() -> None:
    def step(x: np.ndarray, y: np.ndarray) -> Any:
        y[...] = x * 2
        return x + y

    apart = [(X[i][:-1].copy(), X[i + 5][1:].copy()) for i in range(5)]
    overlapping = [(each[:-1], each[1:]) for each in map(np.copy, X[10:15])]
    compare(step, [*apart, *overlapping])


@pytest.mark.parametrize("first", ["parameter", "batch"])
def test_an_argument_may_be_a_parameter(first: str) -> None:
    ways = ["parameter"] * 5 + ["batch"] * 5
    found = []
    for wrap in (lambda step: step, fl.capture):
        weight = fl.param(np.arange(4.0))

        def step(x: np.ndarray, weight: fl.Variable = weight) -> Any:
            weight.zero_grad()
            loss = (weight * fl.input(x)).sum()
            loss.backward()
            weight.array -= 0.1 * weight.grad
            return loss, x[1:] * 2

        call = wrap(step)
        batches = iter(X[:, 0].astype(float))
        found += [
            call(weight.array if way == "parameter" else next(batches))
            for way in (ways if first == "parameter" else ways[::-1])
        ]
        found.append(weight.array.copy())
    half = len(found) // 2
    for one, other in zip(found[:half], found[half:], strict=True):
        assert_same_bits(one, other)


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "all": lambda p, x: np.add(p, 1, out=p),
    "reversed": lambda p, x: np.copyto(p, x[::-1]),
    "by the argument": lambda p, x: np.multiply(x, 2, out=x),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_an_argument_may_be_what_the_step_changes(change: Callable[[Any, Any], Any]) -> None:
    state, other = np.arange(6.0), np.arange(6.0)

    def stepping(array: np.ndarray) -> Any:
        def step(x: np.ndarray) -> Any:
            before = array[:2] * 2
            change(array, x)
            return before, x * 2, array - 1, x[::-1].copy()

        return step

    eager, captured = stepping(state), fl.capture(stepping(other))
    for number, x in enumerate(X[:12, :, 0].astype(float)):
        is_same = number in (5, 6, 10)
        results = eager(state if is_same else x.copy()), captured(other if is_same else x.copy())
        assert_same_bits(*results)
        assert_same_bits(state, other)
    assert captured.replays == 6


VALUES: dict[str, tuple[Any, Any]] = {
    "zeros of both signs": (0.0, -0.0),
    "in tuples": ((1,), (1.0,)),
    "truth values in tuples": ((1,), (True,)),
    "zeros in tuples": ((0.0,), (-0.0,)),
    "objects that say that they are equal": (Named("a", 2.0), Named("a", 3.0)),
}


@pytest.mark.parametrize(("one", "other"), VALUES.values(), ids=VALUES)
def test_equal_values_are_not_the_same(one: Any, other: Any) -> None:
    def step(x: np.ndarray, by: Any) -> Any:
        return x * (by[0] if type(by) is tuple else getattr(by, "scale", by))

    numbers = (X * 10).astype(np.int32)
    step_of = compare(step, [(x, one) for x in numbers[:6]] + [(x, other) for x in numbers[:6]])
    assert step_of.replays >= 3


PAIR, SWAPPED = np.dtype([("a", "f4"), ("b", "f4")]), np.dtype([("b", "f4"), ("a", "f4")])
DTYPES: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "big endian": (several, [x.astype(">f4") for x in X[:8]]),
    "unaligned": (several, [unaligned(x) for x in X[:8]]),
    "structured": (
        lambda x: x["a"] * 2,
        [x.view(d).reshape(-1) for d in (PAIR, SWAPPED) for x in X[:5]],
    ),
    "bytes": (
        lambda x: x == b"ab",
        [np.array([b"ab", b"c" * n]) for n in (2, 2, 2, 2, 5, 5, 5, 5)],
    ),
    "dates": (lambda x: x + np.timedelta64(1, "s"), [np.array([n, 2], "M8[s]") for n in range(8)]),
    "spans": (
        lambda x: x * 2,
        [np.array([n, 2], unit) for unit in ("m8[s]", "m8[D]") for n in range(5)],
    ),
    "half": (several, [x.astype("f2") for x in X[:8]]),
    "integers": (several, [(x * 100).astype("i2") for x in X[:8]]),
    "truth values": (several, [x > 0 for x in X[:8]]),
    "complex": (several, [x + 1j for x in X[:8]]),
    "none": (several, [np.zeros((3, 0)) for x in X[:8]]),
}


@pytest.mark.parametrize(("step", "batches"), DTYPES.values(), ids=DTYPES)
def test_dtypes(step: Callable[..., Any], batches: list[Any]) -> None:
    if batches[0].size == 0:
        step = lambda x: (x * 2, x.sum(0), x.sum(), x.prod(1))  # noqa: E731
    compare(step, [(each,) for each in batches])


def test_objects_are_no_numbers() -> None:
    step = fl.capture(lambda x: (x + x, x))
    other = fl.capture(lambda x: x.astype(object) * 10**30)

    def steps() -> None:
        for number in range(2000):
            total, _ = step(np.array([number, 10**30 + number], object))
            assert total[1] == 2 * (10**30 + number)
            assert other(np.array([number, 500]))[1] == 500 * 10**30

    with pytest.warns(RuntimeWarning, match="of object") as caught:
        steps()
    assert len(caught) == 2
    assert step.replays == other.replays == 0


def test_whether_an_argument_can_be_written_to() -> None:
    step = fl.capture(lambda x: (x.flags.writeable, x * 1))
    for number, x in enumerate(X.copy()[:10]):
        x.flags.writeable = number < 5
        assert step(x)[0] == (number < 5)


def test_the_line_of_a_call_with_a_wrong_argument_is_named() -> None:
    step = fl.capture(lambda batch: batch["x"] * 2)
    with pytest.warns(RuntimeWarning, match="argument 0 is an object of type dict") as caught:
        step({"x": X})
    assert caught[0].filename == __file__
