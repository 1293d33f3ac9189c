"""Gradient hooks, gradients in user buffers, and callbacks at the end of a backward pass."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flashlight_py.autograd import Variable, input, on_backward_end, param
from flashlight_py.autograd import functions as F
from flashlight_py.optim import clip_grad_norm
from tests.autograd.cases import ones
from tests.tables import for_each


def test_hook_runs_once_with_the_complete_gradient_and_can_replace_it() -> None:
    x, unused = param(ones(2)), param(ones(1))
    seen: list[np.ndarray] = []

    def halve(variable: Variable) -> None:
        assert variable is x
        seen.append(np.array(variable.grad))
        variable.grad = variable.grad / 2

    x.register_grad_hook(lambda _: pytest.fail("was replaced"))
    x.register_grad_hook(halve)
    unused.register_grad_hook(lambda _: pytest.fail("took no part"))
    F.sum(x * 2.0 * x + x * 3.0 + x).backward()  # used at several depths
    np.testing.assert_array_equal([*seen, x.grad], [[8, 8], [4, 4]])
    x.backward(ones(2))  # of the leaf itself
    np.testing.assert_array_equal([seen[1], x.grad], [[5, 5], [2.5, 2.5]])
    x.clear_grad_hook()
    F.sum(x).backward()
    assert len(seen) == 2
    assert unused.grad is None


def test_gradient_that_became_a_scalar_accumulates() -> None:
    """NumPy returns scalars for arrays without dimensions, and += replaces a scalar."""
    x = param(np.array(2.0))

    def halve(leaf: Variable) -> None:
        leaf.grad = leaf.grad * 0.5

    x.register_grad_hook(halve)
    for expected in (2.0, 3.0, 3.5):
        (x * 4.0).backward()
        assert x.grad == expected
    assert clip_grad_norm([x], 0.5) == 3.5
    assert x.grad == 0.5


def test_hooks_run_for_the_last_layer_first() -> None:
    order: list[str] = []
    first, last = param(ones(2)), param(ones(2))
    first.register_grad_hook(lambda _: order.append("first"))
    last.register_grad_hook(lambda v: order.append(f"last, first has {first.grad}"))
    F.sum(F.tanh(first * 2.0) * last).backward()
    assert order == ["last, first has None", "first"]


def test_hooks_of_parameters_run_before_the_input_gradient() -> None:
    order: list[str] = []
    x, w, b = param(ones(1, 2)), param(ones(3, 2)), param(ones(3))
    for name, variable in (("x", x), ("w", w), ("b", b)):
        variable.register_grad_hook(lambda _, name=name: order.append(name))
    F.sum(F.linear(x, w, b)).backward()
    assert order == ["w", "b", "x"]


class TestBackwardEnd:
    def test_on_backward_end_runs_once_after_all_gradients(self) -> None:
        x, w = param(ones(1)), param(ones(1))
        calls: list[tuple[bool, bool]] = []
        hook = lambda _: on_backward_end(  # noqa: E731
            lambda completed: calls.append((completed, x.grad is not None))
        )
        w.register_grad_hook(hook)
        ((x * 2.0) * w).backward()
        assert calls == [(True, True)]
        w.clear_grad_hook()
        (x * w).backward()
        assert len(calls) == 1

    def test_on_backward_end_reports_a_failed_pass(self) -> None:
        first, last = param(ones(1)), param(ones(1))
        ends: list[bool] = []

        def explode(_: Variable) -> None:
            raise ZeroDivisionError("a hook")

        last.register_grad_hook(lambda _: on_backward_end(ends.append))
        first.register_grad_hook(explode)
        with pytest.raises(ZeroDivisionError, match="a hook"):
            (F.tanh(first) * last).backward()
        assert ends == [False]
        with pytest.raises(RuntimeError, match="no backward pass is running"):
            on_backward_end(ends.append)
        first.clear_grad_hook()
        first.zero_grad()
        last.zero_grad()
        (first * last).backward()
        assert ends == [False, True]
        np.testing.assert_array_equal(first.grad, [1])

    def test_backward_inside_a_hook_has_its_own_callbacks(self) -> None:
        x, inner = param(ones(1)), param(ones(1))
        calls: list[str] = []
        inner.register_grad_hook(lambda _: on_backward_end(lambda _: calls.append("inner")))

        def hook(_: Variable) -> None:
            on_backward_end(lambda _: calls.append("outer"))
            (inner * 1.0).backward()
            calls.append("hook done")

        x.register_grad_hook(hook)
        (x * 1.0).backward()
        assert calls == ["inner", "hook done", "outer"]

    def test_on_backward_end_is_local_to_a_thread(self) -> None:
        x = param(ones(1))
        refused: list[str] = []

        def elsewhere() -> None:
            try:
                on_backward_end(lambda _: None)
            except RuntimeError as error:
                refused.append(str(error))

        def hook(_: Variable) -> None:
            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()

        x.register_grad_hook(hook)
        (x * 1.0).backward()
        assert len(refused) == 1


def test_on_backward_end_calls_all_callbacks_if_one_raises() -> None:
    called = []

    def at_end(number: int, _: bool) -> None:
        called.append(number)
        if number == 3:
            raise ValueError("on purpose")

    def ask(_: Variable) -> None:
        for number in range(2000):
            on_backward_end(functools.partial(at_end, number))

    x = param(ones(2))
    x.register_grad_hook(ask)
    with pytest.raises(ValueError, match="on purpose"):
        F.sum(x * 2.0).backward()
    assert called == [*range(2000)]


def test_grad_buffer_may_be_a_view_of_a_larger_array() -> None:
    bucket = np.full(9, np.nan, "float32")
    w, b = param(ones(3, 2)), param(ones(3))
    w.grad_buffer, b.grad_buffer = bucket[:6].reshape(3, 2), bucket[6:]
    F.sum(F.linear(input(ones(2, 2)), w, b)).backward()
    assert w.grad is w.grad_buffer
    assert b.grad is b.grad_buffer
    np.testing.assert_array_equal(bucket, [2] * 9)


@for_each("shape", [(2,), ()])
def test_grad_buffer_accumulates_from_an_earlier_gradient_or_zero(shape: Any) -> None:
    x = param(ones(*shape))
    buffer = x.grad_buffer = np.full(shape, 7, "float32")
    held = x.grad = np.full(shape, 5, "float32")
    for expected in (6, 7):
        F.sum(x).backward()
        assert x.grad is buffer
        np.testing.assert_array_equal(buffer, np.full(shape, expected))
    np.testing.assert_array_equal(held, np.full(shape, 5))
    x.zero_grad()
    F.sum(x).backward()
    np.testing.assert_array_equal(buffer, np.ones(shape))


def test_grad_buffer_accumulates_a_shared_weight_in_place() -> None:
    w, same = (param(np.array([[1.0, 2.0], [3.0, 5.0]])) for _ in range(2))
    w.grad_buffer = np.empty((2, 2))
    for weight in (w, same):
        F.sum(F.linear(F.linear(input(np.ones((3, 2))), weight), weight)).backward()
    assert w.grad is w.grad_buffer
    np.testing.assert_array_equal(w.grad, same.grad)


def test_grad_buffer_may_be_strided_and_casts_gradients() -> None:
    w = param(ones(3, 2))
    w.grad_buffer = np.empty((2, 3), "float32").T
    F.sum(F.linear(input(ones(1, 2)), w)).backward()
    np.testing.assert_array_equal(w.grad, ones(3, 2))
    w.grad, w.grad_buffer = None, np.empty((3, 2), "float32")
    F.sum(F.linear(input(ones(1, 2, dtype="float64")), w)).backward()
    assert w.grad is w.grad_buffer
    np.testing.assert_array_equal(w.grad, ones(3, 2))


def test_linear_writes_weight_gradients_into_grad_buffer() -> None:
    w = param(ones(3, 2))
    buffer = w.grad_buffer = np.zeros((3, 2), "float32")
    _, vjp = F.linear(input(ones(1, 2)), w).node.edges[0]
    assert vjp(ones(1, 3)) is buffer


# Calls with a leaf of shape (2,), and their errors.
INVALID: list[tuple[Callable[[Variable], object], type[Exception], str]] = [
    (lambda x: setattr(x, "grad_buffer", np.empty(3, "float32")), ValueError, r"\(3,\)"),
    (lambda x: setattr(x, "grad_buffer", np.empty(2, "float64")), TypeError, "float64"),
    (lambda x: setattr(x, "grad_buffer", [0.0, 0.0]), TypeError, "list"),
    (lambda x: setattr(x, "grad_buffer", np.broadcast_to(np.float32(0), 2)), ValueError, "writ"),
    (lambda x: setattr(x * 2.0, "grad_buffer", ones(2)), ValueError, "leaf"),
    (lambda x: on_backward_end(3), TypeError, "callable, got int"),  # type: ignore[arg-type]
]


@for_each("call error words", INVALID)
def test_invalid_buffers_and_callbacks_raise(call: Any, error: Any, words: str) -> None:
    x = param(ones(2))
    with pytest.raises(error, match=words):
        call(x)
    assert x.grad_buffer is None
