"""Captured steps as methods and as parts of other steps; copies, checks, collection, threads."""

import copy
import functools
import gc
import itertools
import pickle
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.tables import for_each
from tests.tape.steps import assert_same_bits, compare, trained

X = np.random.default_rng(0).random((30, 4, 3))


def test_python_code_runs_only_in_the_recording() -> None:
    calls, history = itertools.count(1), list[Any]()

    @fl.capture
    def step(x: np.ndarray) -> Any:
        history.append(x.sum())
        return x * next(calls)

    assert_same_bits([step(x) for x in X], list(X))
    assert next(calls) == 2
    assert_same_bits(history, [X[0].sum()])
    assert step.replays == len(X) - 1


def test_evaluation_step_is_captured() -> None:
    model = fl.nn.Linear(3, 2).astype("f8")
    parts = {"out": model, "shape": np.shape, "itself": lambda x: x}
    step = lambda x: {name: of(x) for name, of in parts.items()}  # noqa: E731
    change = lambda number, model: model.train() if number % 4 < 2 else model.eval()  # noqa: E731
    captured = compare(lambda: (step, model), X, change, eager=2)
    with pytest.raises(RuntimeError, match="by the function that returned"):
        captured(X[0])["out"].backward(np.ones((4, 2)))
    assert captured(x := X[0])["itself"] is x


def test_recording_works_during_exception_handling() -> None:
    try:
        raise KeyError
    except KeyError:
        compare(lambda: lambda x: x * 2, X[:2])


def test_capture_raises_type_error_for_invalid_arguments() -> None:
    with pytest.raises(TypeError, match="step must be callable"):
        fl.capture(3)
    with pytest.raises(TypeError, match="objects with arrays"):
        fl.capture(plain, state=[np.ones(3)])
    step = fl.capture(lambda x: x + 1)
    for _ in range(5):
        with pytest.raises(TypeError, match="missing"):
            step()


@for_each("raises", [False, True])
def test_stand_ins_are_replaced_after_the_recording(raises: bool) -> None:
    history: Any = deque()
    weight = fl.param(np.ones(3))

    @fl.capture
    def step(x: np.ndarray) -> Any:
        loss = (weight * x).sum()
        history.extend([x * 2, x, (x, [x * 2]), weight.array, loss.scalar()])
        if raises:
            raise KeyError
        return loss

    x = X[0].copy()
    try:
        step(x)
    except KeyError:
        assert raises
    assert [type(value) for value in history][:2] == [np.ndarray] * 2
    assert type(history[2][1][0]) is np.ndarray
    assert history[1] is history[2][0] is x
    assert history[3] is weight.array
    assert type(history[4]) is float


def test_check_detects_hidden_dependencies(tmp_path: Path) -> None:
    hidden = tmp_path / "factor"
    hidden.write_text("2.0")
    weight = fl.param(np.ones(3))

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


class Trainer:
    """A trainer whose functions are captured with each form of ``capture``."""

    def __init__(self, factor: float = 1.0) -> None:
        self.weight = fl.param(np.full(3, factor))
        self.optimizer = fl.optim.AdamOptimizer([self.weight], 0.1)
        self.bound: Any = None
        self.loss: Any = None
        self.losses: list[Any] = [None]

    @fl.capture
    def plain(self, x: np.ndarray) -> Any:
        return (self.weight * x).sum()

    @fl.capture(check=True)
    def checked(self, x: np.ndarray) -> Any:
        return (self.weight * x).sum()

    @fl.capture
    @staticmethod
    def static(x: np.ndarray) -> Any:
        return x * 2

    inner = staticmethod(fl.capture(lambda x: x * 2))
    of_class = classmethod(fl.capture(lambda cls, x: x * 2))

    def one_step(self, x: np.ndarray) -> Any:
        self.optimizer.zero_grad()
        loss = (self.weight * x).sum()
        loss.backward()
        self.optimizer.step()
        return loss, x


