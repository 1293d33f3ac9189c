"""Gradient hooks, gradients in user buffers, and callbacks at the end of a backward pass."""

import functools
import threading
from typing import Any

import numpy as np
import pytest

from flashlight_py.autograd import Variable, input, on_backward_end, param
from flashlight_py.autograd import functions as F
from flashlight_py.optim import clip_grad_norm
from tests.autograd.cases import ones
from tests.tables import for_each


def test_hook_runs_once_with_the_complete_gradient() -> None:
    x = param(ones(2))
    seen: list[np.ndarray] = []
    x.register_grad_hook(lambda v: seen.append(np.array(v.grad)))
    F.sum(x * 2.0 * x + x * 3.0 + x).backward()  # used at several depths
    assert len(seen) == 1
    np.testing.assert_array_equal(seen[0], [8, 8])


def test_hook_gets_the_leaf_and_can_replace_its_gradient() -> None:
    x = param(ones(2))

    def halve(variable: Variable) -> None:
        assert variable is x
        variable.grad = variable.grad / 2

    x.register_grad_hook(halve)
    F.sum(x).backward()
    np.testing.assert_array_equal(x.grad, [0.5, 0.5])


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


def test_register_grad_hook_replaces_and_clear_grad_hook_removes() -> None:
    x = param(ones(1))
    calls: list[str] = []
    x.register_grad_hook(lambda _: calls.append("old"))
    x.register_grad_hook(lambda _: calls.append("new"))
    (x * 1.0).backward()
    x.clear_grad_hook()
    (x * 1.0).backward()
    assert calls == ["new"]


def test_hook_of_an_unused_variable_is_not_called() -> None:
    used, unused = param(ones(1)), param(ones(1))
    unused.register_grad_hook(lambda _: pytest.fail("took no part"))
    (used * 1.0).backward()
    assert unused.grad is None


def test_backward_on_a_leaf_calls_its_hook() -> None:
    x = param(ones(1))
    seen: list[Variable] = []
    x.register_grad_hook(seen.append)
    x.backward()
    assert seen == [x]
    np.testing.assert_array_equal(x.grad, [1])


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

    def test_on_backward_end_can_set_gradients_of_unused_parameters(self) -> None:
        used, unused = param(ones(1)), param(ones(2))

        def fill(completed: bool) -> None:
            assert completed
            if unused.grad is None:
                unused.grad = np.zeros_like(unused.array)

        used.register_grad_hook(lambda _: on_backward_end(fill))
        (used * 1.0).backward()
        np.testing.assert_array_equal(unused.grad, [0, 0])

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

    def test_on_backward_end_raises_type_error_unless_callable(self) -> None:
        with pytest.raises(TypeError, match="callable, got int"):
            on_backward_end(3)  # type: ignore[arg-type]


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


def test_grad_buffer_is_overwritten_after_zero_grad() -> None:
    x = param(ones(2))
    buffer = x.grad_buffer = np.full(2, 7, "float32")
    for expected in (1, 2):
        F.sum(x).backward()
        np.testing.assert_array_equal(buffer, [expected] * 2)
    x.zero_grad()
    F.sum(x).backward()
    np.testing.assert_array_equal(buffer, [1, 1])


def test_grad_buffer_accumulates_a_shared_weight_in_place() -> None:
    w, same = (param(np.array([[1.0, 2.0], [3.0, 5.0]])) for _ in range(2))
    w.grad_buffer = np.empty((2, 2))
    for weight in (w, same):
        F.sum(F.linear(F.linear(input(np.ones((3, 2))), weight), weight)).backward()
    assert w.grad is w.grad_buffer
    np.testing.assert_array_equal(w.grad, same.grad)


def test_grad_buffer_includes_an_earlier_gradient() -> None:
    x = param(ones(2))
    x.grad_buffer = np.empty(2, "float32")
    held = x.grad = np.array([1, 2], "float32")
    F.sum(x).backward()
    assert x.grad is x.grad_buffer
    np.testing.assert_array_equal(x.grad, [2, 3])
    np.testing.assert_array_equal(held, [1, 2])


def test_grad_buffer_may_be_strided_and_casts_gradients() -> None:
    w = param(ones(3, 2))
    w.grad_buffer = np.empty((2, 3), "float32").T
    F.sum(F.linear(input(ones(1, 2)), w)).backward()
    np.testing.assert_array_equal(w.grad, ones(3, 2))
    w.grad, w.grad_buffer = None, np.empty((3, 2), "float32")
    F.sum(F.linear(input(ones(1, 2, dtype="float64")), w)).backward()
    assert w.grad is w.grad_buffer
    np.testing.assert_array_equal(w.grad, ones(3, 2))


def test_grad_buffer_may_have_no_dimensions() -> None:
    x = param(np.array(3.0))
    x.grad_buffer = np.empty(())
    (x * x * x).backward()
    assert x.grad is x.grad_buffer
    assert x.grad == 27.0


def test_linear_writes_weight_gradients_into_grad_buffer() -> None:
    w = param(ones(3, 2))
    buffer = w.grad_buffer = np.zeros((3, 2), "float32")
    result = F.linear(input(ones(1, 2)), w)
    _, vjp = result.node.edges[0]
    assert vjp(ones(1, 3)) is buffer


@for_each(
    "buffer error",
    [
        (np.empty(3, "float32"), ValueError),
        (np.empty(2, "float64"), TypeError),
        ([0.0, 0.0], TypeError),
        (np.broadcast_to(np.float32(0), 2), ValueError),
    ],
)
def test_grad_buffer_raises_for_invalid_arrays(buffer: Any, error: type[Exception]) -> None:
    x = param(ones(2))
    with pytest.raises(error):
        x.grad_buffer = buffer
    assert x.grad_buffer is None


def test_grad_buffer_raises_value_error_on_results() -> None:
    with pytest.raises(ValueError, match="leaf"):
        (param(ones(2)) * 2.0).grad_buffer = ones(2)
