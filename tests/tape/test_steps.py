"""What steps consist of beside functions and optimizers: meters, state, several passes."""

from __future__ import annotations

import gc
import resource
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.tape.steps import assert_same_bits, twins

F = fl.autograd.functions
X = np.random.default_rng(0).random((60, 4, 3)).astype(np.float32)
Y = np.random.default_rng(1).random((60, 4, 1)).astype(np.float32)


def regression(more: Callable[..., Any] | None = None) -> tuple[Any, ...]:
    fl.set_seed(1)
    model = fl.nn.Sequential(fl.nn.Linear(3, 5), fl.nn.Tanh(), fl.nn.Linear(5, 1))
    optimizer = fl.optim.SGDOptimizer(model.params(), lr=0.1, momentum=0.9)
    criterion = fl.nn.MeanSquaredError()

    def step(x: np.ndarray, y: np.ndarray) -> Any:
        optimizer.zero_grad()
        out = model(fl.input(x))
        loss = criterion(out, fl.no_grad(y))
        if more is not None:
            more(loss, out, y)
        loss.backward()
        optimizer.step()
        return loss

    return step, model.params(), optimizer


METERS: dict[str, tuple[Callable[[], Any], Callable[..., Any]]] = {
    "average": (fl.meter.AverageValueMeter, lambda meter, loss, out, y: meter.add(loss)),
    "number": (fl.meter.AverageValueMeter, lambda meter, loss, out, y: meter.add(loss.scalar())),
    "array": (fl.meter.AverageValueMeter, lambda meter, loss, out, y: meter.add(out.array, 2.0)),
    "squares": (fl.meter.MSEMeter, lambda meter, loss, out, y: meter.add(out.array, y)),
}


@pytest.mark.parametrize("name", METERS)
def test_meters_are_on_the_tape(name: str) -> None:
    make_meter, add = METERS[name]
    meters: list[Any] = []

    def make() -> tuple[Any, ...]:
        meter = make_meter()
        meters.append(meter)
        return regression(lambda loss, out, y: add(meter, loss, out, y))

    eager, captured = twins(make)
    for number, (x, y) in enumerate(zip(X, Y, strict=True)):
        if number == 40:
            for meter in meters:
                meter.reset()
        assert_same_bits(eager.step(x, y), captured.step(x, y))
        assert_same_bits(meters[0].state(), meters[1].state())
    captured.assert_replayed(len(X))


def test_two_captured_steps_in_turn() -> None:
    """As a generator and a discriminator are trained."""

    def make() -> tuple[Any, ...]:
        fl.set_seed(2)
        first, second = fl.nn.Linear(3, 3), fl.nn.Linear(3, 1)
        optimizers = [fl.optim.AdamOptimizer(each.params(), 0.01) for each in (first, second)]

        def one(x: np.ndarray) -> Any:
            optimizers[0].zero_grad()
            loss = (second(first(fl.input(x))) ** 2).mean()
            loss.backward()
            optimizers[0].step()
            return loss

        def other(x: np.ndarray, y: np.ndarray) -> Any:
            optimizers[1].zero_grad()
            loss = ((second(fl.no_grad(first(fl.input(x)).array)) - y) ** 2).mean()
            loss.backward()
            optimizers[1].step()
            return loss

        return one, other, [*first.params(), *second.params()]

    one, other, eager = make()
    fast_one, fast_other, params = make()
    fast_one, fast_other = fl.capture(fast_one), fl.capture(fast_other)
    for x, y in zip(X, Y, strict=True):
        assert_same_bits([one(x), other(x, y)], [fast_one(x), fast_other(x, y)])
        assert_same_bits([p.array for p in eager], [p.array for p in params])
    assert fast_one.replays > 50
    assert fast_other.replays > 50