def test_capture_supports_all_kinds_of_methods() -> None:
    one, two = Trainer(), Trainer(2.0)
    for x in X[:9]:
        for trainer in (one, two):
            for step in (trainer.plain, trainer.checked):
                assert_same_bits(step(x).array, (trainer.weight * x).sum().array)
        for step in (one.static, Trainer.static, one.inner, one.of_class):
            assert_same_bits(step(x), x * 2)
    assert pickle.loads(pickle.dumps(Trainer.plain)) is Trainer.plain
    assert [Trainer.plain.replays, Trainer.checked.replays, Trainer.static.replays] == [16, 10, 17]


def test_results_stored_in_attributes_are_kept() -> None:
    trainer, before = Trainer(), Trainer.plain.replays
    for x in X[:9]:
        trainer.loss = trainer.plain(x)
        trainer.losses.append(trainer.loss)
        assert trainer.loss.scalar() == pytest.approx(x.sum())
    assert Trainer.plain.replays == before + 7


def test_captured_methods_keep_no_instance_alive() -> None:
    gc.collect()
    trainers, before = [Trainer() for _ in range(5)], Trainer.plain.replays
    for x in X[:4]:
        for trainer in trainers:
            trainer.plain(x)
    assert Trainer.plain.replays == before + 15
    assert len(Trainer.plain.programs) == 5
    references = [weakref.ref(trainer) for trainer in trainers] + [
        weakref.ref(t.weight) for t in trainers
    ]
    del trainer, trainers
    gc.collect()
    assert [ref() for ref in references] == [None] * 10
    assert Trainer.plain.programs == []


@for_each("check", [False, True])
def test_cyclic_captured_step_is_collected(check: bool) -> None:
    trainer = Trainer()
    trainer.bound = fl.capture(trainer.one_step, check=check)
    for x in X[:10]:
        trainer.bound(x)
    assert trainer.bound.replays
    references = weakref.ref(trainer), weakref.ref(trainer.weight), weakref.ref(trainer.bound)
    del trainer
    gc.collect()
    assert [ref() for ref in references] == [None] * 3


@fl.capture
def doubled(x: np.ndarray) -> Any:
    """Return twice as much."""
    return x * 2


def plain(x: np.ndarray) -> Any:
    return x * 3


def test_captured_steps_support_copy_and_pickle() -> None:
    tripled, bound = fl.capture(plain, check=False), fl.capture(functools.partial(plain))
    for step, factor in ((doubled, 2), (tripled, 3), (bound, 3)):
        for x in X[:3]:
            step(x)
        for other in (copy.copy(step), copy.deepcopy(step), pickle.loads(pickle.dumps(step))):
            before = other.replays
            assert_same_bits([other(x) for x in X[:4]], [x * factor for x in X[:4]])
            assert other.replays >= before + 3
    assert doubled.__doc__ == "Return twice as much."


def test_nested_captured_step_is_part_of_the_outer() -> None:
    def make(wrap: Callable[[Any], Any]) -> tuple[Any, ...]:
        weight = fl.param(np.ones(3))
        total = np.zeros(3)

        @wrap
        def inner(x: np.ndarray) -> Any:
            nonlocal total
            total += x.sum(0)
            return (weight * x).sum()

        @wrap
        def outer(x: np.ndarray) -> Any:
            weight.zero_grad()
            inner(x * 2).backward()
            weight.array -= 0.1 * weight.grad
            return inner(x), total * 1

        return outer, inner, weight

    outer, inner, weight = make(lambda step: step)
    fast, part, param = make(fl.capture)
    for number, x in enumerate(X):
        assert_same_bits([outer(x), weight.array], [fast(x), param.array])
        if number % 4 == 3:
            assert_same_bits(inner(x), part(x))
    assert fast.replays > 20
    assert part.replays > 3


