"""The backward pass: order, ownership, freeing, hooks, end callbacks."""

from __future__ import annotations

import gc
import itertools
import subprocess
import sys
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from flashlight_py.autograd import Variable, input, on_backward_end, param
from flashlight_py.autograd import functions as F

LONG = 10_000


def ones(*shape: int, dtype: Any = "float32") -> np.ndarray:
    return np.ones(shape, dtype)


def test_chain_longer_than_the_recursion_limit() -> None:
    assert sys.getrecursionlimit() < LONG
    x = param(ones(3))
    y: Variable = x
    for _ in range(LONG):
        y = y + 1.0
    F.sum(y).backward()
    np.testing.assert_array_equal(x.grad, ones(3))


def test_dropping_a_very_long_graph_does_not_overflow_the_stack() -> None:
    """A stack overflow kills the process, so it happens in one of its own, on a small stack."""
    program = (
        "import threading, numpy as np\n"
        "from flashlight_py.autograd import param\n"
        "def build():\n"
        "    y = param(np.ones(1))\n"
        "    for _ in range(200_000): y = y * 1.0\n"
        "    del y\n"
        "threading.stack_size(512 * 1024)\n"
        "thread = threading.Thread(target=build); thread.start(); thread.join()\n"
        "print('alive')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "alive", done.stderr


def test_diamond_visits_each_node_once() -> None:
    """Without counting consumers, 30 stacked diamonds would be a billion paths."""
    x = param(ones(1, dtype="float64"))
    y: Variable = x
    for _ in range(30):
        y = y + y
    y.backward()
    assert x.grad is not None
    assert x.grad[0] == 2.0**30


def test_consumer_outside_the_loss_does_not_hold_the_pass_up() -> None:
    x = param(ones(2))
    hidden = x * 3.0
    unused = hidden * 2.0
    F.sum(hidden).backward()
    np.testing.assert_array_equal(x.grad, [3, 3])
    assert unused.shape == (2,)


def test_gradients_accumulate_over_passes() -> None:
    x = param(ones(2))
    for _ in range(3):
        F.sum(x * 2.0).backward()
    np.testing.assert_array_equal(x.grad, [6, 6])
    x.zero_grad()
    assert x.grad is None


@pytest.mark.parametrize(
    "operation",
    [
        lambda a, b: a + b,
        lambda a, b: a - (-b),
        lambda a, b: F.concatenate([a, b]),
        lambda a, b: F.reshape(a, (4,)) + F.flat(b),
        lambda a, b: F.transpose(a) + F.transpose(b),
        lambda a, b: (a + b) + (a + b),
        lambda a, b: a[:, ::-1] + b,
        lambda a, b: F.astype(a, "float32") + b,
        lambda a, b: F.sum(a, 0) + F.sum(b, 0),
        lambda a, b: F.mean(a) + F.mean(b),
        F.linear,
        lambda a, b: F.linear(a, b, b[0]),
        lambda a, b: a @ b,
        F.mean_squared_error,
        lambda a, b: F.exp(a) + F.sqrt(b),
    ],
)
def test_gradients_share_no_memory(operation: Any) -> None:
    """Reducing one gradient in place must change no other array."""
    a, b = param(ones(2, 2)), param(ones(2, 2))
    result = operation(a, b)
    seed = np.ones_like(result.array)
    result.backward(seed)
    arrays = [a.grad, b.grad, a.array, b.array, result.array, seed]
    for one, other in itertools.combinations(arrays, 2):
        assert not np.shares_memory(one, other)
    assert a.grad is not None
    assert a.grad.flags.writeable


def test_one_row_through_linear_shares_no_memory() -> None:
    """With one row the bias gradient is a view of the incoming gradient, so it must be copied."""
    x, w, b = param(ones(1, 2)), param(ones(3, 2)), param(ones(3))
    other = param(ones(1, 3))
    (F.linear(x, w, b) + other).backward(ones(1, 3))
    assert not np.shares_memory(b.grad, other.grad)
    np.testing.assert_array_equal(b.grad, [1, 1, 1])


def test_seed_is_not_changed() -> None:
    x = param(ones(2))
    seed = np.array([1, 2], "float32")
    (x + x).backward(seed)
    np.testing.assert_array_equal(seed, [1, 2])
    np.testing.assert_array_equal(x.grad, [2, 4])


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_dtype_survives_every_operation(dtype: str) -> None:
    x = param(np.full((2, 3), 0.5, dtype))
    y = (
        F.log_softmax(F.tanh(x * 2 + 1.5) / 3 - 0.25, -1) ** 2
        + F.mean(x) * F.var(x)
        + np.float64(2)
    )
    y = F.relu(F.clamp(y, 0.0, 9.0)) + F.maximum(x, 0.1) + F.sigmoid(x) + F.sqrt(abs(x))
    loss = F.mean(y)
    assert loss.dtype == dtype
    loss.backward()
    assert x.grad is not None
    assert x.grad.dtype == dtype


def test_mixed_dtypes_give_each_input_its_own() -> None:
    a, b = param(ones(2, dtype="float32")), param(ones(2, dtype="float64"))
    F.sum(a * b).backward()
    assert a.grad is not None
    assert b.grad is not None
    assert (a.grad.dtype, b.grad.dtype) == ("float32", "float64")


@pytest.mark.parametrize(
    ("left", "right"), [((3,), (2, 3)), ((2, 1), (1, 3)), ((), (2, 3)), ((1, 3), (0, 3))]
)
def test_broadcast_dimensions_are_summed_away(left: Any, right: Any) -> None:
    a, b = param(np.ones(left)), param(np.ones(right))
    result = a * b
    result.backward(np.ones(result.shape))
    for variable in (a, b):
        assert variable.grad is not None
        assert variable.grad.shape == variable.shape
        np.testing.assert_array_equal(variable.grad, result.size / variable.size if b.size else 0)


def test_gradient_of_a_variable_without_dimensions_is_an_array() -> None:
    x = param(np.array(2.0))
    (x * x).backward()
    assert isinstance(x.grad, np.ndarray)
    assert x.grad == 4.0


def test_second_backward_says_that_the_graph_was_freed() -> None:
    x = param(ones(1))
    y = x * 2.0
    y.backward()
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        y.backward()


def test_retained_graph_gives_the_same_gradient_again() -> None:
    x = param(ones(1))
    y = (x * 2.0) * (x + 1.0)
    y.backward(retain_graph=True)
    first = np.array(x.grad)
    x.zero_grad()
    y.backward()
    np.testing.assert_array_equal(x.grad, first)


def test_graph_is_freed_as_the_pass_goes() -> None:
    """When the first layer's hook fires, what the last operation saved is gone already."""
    x, w = param(ones(2)), param(ones(2))

    class Saved(np.ndarray):
        pass

    saved = ones(2).view(Saved)
    alive = weakref.ref(saved)
    y = (x * 2.0) * input(saved)
    del saved
    loss = F.sum(y + w)
    del y
    seen: list[bool] = []
    x.register_grad_hook(lambda _: seen.append(alive() is None))
    loss.backward()
    assert seen == [True]


def test_no_reference_cycles() -> None:
    """Graphs are freed by reference counts; arrays need not wait for the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        x = param(ones(2))
        y = F.relu(F.linear(F.reshape(x, (1, 2)), param(ones(3, 2)), param(ones(3))))
        node = weakref.ref(y)
        F.mean_squared_error(y, input(ones(1, 3))).backward()
        del y
        assert node() is None
    finally:
        gc.enable()


def test_inputs_without_gradient_cost_nothing() -> None:
    result = input(ones(2)) * input(ones(2))
    assert not result.calc_grad
    assert result.node is None


class TestHooks:
    def test_fires_once_with_the_whole_gradient(self) -> None:
        x = param(ones(2))
        seen: list[np.ndarray] = []
        x.register_grad_hook(lambda v: seen.append(np.array(v.grad)))
        F.sum(x * 2.0 + x * 3.0 + x).backward()
        assert len(seen) == 1
        np.testing.assert_array_equal(seen[0], [6, 6])

    def test_gets_the_leaf_and_may_replace_its_gradient(self) -> None:
        x = param(ones(2))

        def halve(variable: Variable) -> None:
            assert variable is x
            assert variable.grad is not None
            variable.grad = variable.grad / 2

        x.register_grad_hook(halve)
        F.sum(x).backward()
        np.testing.assert_array_equal(x.grad, [0.5, 0.5])

    def test_last_layer_fires_first_and_before_the_pass_reaches_the_first(self) -> None:
        order: list[str] = []
        first, last = param(ones(2)), param(ones(2))
        first.register_grad_hook(lambda _: order.append("first"))
        last.register_grad_hook(lambda v: order.append(f"last, first has {first.grad}"))
        F.sum(F.tanh(first * 2.0) * last).backward()
        assert order == ["last, first has None", "first"]

    def test_weight_and_bias_fire_before_the_gradient_of_the_layer_input(self) -> None:
        order: list[str] = []
        x, w, b = param(ones(1, 2)), param(ones(3, 2)), param(ones(3))
        for name, variable in (("x", x), ("w", w), ("b", b)):
            variable.register_grad_hook(lambda _, name=name: order.append(name))
        F.sum(F.linear(x, w, b)).backward()
        assert order == ["w", "b", "x"]

    def test_shared_weight_waits_for_its_last_consumer(self) -> None:
        w = param(np.full((2, 2), 0.5))
        seen: list[np.ndarray] = []
        w.register_grad_hook(lambda v: seen.append(np.array(v.grad)))
        F.sum(F.linear(F.linear(input(np.ones((1, 2))), w), w)).backward()
        assert len(seen) == 1
        np.testing.assert_array_equal(seen[0], w.grad)

    def test_registering_replaces_and_clearing_removes(self) -> None:
        x = param(ones(1))
        calls: list[str] = []
        x.register_grad_hook(lambda _: calls.append("old"))
        x.register_grad_hook(lambda _: calls.append("new"))
        (x * 1.0).backward()
        x.clear_grad_hook()
        (x * 1.0).backward()
        assert calls == ["new"]

    def test_unused_variable_is_not_called(self) -> None:
        used, unused = param(ones(1)), param(ones(1))
        unused.register_grad_hook(lambda _: pytest.fail("took no part"))
        (used * 1.0).backward()
        assert unused.grad is None

    def test_backward_on_a_leaf_itself(self) -> None:
        x = param(ones(1))
        seen: list[Variable] = []
        x.register_grad_hook(seen.append)
        x.backward()
        assert seen == [x]
        np.testing.assert_array_equal(x.grad, [1])


class TestBackwardEnd:
    def test_runs_once_after_every_gradient(self) -> None:
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

    def test_may_give_an_unused_parameter_zeros(self) -> None:
        used, unused = param(ones(1)), param(ones(2))

        def fill(completed: bool) -> None:
            assert completed
            if unused.grad is None:
                unused.grad = np.zeros_like(unused.array)

        used.register_grad_hook(lambda _: on_backward_end(fill))
        (used * 1.0).backward()
        np.testing.assert_array_equal(unused.grad, [0, 0])

    def test_runs_in_order_and_all_of_them_even_if_one_raises(self) -> None:
        x = param(ones(1))
        calls: list[str] = []

        def fail(completed: bool) -> None:
            calls.append("fails")
            raise OSError("peer lost")

        def hook(_: Variable) -> None:
            on_backward_end(fail)
            on_backward_end(lambda _: calls.append("after"))

        x.register_grad_hook(hook)
        with pytest.raises(OSError, match="peer lost"):
            (x * 1.0).backward()
        assert calls == ["fails", "after"]

    def test_is_told_of_a_pass_that_raised_and_nothing_leaks_into_the_next(self) -> None:
        first, last = param(ones(1)), param(ones(1))
        ends: list[bool] = []

        def explode(_: Variable) -> None:
            raise ZeroDivisionError("a hook")

        last.register_grad_hook(lambda _: on_backward_end(ends.append))
        first.register_grad_hook(explode)
        with pytest.raises(ZeroDivisionError, match="a hook"):
            (F.tanh(first) * last).backward()
        assert ends == [False]
        with pytest.raises(RuntimeError, match="outside a backward pass"):
            on_backward_end(ends.append)
        first.clear_grad_hook()
        first.zero_grad()
        last.zero_grad()
        (first * last).backward()
        assert ends == [False, True]
        np.testing.assert_array_equal(first.grad, [1])

    def test_backward_inside_a_hook_is_a_pass_of_its_own(self) -> None:
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

    def test_other_threads_have_passes_of_their_own(self) -> None:
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

    def test_needs_a_callable(self) -> None:
        with pytest.raises(TypeError, match="callable, got int"):
            on_backward_end(3)  # type: ignore[arg-type]


class TestGradBuffer:
    def test_gradient_is_the_buffer_and_ends_up_in_the_larger_array(self) -> None:
        bucket = np.full(9, np.nan, "float32")
        w, b = param(ones(3, 2)), param(ones(3))
        w.grad_buffer, b.grad_buffer = bucket[:6].reshape(3, 2), bucket[6:]
        F.sum(F.linear(input(ones(2, 2)), w, b)).backward()
        assert w.grad is w.grad_buffer
        assert b.grad is b.grad_buffer
        np.testing.assert_array_equal(bucket, [2] * 9)

    def test_next_pass_overwrites_after_zero_grad_and_adds_without(self) -> None:
        x = param(ones(2))
        buffer = x.grad_buffer = np.full(2, 7, "float32")
        for expected in (1, 2):
            F.sum(x).backward()
            np.testing.assert_array_equal(buffer, [expected] * 2)
        x.zero_grad()
        F.sum(x).backward()
        np.testing.assert_array_equal(buffer, [1, 1])

    def test_shared_weight_adds_in_place(self) -> None:
        w, same = param(np.full((2, 2), 0.5)), param(np.full((2, 2), 0.5))
        w.grad_buffer = np.empty((2, 2))
        for weight in (w, same):
            F.sum(F.linear(F.linear(input(np.ones((3, 2))), weight), weight)).backward()
        assert w.grad is w.grad_buffer
        np.testing.assert_array_equal(w.grad, same.grad)

    def test_gradient_assigned_before_is_carried_into_the_buffer(self) -> None:
        x = param(ones(2))
        x.grad_buffer = np.empty(2, "float32")
        held = x.grad = np.array([1, 2], "float32")
        F.sum(x).backward()
        assert x.grad is x.grad_buffer
        np.testing.assert_array_equal(x.grad, [2, 3])
        np.testing.assert_array_equal(held, [1, 2])

    def test_strided_buffer_and_other_dtypes_of_the_graph(self) -> None:
        w = param(ones(3, 2))
        w.grad_buffer = np.empty((2, 3), "float32").T
        F.sum(F.linear(input(ones(1, 2)), w)).backward()
        np.testing.assert_array_equal(w.grad, ones(3, 2))
        w.grad, w.grad_buffer = None, np.empty((3, 2), "float32")
        F.sum(F.linear(input(ones(1, 2, dtype="float64")), w)).backward()
        assert w.grad is w.grad_buffer
        np.testing.assert_array_equal(w.grad, ones(3, 2))

    def test_without_dimensions(self) -> None:
        x = param(np.array(3.0))
        x.grad_buffer = np.empty(())
        (x * x * x).backward()
        assert x.grad is x.grad_buffer
        assert x.grad == 27.0

    def test_matrix_product_writes_into_it_without_a_temporary(self) -> None:
        """The product's own output is the buffer: no second array of the weight's size exists."""
        w = param(ones(3, 2))
        buffer = w.grad_buffer = np.zeros((3, 2), "float32")
        result = F.linear(input(ones(1, 2)), w)
        assert result.node is not None
        assert result.node.edges is not None
        _, vjp = result.node.edges[0]
        assert vjp(ones(1, 3)) is buffer

    @pytest.mark.parametrize(
        ("buffer", "error"),
        [
            (np.empty(3, "float32"), ValueError),
            (np.empty(2, "float64"), TypeError),
            ([0.0, 0.0], TypeError),
            (np.broadcast_to(np.float32(0), 2), ValueError),
        ],
    )
    def test_wrong_buffer_is_refused(self, buffer: Any, error: type[Exception]) -> None:
        x = param(ones(2))
        with pytest.raises(error):
            x.grad_buffer = buffer
        assert x.grad_buffer is None

    def test_results_have_none(self) -> None:
        with pytest.raises(ValueError, match="leaf"):
            (param(ones(2)) * 2.0).grad_buffer = ones(2)