def test_an_optimizer_of_the_users_own() -> None:
    def make() -> tuple[Any, ...]:
        fl.set_seed(3)
        model = fl.nn.Linear(3, 1)
        velocity = [np.zeros_like(p.array) for p in model.params()]

        def step(x: np.ndarray, y: np.ndarray) -> Any:
            loss = ((model(fl.input(x)) - y) ** 2).mean()
            loss.backward()
            for number, param in enumerate(model.params()):
                velocity[number] = 0.9 * velocity[number] + param.grad
                param.array -= 0.1 * velocity[number]
                param.zero_grad()
            return loss

        return step, model.params()

    eager, captured = twins(make)
    for x, y in zip(X, Y, strict=True):
        assert_same_bits(eager.step(x, y), captured.step(x, y))
    captured.assert_replayed(len(X))
    assert_same_bits(eager.state(), captured.state())


def test_a_step_that_only_evaluates() -> None:
    model = fl.nn.Linear(3, 2)
    step = fl.capture(lambda x: {"out": model(fl.input(x)), "shape": x.shape, "x": x})
    for x in X:
        got, expected = step(x), model(fl.input(x))
        assert got["x"] is x
        assert got["shape"] == (4, 3)
        assert_same_bits(expected, got["out"])
    with pytest.raises(RuntimeError, match="captured"):
        got["out"].backward(np.ones((4, 2), np.float32))
    assert step.replays == len(X) - 3


def test_replays_are_checked_beside_the_step() -> None:
    meter = fl.meter.AverageValueMeter()

    def make() -> tuple[Any, ...]:
        return regression(lambda loss, out, y: meter.add(loss))

    eager, captured = make(), make()
    step = fl.capture(captured[0], check=True)
    for x, y in zip(X, Y, strict=True):
        assert_same_bits(eager[0](x, y), step(x, y))
        assert_same_bits(eager[2].state_dict(), captured[2].state_dict())
    assert meter.value()[2] == 2 * len(X)
    assert step.reason == ""
    assert step.replays == len(X) - 3 - 3


def test_a_check_finds_what_a_recording_cannot_see(tmp_path: Path) -> None:
    hidden = tmp_path / "factor"
    hidden.write_text("2.0")
    weight = fl.param(np.ones(3, np.float32))

    @fl.capture(check=True)
    def step(x: np.ndarray) -> Any:
        weight.array *= float(hidden.read_text())
        return fl.input(x) + 1

    for x in X[:3]:
        step(x)
    hidden.write_text("5.0")
    with pytest.raises(RuntimeError, match=r"differs from the step itself in weight\.data"):
        step(X[3])
    assert weight.array[0] == 40
    step(X[4])
    assert weight.array[0] == 200


def test_methods_and_decorators() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.weight = fl.param(np.ones(3, np.float32))

        @fl.capture
        def step(self, x: np.ndarray) -> Any:
            return (self.weight * x).sum()

        @fl.capture(check=True)
        def other(self, x: np.ndarray) -> Any:
            return (self.weight - x).sum()

    one, two = Trainer(), Trainer()
    two.weight.array *= 2
    for x in X:
        for trainer in (one, two):
            assert trainer.step(x).scalar() == (trainer.weight * x).sum().scalar()
            assert trainer.other(x).scalar() == (trainer.weight - x).sum().scalar()
    assert Trainer.step.replays > 100
    assert Trainer.other.replays > 90


def test_arguments_are_checked() -> None:
    with pytest.raises(TypeError, match="capture needs a function"):
        fl.capture(3)
    step = fl.capture(lambda x: x + 1)
    for _ in range(5):
        with pytest.raises(TypeError, match="missing"):
            step()


def test_variables_of_state_that_are_returned() -> None:
    """A view of a parameter, a parameter itself, and a gradient without elements."""

    def make() -> tuple[Any, ...]:
        weight, none = fl.param(np.arange(4.0).reshape(2, 2)), fl.param(np.zeros((4, 0)))

        def step(x: np.ndarray) -> Any:
            ((weight * fl.input(x)).sum() + none.sum()).backward()
            weight.array -= 0.1 * weight.grad
            return weight, weight[::-1], weight.T

        return step, [weight, none]

    eager, captured = twins(make)
    for number in range(8):
        x = np.full((2, 2), float(number))
        assert_same_bits(eager.step(x), captured.step(x.copy()))
    captured.assert_replayed(8)
    assert_same_bits(eager.state(), captured.state())


