"""The backward pass: order, memory, changed arrays, hooks and gradient buffers."""

import functools
import gc
import itertools
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.autograd import Variable, input, on_backward_end, param
from flashlight_py.autograd import functions as F
from flashlight_py.autograd.variable import record_in_order
from flashlight_py.optim import clip_grad_norm
from tests.autograd.cases import ones
from tests.tables import for_each

LONG = 10_000


def test_backward_of_a_chain_exceeds_the_recursion_limit() -> None:
    assert sys.getrecursionlimit() < LONG
    x = param(ones(3))
    y: Variable = x
    for _ in range(LONG):
        y = y + 1.0
    F.sum(y).backward()
    np.testing.assert_array_equal(x.grad, ones(3))


@pytest.mark.slow
def test_deleting_a_long_graph_does_not_overflow_the_stack() -> None:
    """A stack overflow kills the process, so the test uses another process with a small stack."""
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


def test_backward_visits_each_node_of_a_diamond_once() -> None:
    """If a node ran once per path, 30 stacked diamonds would run about a billion nodes."""
    x = param(ones(1, dtype="float64"))
    y: Variable = x
    for _ in range(30):
        y = y + y
    y.backward()
    assert x.grad[0] == 2.0**30


def noted(x: Variable, name: str, visits: list[str]) -> Variable:
    """Return ``2 * x``, an ordered operation that records the visit of a backward pass."""

    def vjp(grad: Any) -> Any:
        visits.append(name)
        return grad * 2

    return record_in_order(x.array * 2, (x, vjp))


@for_each("swapped", [False, True])
def test_ordered_nodes_are_visited_in_reverse_order(swapped: bool) -> None:
    visits: list[str] = []
    x = param(ones(2))
    a = noted(x, "a", visits)
    b = noted(x * 3.0, "b", visits)
    d = noted(b + noted(a, "c", visits), "d", visits)
    beside = noted(x, "beside", visits)
    noted(x, "not below the loss", visits)
    parts = [F.sum(d), F.exp(F.sum(beside)) * 0.0, F.sum(a)]
    total, *rest = reversed(parts) if swapped else parts
    for part in rest:
        total = total + part
    total.backward()
    assert visits == ["beside", "d", "c", "b", "a"]
    np.testing.assert_array_equal(x.grad, [22, 22])  # 2 * (3 * 2 + 2 * 2) + 2


def test_has_history_is_false_after_backward_frees_the_graph() -> None:
    x = param(ones(2))
    y = x * 2.0
    assert not x.has_history
    assert y.has_history
    F.sum(y).backward()
    assert not y.has_history
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        F.sum(y).backward()
    constant = input(ones(2)) * 2.0
    assert (constant.has_history, constant.calc_grad, constant.node) == (False, False, None)


@for_each(
    "operation",
    [
        lambda a, b: a - (-b),
        lambda a, b: F.reshape(a, (4,)) + F.flat(b),
        lambda a, b: F.transpose(a) + F.transpose(b),
        lambda a, b: (a + b) + (a + b),
        lambda a, b: a[:, ::-1] + b,
        lambda a, b: F.astype(a, "float32") + b,
        lambda a, b: F.sum(a, 0) + F.sum(b, 0),
        lambda a, b: F.mean(a) + F.mean(b),
        lambda a, b: F.linear(a, b, b[0]),
        # With one row, the bias gradient is a view of the incoming gradient and must be copied.
        lambda a, b: F.linear(input(ones(1, 2)), input(ones(2, 2)), a[0]) + b[:1],
    ],
)
def test_gradients_of_operations_share_no_memory(operation: Any) -> None:
    a, b = param(ones(2, 2)), param(ones(2, 2))
    result = operation(a, b)
    seed = np.ones_like(result.array)
    result.backward(seed)
    arrays = [a.grad, b.grad, a.array, b.array, result.array, seed]
    for one, other in itertools.combinations(arrays, 2):
        assert not np.shares_memory(one, other)
    assert a.grad.flags.writeable
    np.testing.assert_array_equal(seed, np.ones_like(seed))


def test_adding_to_a_gradient_keeps_equal_gradients() -> None:
    """An addition passes the same gradient array to both operands."""
    a, b = param(ones(2)), param(ones(2))
    one, twin = a * 1.0, b * 1.0
    ((one + twin) + one + one).backward(ones(2))
    np.testing.assert_array_equal(a.grad, [3, 3])
    np.testing.assert_array_equal(b.grad, [1, 1])


@for_each("retain_graph", [False, True])
def test_linear_relu_can_be_used_after_a_failed_pass(retain_graph: bool) -> None:
    weight, bias = param(np.array([[1.0], [-1.0]])), param(np.zeros(2))
    result, seed = F.linear_relu(input(np.array([[2.0]])), weight, bias), np.ones((1, 2))

    def fail(_: Variable) -> None:
        raise ArithmeticError

    weight.register_grad_hook(fail)
    with pytest.raises(ArithmeticError):
        result.backward(seed, retain_graph)
    weight.clear_grad_hook()
    weight.grad = None
    if retain_graph:
        result.backward(seed)
        np.testing.assert_array_equal(weight.grad, [[2], [0]])
    else:
        with pytest.raises(RuntimeError, match="freed by an earlier"):
            result.backward(seed)


def test_backward_frees_the_graph_during_the_pass() -> None:
    """When the hook of the first layer runs, the arrays of the last operation are freed."""
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


def test_graphs_have_no_reference_cycles() -> None:
    """Without cycles, graphs are freed without the garbage collector."""
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


