"""Arguments of all layouts, dtypes and values, with separate or shared memory."""

import dataclasses
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.tables import for_each
from tests.tape.steps import compare, trained, training

X = (np.random.default_rng(0).random((24, 6, 4)) * 2 - 1).astype(np.float32)


def unaligned(x: np.ndarray) -> np.ndarray:
    held = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    held[...] = x
    return held


def several(x: np.ndarray) -> Any:
    return x * 2, x.sum(0), x.sum(-1), x.sum(), x[1], np.cumsum(x), x.T.copy(), x.mean()


FORMS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "as it is": np.array,
    "fortran": np.asfortranarray,
    "transposed": lambda x: x.T,
    "reversed": lambda x: x[::-1].copy()[::-1],
    "reversed twice": lambda x: x.copy()[::-1, ::-1],
    "every second": lambda x: x.copy()[::2],
    "columns": lambda x: x.copy()[:, 1:3],
    "broadcast": lambda x: np.broadcast_to(x[0].copy(), (3, 4)),
    "unaligned": unaligned,
    "half": lambda x: x.astype("f2"),
    "integers": lambda x: (x * 100).astype("i2"),
    "truth values": lambda x: x > 0,
    "complex": lambda x: x + 1j,
}


@for_each("form", FORMS)
def test_capture_supports_argument_forms(form: str) -> None:
    compare(lambda: several, map(FORMS[form], X[:8]))


ALIASES: dict[str, Callable[[Any, Any], Any]] = {
    "read": lambda x, y: x * 2 + y,
    "written": lambda x, y: (np.add(x, 1, out=x), np.multiply(y, 2, out=y), x + y),
}


@for_each("step", ALIASES.values(), ALIASES)
def test_arguments_may_share_memory(step: Callable[..., Any]) -> None:
    apart = [(X[i][:-1].copy(), X[i + 5][1:].copy()) for i in range(5)]
    same = [(array, array) for array in X[10:15, :5].copy()]
    overlapping = [(item[:-1], item[1:]) for item in map(np.copy, X[10:15])]
    compare(lambda: step, [*apart, *same, *overlapping, *apart], eager=11)
    compare(lambda: step, [*same, *apart, *same], eager=11)


@for_each("is_first", [False, True])
def test_argument_may_be_a_parameter(is_first: bool) -> None:
    def make() -> Any:
        weight = fl.param(np.arange(4.0))

        def step(x: np.ndarray) -> Any:
            weight.zero_grad()
            loss = (weight * fl.input(x)).sum()
            loss.backward()
            weight.array -= 0.1 * weight.grad
            return loss, x[1:] * 2

        return step, weight

    weights, batches = [lambda weight: weight.array] * 5, list(X[:5, 0].astype(float))
    compare(make, [*weights, *batches] if is_first else [*batches, *weights], eager=6)


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "all": lambda p, x: np.add(p, 1, out=p),
    "reversed": lambda p, x: np.copyto(p, x[::-1]),
    "by the argument": lambda p, x: np.multiply(x, 2, out=x),
}


@for_each("change", CHANGES.values(), CHANGES)
def test_argument_may_be_modified_state(change: Callable[[Any, Any], Any]) -> None:
    def make() -> Any:
        state = np.arange(6.0)

        def step(x: np.ndarray) -> Any:
            before = state[:2] * 2
            change(state, x)
            return before, x * 2, state - 1, x[::-1].copy()

        return step, state

    calls: list[Any] = list(X[:12, :, 0].astype(float))
    for number in (5, 6, 10):
        calls[number] = lambda state: state
    compare(make, calls, eager=4)


@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch that equals batches of the same name and scale."""

    name: str
    scale: float
    array: Any = dataclasses.field(default=None, compare=False)


def scaled(x: np.ndarray, by: Any) -> Any:
    return x * (by[0] if type(by) is tuple else getattr(by, "scale", by))


def with_each(*values: Any) -> list[Any]:
    return [(x, by) for x in (X[:6] * 10).astype(np.int32) for by in values]


class Anything:
    """An object on which every attribute exists."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name) if name == "__self__" else AssertionError(name)