def test_gradients_that_are_set_between_calls() -> None:
    """A step that leaves no gradient behind, as it found none, takes one away."""

    def make() -> tuple[Any, ...]:
        weight = fl.param(np.arange(4.0))

        def step(x: np.ndarray) -> Any:
            (weight * fl.input(x)).sum().backward()
            result = weight.grad * 2
            weight.zero_grad()
            return result

        return step, [weight]

    eager, captured = twins(make)
    for number in range(12):
        for each in (eager, captured):
            if number in (6, 9):
                each.variables[0].grad = np.full(4, 0.5)
        assert_same_bits(eager.step(np.full(4, 2.0)), captured.step(np.full(4, 2.0)))
        assert_same_bits(eager.state(), captured.state())
    assert captured.step.replays >= 6


def test_results_are_not_overwritten() -> None:
    """Where a step puts another array in the place of one, which others may have."""

    class State:
        array = None

    def make() -> Any:
        state = State()
        state.array = np.zeros(3)

        def step(x: np.ndarray) -> Any:
            state.array = state.array + x
            return state.array

        return step

    eager, captured = make(), fl.capture(make())
    xs = [np.full((3,) if n % 7 < 5 else (1,), float(n)) for n in range(20)]
    results = [(eager(x), captured(x)) for x in xs]
    assert captured.replays >= 10
    for one, other in results:
        assert_same_bits(one, other)


def test_results_of_replays_are_apart() -> None:
    step = fl.capture(lambda x: fl.input(x) * 2)
    results = [step(x) for x in X]
    for result, x in zip(results, X, strict=True):
        assert_same_bits(result.array, x * 2)


def test_threads_share_a_captured_step() -> None:
    step = fl.capture(lambda x: (fl.input(x) @ np.ones((3, 300), np.float32)).sum())
    expected = [step(x).scalar() for x in X]
    wrong: list[int] = []

    def work() -> None:
        for _ in range(50):
            wrong.extend(n for n, x in enumerate(X) if step(x).scalar() != expected[n])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_captured_step_goes_with_the_last_reference() -> None:
    step, params, _ = regression()
    captured = fl.capture(step)
    for x, y in zip(X, Y, strict=True):
        captured(x, y)
    assert captured.replays
    gone = weakref.ref(params[0]), weakref.ref(step)
    del step, params, captured, _
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


@pytest.mark.parametrize("check", [False, True])
def test_a_captured_step_that_its_model_refers_to_is_collected(check: bool) -> None:
    class Trainer:
        def __init__(self) -> None:
            self.weight = fl.param(np.ones(3))
            self.optimizer = fl.optim.AdamOptimizer([self.weight], 0.1)
            self.step = fl.capture(self.one_step, check=check)

        def one_step(self, x: np.ndarray) -> Any:
            self.optimizer.zero_grad()
            loss = (self.weight * x).sum()
            loss.backward()
            self.optimizer.step()
            return loss, x

    trainer = Trainer()
    for number in range(10):
        trainer.step(np.full(3, float(number)))
    assert trainer.step.replays
    gone = weakref.ref(trainer), weakref.ref(trainer.weight), weakref.ref(trainer.step)
    del trainer
    gc.collect()
    assert [ref() for ref in gone] == [None] * 3


@pytest.mark.slow
def test_memory_does_not_grow() -> None:
    step, *_ = regression()
    captured = fl.capture(step)
    for number in range(100_000):
        captured(X[number % 60], Y[number % 60])
        if number == 1000:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert captured.replays == 100_000 - 3
    assert grown < 2000  # KiB