def step(model: fl.nn.Module) -> None:
    for variable in model.params():
        variable.grad = np.ones(variable.shape)
    fl.optim.SGDOptimizer(model.params(), lr=0.5).step()
    for variable in model.params():
        variable.zero_grad()


def assign(model: fl.nn.Module) -> None:
    weight = model.params()[0]
    weight.array = weight.array + 1


def load(model: fl.nn.Module) -> None:
    model.load_state_dict({name: array + 1 for name, array in model.state_dict().items()})


def assign_and_toggle(model: fl.nn.Module) -> None:
    assign(model)
    for on in (False, True):
        model.params()[0].calc_grad = on


CHANGES = [step, assign, load]
LOSSES: dict[str, Callable[[fl.nn.Module, Variable], Variable]] = {
    "linear": lambda model, x: model(x),
    "relu": lambda model, x: F.relu(model.params()[0]),
    "recompute": lambda model, x: fl.recompute(model)(x),
    "exp": lambda model, x: F.exp(model.params()[0]),
    "mul": lambda model, x: model.params()[0] * model.params()[0],
    # Views of the parameter show the change, in every operation.
    "transpose": lambda model, x: x @ model.params()[0].T,
}


def made() -> tuple[fl.nn.Module, Variable]:
    return fl.nn.Sequential(fl.nn.Linear(2, 2)).astype(np.float64), param(np.ones((3, 2)))


@for_each("change", [*CHANGES, assign_and_toggle])
@for_each("name", LOSSES)
def test_backward_raises_if_the_package_changed_a_leaf(name: str, change: Any) -> None:
    model, x = made()
    loss, again = (LOSSES[name](model, x).sum() for _ in range(2))
    again.backward(retain_graph=True)
    for variable in (*model.params(), x):
        variable.zero_grad()
    change(model)
    for graph in (loss, again):
        with pytest.raises(RuntimeError, match=rf"was changed after {name}\(\) had used it"):
            graph.backward()
    assert all(variable.grad is None for variable in (*model.params(), x))
    LOSSES[name](model, x).sum().backward()  # a recomputed pass has no error
    assert model.params()[0].grad is not None


@for_each("function", [F.linear, F.linear_relu])
def test_backward_names_linear_if_its_weight_or_input_changed(function: Any) -> None:
    x, weight, bias = np.ones((3, 2)), np.ones((2, 2)), np.ones(2)
    for learns in range(3):
        args = [fl.input(variable) for variable in (x, weight, bias)]
        args[learns].calc_grad = True
        loss = function(*args).sum()
        args[learns].array = args[learns].array + 1
        with pytest.raises(RuntimeError, match=r"was changed after linear\(\) had used it"):
            loss.backward()


@for_each("change", CHANGES)
def test_backward_works_if_the_graph_lacks_the_changed_leaf(change: Any) -> None:
    (model, x), (other, _) = made(), made()
    change(other)
    loss = model(x).sum()
    change(other)
    loss.backward(retain_graph=True)
    loss.backward()
    np.testing.assert_array_equal(model.params()[1].grad, [6, 6])  # sum of both passes


def test_result_that_became_a_leaf_can_change_and_train() -> None:
    made_of_data = Variable(np.ones(2)) * 2.0
    made_of_data.calc_grad = True
    made_of_data.array = np.full(2, 3.0)
    F.sum(made_of_data * made_of_data).backward()
    np.testing.assert_array_equal(made_of_data.grad, [6, 6])


def test_parameter_without_gradient_is_not_marked_as_changed() -> None:
    model, x = made()
    loss = model(x).sum()
    fl.optim.SGDOptimizer(model.params(), lr=0.5).step()
    loss.backward()
    assert model.params()[0].grad is not None


TABLE, LOGS = np.arange(12.0).reshape(4, 3), np.log(np.full((2, 3, 4), 0.25))
INTEGERS: dict[str, tuple[Any, Callable[[Any, Any], Variable], Any]] = {
    "embedding": (TABLE, F.embedding, [1, 3, 1]),
    "gather": (TABLE, lambda x, index: F.gather(x, index, 0), [[1, 3, 1]]),
    "scatter_add": (TABLE, lambda x, index: F.scatter_add(x, index, x[:1] * 2, 0), [[1, 3, 1]]),
    "index": (TABLE, lambda x, index: x[index], [1, 3, 1]),
    "index by a tuple": (TABLE, lambda x, index: x[:, index], [1, 2, 1]),
    "labels": (TABLE, F.categorical_cross_entropy, [1, 2, 1, 0]),
    "targets": (LOGS, F.connectionist_temporal_classification, [[1, 2], [3, 1]]),
    "input lengths": (LOGS,
        lambda x, lengths: F.connectionist_temporal_classification(x, TARGETS, lengths), [2, 3]),
    "target lengths": (
        LOGS,
        lambda x, lengths: F.connectionist_temporal_classification(x, TARGETS, None, lengths),
        [1, 2],
    ),
}  # fmt: skip
TARGETS = np.array([[1, 2], [3, 1]])


@for_each("value", [0, 2, 4, 10**7, -(10**7)])
@for_each("name", INTEGERS)
def test_gradients_use_copies_of_integer_inputs(name: str, value: int) -> None:
    array, function, values = INTEGERS[name]
    gradients = []
    for is_refilled in (False, True):
        x, integers = param(array.copy()), np.array(values)
        loss = (function(x, integers) ** 2).sum()
        if is_refilled:
            integers[...] = value
        loss.backward()
        gradients.append(x.grad)
    np.testing.assert_array_equal(*gradients)


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