SLOTTED = type("Slotted", (), {"__slots__": ()})  # without weak references
OBJECTS = [object(), SLOTTED(), np.add, ..., fl, SLOTTED, Anything()]
# Calls, and the number of calls that are not replays.
CALLS: dict[str, tuple[Callable[..., Any], list[Any], int]] = {
    "forms in turn": (several, [of(x[:4]) for x in X[:3] for of in FORMS.values()], 11),
    "no elements": (lambda x: (x * 2, x.sum(0), x.sum(), x.prod(1)), [np.zeros((3, 0))] * 8, 1),
    "shapes, dtypes and values": (
        lambda x, power=1: (x * power).sum(),
        [call for x in X for call in (x, x[:2], x.astype("f8"), (x, 2), (fl.input(x).array, 2))],
        4,
    ),
    "constants of arguments": (
        lambda x, by, _: x * np.full(4, by),
        [(x, number % 2 + 2.0, ((1, 2), (3,))) for number, x in enumerate(X)],
        4,
    ),
    # Equal values that are different objects.
    "zeros of both signs": (scaled, with_each(0.0, -0.0), 2),
    "in tuples": (scaled, with_each((1,), (1.0,)), 2),
    "truth values in tuples": (scaled, with_each((1,), (True,)), 2),
    "zeros in tuples": (scaled, with_each((0.0,), (-0.0,)), 2),
    "objects": (scaled, with_each(Batch("a", 2.0), Batch("a", 3.0)), 2),
    "objects of any class": (
        lambda x, _, objects=OBJECTS: x * len(objects),
        [(x, other) for x in X[:3] for other in OBJECTS],
        len(OBJECTS),
    ),
}


@for_each("step calls eager", CALLS.values(), CALLS)
def test_capture_supports_arguments(step: Callable[..., Any], calls: list[Any], eager: int) -> None:
    compare(lambda: step, calls, eager=eager)


def test_replay_distinguishes_read_only_arguments() -> None:
    step = fl.capture(lambda x: (x.flags.writeable, x * 1))
    for number, x in enumerate(X.copy()[:10]):
        x.flags.writeable = number < 5
        assert step(x)[0] == (number < 5)


BYTES, DATES, SPANS = np.array([b"ab"]), np.array([1], "M8[s]"), np.array([1], "m8[D]")
REFUSED: dict[str, tuple[Callable[[Any], Any], Any, str]] = {
    "a dict": (lambda batch: batch["x"] * 2, {"x": X[0]}, "is an object of type dict"),
    "a tuple": (lambda x: x[0] * 2, (X[0],), "is an object of type tuple"),
    "a tuple in one": (lambda x: x[1][0] * 2, ("a", (X[0], 1.0)), "is an object of type tuple"),
    "equal ones": (
        lambda b: b.array * 2,
        Batch("", 1.0, X[0]),
        "is compared by value, and has arrays",
    ),
    "objects": (lambda x: (x * 2).tolist(), np.array([1, 10**30], object), "is an array of object"),
    "a gradient": (lambda x: x * 2, fl.param(X[0]), "is a variable with a gradient"),
    "big endian": (several, X[0].astype(">f4"), "is an array of >f4"),
    "structured": (lambda x: x["f0"] * 2, X[0].view("f4,f4"), "is an array of .*f0.* aligned"),
    "bytes": (lambda x: x == b"ab", BYTES, r"is an array of \|S2"),
    "dates": (lambda x: x + np.timedelta64(1, "s"), DATES, "is an array of datetime"),
    "spans": (lambda x: x * 2, SPANS, "is an array of timedelta"),
}


@for_each("name", REFUSED)
def test_unsupported_arguments_stay_eager(name: str) -> None:
    step, argument, reason = REFUSED[name]
    compare(lambda: step, [(argument,)] * 4, reason=f"argument 0 {reason}")


@dataclasses.dataclass(frozen=True)
class Trained:
    model: fl.nn.Module
    optimizer: fl.optim.FirstOrderOptimizer

    def __iter__(self) -> Any:
        return iter((self.model, self.optimizer))


@for_each(
    "kind", [lambda *parts: parts, lambda *parts: Trained(model=parts[0], optimizer=parts[1])]
)
def test_objects_in_arguments_are_state(kind: Callable[..., Any]) -> None:
    def make() -> Any:
        _, model, optimizer = trained()

        def step(owners: Any, x: np.ndarray) -> Any:
            model, optimizer = owners
            return training(optimizer, lambda: model(fl.input(x)).sum())()

        return step, model, optimizer

    def change(number: int, model: Any, optimizer: Any) -> None:
        if number == 8:
            optimizer.momentum = 0.5

    compare(make, [(kind, x) for x in X[..., :3].astype("f8")], change, eager=2)


def test_argument_may_be_an_unusual_tuple_type() -> None:
    step = compare(lambda: lambda x: np.multiply(x.sum(), sys.int_info), [(x,) for x in X[:4]])
    with pytest.raises(TypeError, match="not initialized"):
        object.__new__(type(step))()
