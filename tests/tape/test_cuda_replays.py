"""What replays of CUDA graphs must see, and in what order; shown with the stand-in for CuPy."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py import device, random
from flashlight_py.autograd import functions
from flashlight_py.errors import BackendUnavailableError
from flashlight_py.tape import cublas
from tests.cupy_stand_in import Event, StandInCupy, Stream
from tests.tape.test_cuda_graphs import STEPS, batches, cupy, make, run, run_all

__all__ = ["cupy"]  # the fixture


def numbers(cupy: StandInCupy, value: float = 1.0, size: int = 3) -> Any:
    return cupy.asarray(np.full(size, value))


def test_the_caller_waits_for_a_run_that_has_failed(cupy: StandInCupy) -> None:
    step, _, _ = make(cupy)
    fails = [False]

    @fl.capture
    def failing(x: Any, y: Any) -> Any:
        step(x, y)
        if fails[0]:
            raise ValueError("of the user")

    calls = batches(cupy)
    failing(*calls[0])
    fails[0] = True
    with pytest.raises(ValueError, match="of the user"):
        failing(*calls[1])
    calls[0][0] + 1  # the stand-in raises where this is not ordered


def test_replays_on_several_streams_follow_each_other(cupy: StandInCupy) -> None:
    captured = fl.capture(lambda x: x * 2)
    arrays = [numbers(cupy, value) for value in range(5)]
    for array in arrays[:3]:
        captured(array)
    ready = Event()
    ready.record()
    other = Stream(non_blocking=True)
    other.wait_event(ready)
    captured(arrays[3])  # on the first stream, from the same memory
    with other:
        captured(arrays[4])
    assert captured.replays == 3


def test_the_array_of_a_variable_that_is_an_argument_is_returned(cupy: StandInCupy) -> None:
    captured = fl.capture(lambda x: x.array)
    for _ in range(4):
        variable = fl.Variable(numbers(cupy))
        assert captured(variable) is variable.array
    assert captured.replays == 2


@pytest.mark.parametrize("dtypes", [("f4", "f8"), ("i8", "i8")])
def test_products_that_are_not_captured_are_left_to_cupy(cupy: StandInCupy, dtypes: Any) -> None:
    x, y = (cupy.asarray(np.ones((2, 2), dtype)) for dtype in dtypes)
    captured = fl.capture(lambda x: functions.matmul(fl.input(x), fl.input(y)))
    with pytest.warns(RuntimeWarning, match=f"products of {x.dtype} and {y.dtype}"):
        found = [captured(x).array.get().tolist() for _ in range(4)]
    assert found == [[[2, 2], [2, 2]]] * 4


def test_without_cublas_a_step_stays_as_it_is(
    cupy: StandInCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def library() -> Any:
        raise BackendUnavailableError("CuPy has loaded no libcublas.so")

    monkeypatch.setattr(cublas, "library", library)
    captured = fl.capture(lambda x: x * 2)
    with pytest.warns(RuntimeWarning, match="no libcublas"):
        found = [captured(numbers(cupy)).get().tolist() for _ in range(3)]
    assert found == [[2, 2, 2]] * 3


@pytest.mark.parametrize("is_loaded", [False, True])
def test_another_generator_is_seen(cupy: StandInCupy, is_loaded: bool) -> None:
    def draws(step: Any) -> list[Any]:
        fl.set_seed(0)
        found = []
        for number in range(8):
            if number == 5 and is_loaded:
                random.load_state_dict(random.state_dict())
            elif number == 5:
                fl.set_seed(7)
            found.append(step(numbers(cupy, size=20)).array.get().tolist())
        return found

    def step(x: Any) -> Any:
        return functions.dropout(fl.input(x), 0.5)

    captured = fl.capture(step)
    assert draws(captured) == draws(step)
    assert captured.reason == ""
    assert captured.replays == 5


def test_arrays_that_the_kernels_of_optimizers_do_not_take_end_a_capture(
    cupy: StandInCupy,
) -> None:
    def run(is_captured: bool) -> list[Any]:
        w, v = (fl.param(cupy.asarray(np.ones(shape))) for shape in ((4, 6), (6, 4)))
        optimizer = fl.optim.AdamOptimizer([w, v], 0.1)

        def step(x: Any) -> Any:
            optimizer.zero_grad()  # the gradient of w is a view that is not contiguous
            loss = functions.sum((functions.transpose(w) + v) * fl.input(x))
            loss.backward()
            optimizer.step()
            return loss

        found = []
        captured = fl.capture(step) if is_captured else step
        for number in range(6):
            optimizer.lr = 0.1 / (1 + number)
            x = cupy.asarray(np.full((6, 4), 1.0 + number))
            found.append(captured(x).array.get().tolist())
        return found

    expected = run(is_captured=False)
    with pytest.warns(RuntimeWarning, match="no kernel of its own"):
        assert run(is_captured=True) == expected


def test_a_capture_is_only_of_what_has_run_before(cupy: StandInCupy) -> None:
    state = {"counts": False, "count": 0}

    def step(x: Any) -> Any:
        if state["counts"]:
            state["count"] += 1
        return x * 2

    captured = fl.capture(step)
    captured(numbers(cupy))
    captured(numbers(cupy))
    state["counts"] = True  # the run that compiles all has not counted
    with pytest.warns(RuntimeWarning, match="it changes what lies on no GPU"):
        captured(numbers(cupy))
    assert state["count"] == 1


def test_arrays_of_the_host_that_are_changed_end_a_capture(cupy: StandInCupy) -> None:
    counts = np.zeros(2000)

    def step(x: Any) -> Any:
        counts[0] += 1
        return x * 2

    captured = fl.capture(step)
    with pytest.warns(RuntimeWarning, match="it changes counts, an array of the host"):
        run_all(captured, [(numbers(cupy),)] * 6)
    assert counts[0] == 6


def test_gradients_that_are_not_read_are_arguments_like_others(cupy: StandInCupy) -> None:
    weight = fl.param(numbers(cupy))

    @fl.capture
    def step(x: Any) -> None:
        weight.zero_grad()
        functions.sum(weight * fl.input(x)).backward()

    step(numbers(cupy))
    step(numbers(cupy, 2.0))
    grad = weight.grad
    step(numbers(cupy))
    step(grad)
    assert step.replays == 2
    assert weight.grad.get().tolist() == [2, 2, 2]


class Elsewhere:
    """Stands for the recording of another thread."""

    def is_here(self) -> bool:
        return False


def test_recordings_of_other_threads_are_none_of_this_one(
    cupy: StandInCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = fl.input(cupy.asarray(np.ones((3, 3))))

    def step(x: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(device, "own_operations", [*device.own_operations, Elsewhere()])
            return functions.matmul(fl.input(x), weight)

    captured = fl.capture(step)
    for _ in range(4):
        captured(cupy.asarray(np.ones((3, 3))))
    assert (captured.reason, captured.replays) == ("", 2)


def test_check_compares_the_first_replays(cupy: StandInCupy) -> None:
    step, model, _ = make(cupy, lambda params: fl.optim.AdamOptimizer(params, 0.1), 0.5)
    eager, other, _ = make(cupy, lambda params: fl.optim.AdamOptimizer(params, 0.1), 0.5)
    fl.set_seed(3)
    expected = run(eager, other, batches(cupy))
    fl.set_seed(3)
    captured = fl.capture(step, check=True)
    assert run(captured, model, batches(cupy)) == expected
    assert captured.replays == STEPS - 2


def test_check_finds_what_a_capture_cannot_see(cupy: StandInCupy) -> None:
    seen = iter(range(100))

    class Hidden:
        __captured_state__ = ()

        def value(self) -> float:
            return float(next(seen))

    hidden = Hidden()
    captured = fl.capture(lambda x: x * hidden.value(), check=True)
    array = cupy.asarray(np.ones(3))
    captured(array)
    captured(array)
    with pytest.raises(RuntimeError, match="differs from the step itself in what it returns"):
        captured(array)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        captured(array)
    assert captured.replays == 0


def use_optimizer(array: Any, use: Callable[[Any], Any]) -> Any:
    """Return a captured step that uses its optimizer so, after six calls with new numbers."""
    weight = fl.param(array.copy())
    optimizer = fl.optim.SGDOptimizer([weight], 0.1, momentum=0.5)

    @fl.capture
    def step(x: Any) -> Any:
        optimizer.zero_grad()
        functions.sum(weight * fl.input(x)).backward()
        found = use(optimizer)
        optimizer.step()
        return found

    for number in range(1, 7):
        optimizer.lr = optimizer.momentum = 1 / (1 + number // 4)
        found = step(array)
    assert found is None or found == 0.5
    return step


LEAVING: dict[str, Callable[[Any], Any]] = {
    "rate is read": lambda optimizer: optimizer.lr,
    "rate is assigned": lambda optimizer: setattr(optimizer, "lr", 0.5),
    "an optimizer is read": lambda optimizer: optimizer.state_dict()["lr"],
}


@pytest.mark.parametrize("is_on_gpu", [False, True])
@pytest.mark.parametrize("words", LEAVING)
def test_a_step_that_uses_the_learning_rate_itself_stays_as_it_is(
    cupy: StandInCupy, is_on_gpu: bool, words: str
) -> None:
    ones = np.ones(3)
    with pytest.warns(RuntimeWarning, match=f"{words} in it"):
        step = use_optimizer(cupy.asarray(ones) if is_on_gpu else ones, LEAVING[words])
    assert step.replays == 0


@pytest.mark.parametrize("is_on_gpu", [False, True])
def test_a_step_may_use_other_numbers_of_its_optimizer(cupy: StandInCupy, is_on_gpu: bool) -> None:
    ones = np.ones(3)
    array = cupy.asarray(ones) if is_on_gpu else ones
    step = use_optimizer(array, lambda optimizer: optimizer.momentum)
    assert step.reason == ""
    assert step.replays >= 2


def test_numbers_of_python_are_captured(cupy: StandInCupy) -> None:
    factor = [2.0]
    captured = fl.capture(lambda x: fl.input(x) * factor[0])
    for _ in range(4):
        assert captured(numbers(cupy)).array.get().tolist() == [2, 2, 2]
    factor[0] = 3.0
    assert captured(numbers(cupy)).array.get().tolist() == [3, 3, 3]
    assert (captured.reason, captured.replays) == ("", 2)
