"""Every way in which a step leaves the captured path: the same results, a reason, nothing stale."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.tape.steps import Twin, assert_same_bits, twins

F = fl.autograd.functions
X = np.random.default_rng(0).random((50, 4, 3))


def model_and_step(body: Callable[..., Any] | None = None) -> Callable[[], tuple[Any, ...]]:
    def make() -> tuple[Any, ...]:
        fl.set_seed(1)
        model = fl.nn.Sequential(fl.nn.Linear(3, 5), fl.nn.ReLU(), fl.nn.Linear(5, 1)).astype("f8")
        optimizer = fl.optim.SGDOptimizer(model.params(), lr=0.1, momentum=0.9)

        def step(x: np.ndarray) -> Any:
            optimizer.zero_grad()
            loss = (model(fl.input(x)) ** 2).mean()
            seen = body(loss, x) if body is not None else None
            loss.backward()
            optimizer.step()
            return loss, seen

        return step, model.params(), optimizer, model

    return make


def test_a_gradient_of_what_the_step_has_made_itself() -> None:
    """That of a bias depends on the seed alone, which the recording does not know."""

    def train(captures: bool) -> list[np.ndarray]:
        fl.set_seed(1)
        model = fl.nn.Sequential(fl.nn.Linear(3, 5), fl.nn.ReLU(), fl.nn.Linear(5, 1)).astype("f8")
        optimizer = fl.optim.SGDOptimizer(model.params(), lr=0.1)

        def step(x: np.ndarray) -> None:
            optimizer.zero_grad()
            model(fl.input(x)).backward(np.ones((4, 1)))
            optimizer.step()

        run = fl.capture(step) if captures else step
        for x in X[:4]:
            run(x)
        return [param.array for param in model.params()]

    with pytest.warns(RuntimeWarning, match="stays eager"):
        captured = train(True)
    assert all(map(np.array_equal, captured, train(False)))


def pair(make: Callable[[], tuple[Any, ...]]) -> tuple[Twin, Twin, list[fl.nn.Module]]:
    models: list[fl.nn.Module] = []

    def without_model() -> tuple[Any, ...]:
        *made, model = make()
        models.append(model)
        return tuple(made)

    eager, captured = twins(without_model)
    return eager, captured, models


def run(eager: Twin, captured: Twin, steps: range) -> None:
    for number in steps:
        assert_same_bits(eager.step(X[number]), captured.step(X[number]))
    assert_same_bits(eager.state(), captured.state())


READS = {
    "float": lambda loss, x: float(loss),
    "scalar": lambda loss, x: loss.scalar() + 1,
    "if": lambda loss, x: 1 if loss.array > 1 else 2,
    "bool": lambda loss, x: bool(loss),
    "format": lambda loss, x: f"{loss.array:.3f}",
    "asarray": lambda loss, x: np.asarray(loss.array).tolist(),
    "tolist": lambda loss, x: x.tolist(),
    "tobytes": lambda loss, x: x.tobytes(),
    "comparison": lambda loss, x: np.array_equal(x, x),
    "mask": lambda loss, x: x[x > 0.5].sum(),
    "draw": lambda loss, x: fl.random.generator().random() * 0,
}


@pytest.mark.parametrize("read", READS)
def test_a_value_that_is_read_ends_the_capture_with_the_line(read: str) -> None:
    eager, captured, _ = pair(model_and_step(READS[read]))
    fl.set_seed(5)

    def steps() -> None:
        for number in range(6):
            one, other = eager.step(X[number]), captured.step(X[number])
            if read != "draw":
                assert_same_bits(one, other)

    with pytest.warns(RuntimeWarning, match="stays eager") as caught:
        steps()
    assert len(caught) == 1  # once
    assert "test_leaving.py" in str(caught[0].message)
    if read != "draw":  # which is known when the step is over
        assert f'"{read}": lambda loss, x:' in str(caught[0].message)
    assert captured.step.replays == 0


def test_a_number_that_is_only_returned_is_read_at_the_end() -> None:
    eager, captured, _ = pair(model_and_step(lambda loss, x: loss.scalar()))
    run(eager, captured, range(10))
    captured.assert_replayed(10)


def test_what_a_step_counts_in_python_would_be_lost() -> None:
    counts: dict[str, int] = {"calls": 0}

    @fl.capture
    def step(x: np.ndarray) -> Any:
        counts["calls"] += 1
        return x + 1

    with pytest.warns(RuntimeWarning, match=r"calls'\]: 1 -> 2"):
        assert len([step(X[number]) for number in range(5)]) == 5
    assert counts["calls"] == 5


def test_random_numbers_of_python_differ_each_time() -> None:
    @fl.capture
    def step(x: np.ndarray) -> Any:
        return x * random.random()

    with pytest.warns(RuntimeWarning, match="draws random numbers"):
        assert len([step(X[0]) for _ in range(100)]) == 100
    assert step.replays == 0


def test_arrays_that_a_step_makes_are_constants_where_they_are_the_same() -> None:
    constant = fl.capture(lambda x: x + np.arange(3.0))
    drawn = fl.capture(lambda x: x + np.random.default_rng().random(3))
    for number in range(20):
        assert_same_bits(X[number] + np.arange(3.0), constant(X[number]))
        drawn(X[0])
    assert constant.replays == 17
    assert drawn.replays == 0


def test_another_shape_dtype_or_value_is_recorded_by_itself() -> None:
    @fl.capture
    def step(x: np.ndarray, power: int = 1, shift: float = 0.0) -> Any:
        return (x * power).sum() + shift

    calls = [
        step,
        lambda x: step(x[:2]),
        lambda x: step(x.astype("f4")),
        lambda x: step(x, 2),
        lambda x: step(x, shift=3.0),
        lambda x: step(fl.input(x).array, power=2),
    ]
    for number in range(20):
        for call in calls:
            assert np.isfinite(call(X[number]))
    assert step.replays == 20 * len(calls) - 3 * len(calls)
    with pytest.warns(RuntimeWarning, match="could not be replayed"):
        assert len([step(X[0], number) for number in range(200)]) == 200


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "hook": lambda model, optimizer: model.params()[0].register_grad_hook(double),
    "array": lambda model, optimizer: setattr(
        model.params()[0], "array", model.params()[0].array * 2
    ),
    "frozen": lambda model, optimizer: setattr(model.params()[0], "calc_grad", False),
    "layer": lambda model, optimizer: model.add(fl.nn.Tanh()),
    "rate": lambda model, optimizer: setattr(optimizer, "lr", 0.05),
    "momentum": lambda model, optimizer: setattr(optimizer, "momentum", 0.5),
    "buffer": lambda model, optimizer: setattr(
        model.params()[0], "grad_buffer", np.zeros_like(model.params()[0].array)
    ),
    "state": lambda model, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    "no gradient": lambda model, optimizer: optimizer.zero_grad(),
}


def double(variable: fl.Variable) -> None:
    assert variable.grad is not None
    variable.grad *= 2


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_from_outside_is_seen(change: str) -> None:
    eager, captured, models = pair(model_and_step())
    run(eager, captured, range(10))
    for twin, model in zip((eager, captured), models, strict=True):
        CHANGES[change](model, twin.optimizer)
    run(eager, captured, range(10, 30))
    assert captured.step.reason == ""
    assert captured.step.replays >= 20


def test_evaluation_mode_and_back() -> None:
    fl.set_seed(0)
    model = fl.nn.Sequential(fl.nn.Linear(3, 4), fl.nn.Dropout(0.5), fl.nn.Linear(4, 1))
    step = fl.capture(lambda x: model(fl.input(x.astype(np.float32))))
    for mode in ("train", "eval", "train", "eval"):
        getattr(model, mode)()
        for number in range(6):
            fl.set_seed(number)
            expected = model(fl.input(X[number].astype(np.float32)))
            fl.set_seed(number)
            assert step(X[number]).array.tobytes() == expected.array.tobytes()
    assert step.replays > 10


FACTOR = 1.0


def test_numbers_that_a_step_closes_over_or_finds_in_globals() -> None:
    global FACTOR  # noqa: PLW0603
    offset = 0.0
    settings = {"power": 1}

    @fl.capture
    def step(x: np.ndarray) -> Any:
        return (x ** settings["power"]).sum() * FACTOR + offset

    for number in range(20):
        if number % 5 == 0:
            offset += 1
        if number == 7:
            FACTOR = 3.0
        if number == 13:
            settings["power"] = 2
        expected = (X[number] ** settings["power"]).sum() * FACTOR + offset
        assert step(X[number]) == expected
    FACTOR = 1.0
    assert step.replays > 0


def test_an_exception_in_the_middle_leaves_nothing_behind() -> None:
    stop = {"now": False}

    def body(loss: fl.Variable, x: np.ndarray) -> None:
        if stop["now"]:
            raise KeyError("stop")

    eager, captured, _ = pair(model_and_step(body))
    for first, calls in ((0, 1), (10, 2), (20, 6)):  # before, in and after the recordings
        run(eager, captured, range(first, first + calls))
        stop["now"] = True
        for twin in (eager, captured):
            with pytest.raises(KeyError):
                twin.step(X[0])
        stop["now"] = False
        assert_same_bits(eager.state(), captured.state())
        for variable in captured.variables:
            assert type(variable.array) is np.ndarray
            assert variable.grad is None or type(variable.grad) is np.ndarray
    run(eager, captured, range(30, 40))
    assert captured.step.replays > 0


def test_what_is_checked_of_values_raises_from_a_replay() -> None:
    def make() -> tuple[Any, ...]:
        fl.set_seed(1)
        model = fl.nn.Linear(3, 4)
        optimizer = fl.optim.AdamOptimizer(model.params(), lr=0.1)

        def step(x: np.ndarray, labels: np.ndarray) -> Any:
            optimizer.zero_grad()
            loss = F.categorical_cross_entropy(F.log_softmax(model(fl.input(x))), labels)
            loss.backward()
            optimizer.step()
            return loss

        return step, model.params(), optimizer

    eager, captured = twins(make)
    x = X.astype(np.float32)
    for number in range(20):
        labels = np.arange(4) % 4
        if number % 7 == 6:
            labels[1] = 9
            for twin in (eager, captured):
                with pytest.raises(ValueError, match="target 9 is no class"):
                    twin.step(x[number], labels)
        else:
            assert_same_bits(eager.step(x[number], labels), captured.step(x[number], labels))
        assert_same_bits(eager.state(), captured.state())
    assert captured.step.replays > 10


def test_nothing_is_said_of_a_step_that_is_captured() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        eager, captured, _ = pair(model_and_step())
        run(eager, captured, range(6))
    captured.assert_replayed(6)