def test_recording_is_local_to_its_thread() -> None:
    weight, inside, done = fl.param(np.ones(3)), threading.Event(), threading.Event()

    @fl.capture
    def step(x: np.ndarray) -> Any:
        if threading.current_thread() is not threading.main_thread():
            inside.set()
            assert done.wait(60)
        return (weight * x).sum()

    worker = threading.Thread(target=step, args=(X[0],))
    worker.start()
    assert inside.wait(60)
    values = weight.array + 1  # the stand-in behaves the same
    assert float((weight * X[1]).sum().scalar()) == pytest.approx(X[1].sum())
    assert type(fl.random.generator()) is np.random.Generator
    fl.all_reduce(np.ones(3))
    assert "grad" not in vars(type(fl.param(np.ones(3))))  # other variables do not change
    done.set()
    worker.join()
    assert (type(np.asarray(values)), type(weight)) == (np.ndarray, fl.Variable)
    assert step.reason == ""
    assert step(X[2]).scalar() == pytest.approx(X[2].sum())
    assert step.replays == 1


def test_variable_subclass_is_restored_after_recording() -> None:
    subclasses = []

    class Named(fl.Variable):
        def __init_subclass__(cls) -> None:
            subclasses.append(cls)

        @property
        def grad(self) -> Any:
            return fl.Variable.grad.__get__(self)

        @grad.setter
        def grad(self, grad: Any) -> None:
            fl.Variable.grad.__set__(self, grad)  # type: ignore[attr-defined]

    weight = Named(np.ones(3), calc_grad=True)

    @fl.capture
    def step(x: np.ndarray) -> Any:
        weight.grad = None
        loss = (weight * x).sum()
        loss.backward()
        assert type(type(weight)(np.ones(3))) is Named
        return loss

    for x in X[:4]:
        step(x)
        assert (type(weight), step.reason, subclasses) == (Named, "", [])
        np.testing.assert_allclose(weight.grad, x.sum(0))


def interrupt(at: int, step: Callable[[Any], Any]) -> int:
    """Interrupt one line of the code that begins or ends recordings. Return the number of lines."""
    count = 0
    names = {"_run", "record", "begin", "end", "pop_all", "close", "__exit__", "_exit_wrapper"}

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal count
        is_line = event == "line" and frame.f_code.co_name in names
        count += is_line
        if is_line and count == at:
            signal.raise_signal(signal.SIGINT)
        return trace

    sys.settrace(trace)
    try:
        step(X[0])
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return count


def press_ctrl_c_in_each_line() -> None:
    handler, lines = signal.getsignal(signal.SIGINT), interrupt(0, fl.capture(trained()[0]))
    for at in range(1, lines + 1):
        (interrupted, model, _), (step, *_) = trained(), trained()
        interrupt(at, fl.capture(interrupted))
        assert {type(param.array) for param in model.params()} == {np.ndarray}, at
        assert type(fl.random.generator()) is np.random.Generator, at
        assert signal.getsignal(signal.SIGINT) is handler
        captured = fl.capture(step)
        for x in X[:3]:
            captured(x)
        assert captured.replays == 2, (at, captured.reason)


@pytest.mark.slow
def test_ctrl_c_does_not_interrupt_recording_setup() -> None:
    # A new process: Python 3.11 cannot trace a process that keeps an exception of an ended thread.
    program = "from tests.tape import test_recordings as t; t.press_ctrl_c_in_each_line()"
    command = [sys.executable, "-W", "error", "-c", program]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True, timeout=100)


def test_threads_share_a_captured_step() -> None:
    step = fl.capture(lambda x: (fl.input(x) @ np.ones((3, 300))).sum())
    expected = [step(x).scalar() for x in X]

    def work(_: int) -> list[int]:
        calls = [*enumerate(X)] * 100
        return [number for number, x in calls if step(x).scalar() != expected[number]]

    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(work, range(4))] == [[]] * 4


@pytest.mark.slow
def test_replays_do_not_leak_memory() -> None:
    captured = fl.capture(trained()[0])
    for number in range(100_000):
        captured(X[number % 30])
        if number == 1000:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2000  # KiB
    assert captured.replays == 100_000 - 1
