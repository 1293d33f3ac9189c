"""Optimizers and gradient clipping: rules against NumPy and torch, state, wrong arguments."""

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flashlight_py import optim
from flashlight_py.autograd import Variable, param
from flashlight_py.nn import Linear
from flashlight_py.optim import SGDOptimizer, clip_grad_norm, clip_grad_value
from flashlight_py.structure import Structured
from tests.nn.oracle import Oracle
from tests.tables import for_each
from tests.tape.steps import compare, training

Make = Callable[[list[Variable]], optim.FirstOrderOptimizer]

SETTINGS: list[tuple[str, Make, str, dict[str, Any]]] = [
    ("sgd", lambda p: optim.SGDOptimizer(p, 0.1), "SGD", {"lr": 0.1}),
    ("momentum", lambda p: optim.SGDOptimizer(p, 0.1, 0.9), "SGD", {"lr": 0.1, "momentum": 0.9}),
    ("decay", lambda p: optim.SGDOptimizer(p, 0.1, 0, 0.2), "SGD",
        {"lr": 0.1, "weight_decay": 0.2}),
    ("nesterov", lambda p: optim.SGDOptimizer(p, 0.1, 0.9, 0.2, True), "SGD",
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.2, "nesterov": True}),
    ("adam", lambda p: optim.AdamOptimizer(p, 0.1), "Adam", {"lr": 0.1}),
    ("adam_coupled",
        lambda p: optim.AdamOptimizer(p, 0.1, 0.8, 0.9, 1e-3, 0.2, decoupled=False), "Adam",
        {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.2}),
    ("adam_decoupled", lambda p: optim.AdamOptimizer(p, 0.1, weight_decay=0.2), "AdamW",
        {"lr": 0.1, "weight_decay": 0.2}),
    ("adagrad", lambda p: optim.AdagradOptimizer(p, 0.1), "Adagrad", {"lr": 0.1, "eps": 1e-8}),
    ("rmsprop", lambda p: optim.RMSPropOptimizer(p, 0.1, 0.8), "RMSprop",
        {"lr": 0.1, "alpha": 0.8}),
    ("centered", lambda p: optim.RMSPropOptimizer(p, 0.1, 0.8, use_first=True), "RMSprop",
        {"lr": 0.1, "alpha": 0.8, "centered": True}),
    ("adadelta", lambda p: optim.AdadeltaOptimizer(p, 0.5), "Adadelta", {"lr": 0.5, "eps": 1e-8}),
]  # fmt: skip
# Rules that torch lacks, or defines differently.
OTHERS: dict[str, Make] = {
    "amsgrad": lambda p: optim.AMSgradOptimizer(p, 0.1, 0.8, 0.9),
    "novograd": lambda p: optim.NovogradOptimizer(p, 0.1, 0.8, 0.9, weight_decay=0.1),
}
EVERY = {**{setting[0]: setting[1] for setting in SETTINGS}, **OTHERS}
# Rules with weight decay even at a rate of 0.
DECAYING: dict[str, Make] = {
    "amsgrad_decay": lambda p: optim.AMSgradOptimizer(p, 0.1, 0.8, 0.9, weight_decay=0.1),
    "adagrad_decay": lambda p: optim.AdagradOptimizer(p, 0.1, weight_decay=0.1),
    "rmsprop_decay": lambda p: optim.RMSPropOptimizer(p, 0.1, weight_decay=0.1),
    "adadelta_decay": lambda p: optim.AdadeltaOptimizer(p, weight_decay=0.1),
}
RULES = EVERY | DECAYING
MAKES = for_each("make", EVERY.values(), EVERY)


def parameters(dtype: str = "float64") -> list[Variable]:
    return [param(np.arange(1.0, 7.0).reshape(2, 3).astype(dtype)), param(np.array([-1.0], dtype))]


def gradients(number: int) -> list[np.ndarray]:
    return [np.cos(np.arange(6.0) + number).reshape(2, 3), np.array([0.5 - number])]


def step(optimizer: Any, number: int) -> None:
    for variable, grad in zip(optimizer.params, gradients(number), strict=True):
        variable.grad = grad.astype(variable.dtype)
    optimizer.step()


def run(make: Make, steps: int, dtype: str = "float64") -> list[Variable]:
    variables = parameters(dtype)
    optimizer = make(variables)
    for number in range(steps):
        step(optimizer, number)
    return variables


TORCH = """
tensors = [a.clone().requires_grad_(), b.clone().requires_grad_()]
optimizer = getattr(torch.optim, name)(tensors, **options)
for grads in zip(c, d):
    for tensor, grad in zip(tensors, grads):
        tensor.grad = grad
    optimizer.step()
y = torch.cat([tensor.detach().ravel() for tensor in tensors])
"""


@for_each("make name options", [item[1:] for item in SETTINGS])
def test_steps_equal_torch(make: Make, name: str, options: Any, oracle: Oracle) -> None:
    a, b = (v.array for v in parameters())
    c, d = (np.stack(grads) for grads in zip(*map(gradients, range(5)), strict=True))
    expected = oracle(TORCH, a=a, b=b, c=c, d=d, name=name, options=options)["y"]
    ours = np.concatenate([v.array.ravel() for v in run(make, 5)])
    np.testing.assert_allclose(ours, expected, rtol=1e-12)


def test_amsgrad_step_equals_its_formula() -> None:
    (variable, _) = run(DECAYING["amsgrad_decay"], 4)
    mean, square, largest = np.zeros((3, 2, 3))
    expected = parameters()[0].array
    for number in range(4):
        grad = gradients(number)[0]
        mean = 0.8 * mean + 0.2 * grad
        square = 0.9 * square + 0.1 * grad**2
        largest = np.maximum(largest, square)
        expected = 0.9 * expected - 0.1 * mean / (np.sqrt(largest) + 1e-8)
    np.testing.assert_allclose(variable.array, expected, rtol=1e-13)


def test_novograd_step_equals_its_formula() -> None:
    (variable, _), (mean, norm) = run(OTHERS["novograd"], 4), (np.zeros((2, 3)), 0.0)
    expected = parameters()[0].array
    for number in range(4):
        grad = gradients(number)[0]
        norm = 0.9 * norm + 0.1 * np.sum(grad**2)
        mean = 0.8 * mean + 0.2 * (grad / (np.sqrt(norm) + 1e-8) + 0.1 * expected)
        expected = expected - 0.1 * mean
    np.testing.assert_allclose(variable.array, expected, rtol=1e-13)


# In the first rule, the mean square minus the squared mean may be negative by rounding.
@for_each(
    "make grad",
    [
        (lambda p: optim.RMSPropOptimizer(p, 1e-3, 0.5, use_first=True), [0.1, 0.3, 0.7]),
        (lambda p: optim.NovogradOptimizer(p, 0.1, eps=0), [0, 0, 0]),
    ],
)
def test_steps_of_constant_gradients_are_finite(make: Make, grad: list[float]) -> None:
    variable = param(np.ones(3, "float32"))
    optimizer = make([variable])
    for _ in range(60):
        variable.grad = np.array(grad, "float32")
        optimizer.step()
    assert np.isfinite(variable.array).all()
    assert any(grad) or (variable.array == 1).all()


@MAKES
def test_step_changes_arrays_of_parameters_with_gradients_in_place(make: Make) -> None:
    variables, before = parameters("float32"), parameters("float32")
    optimizer, (array, other) = make(variables), (v.array for v in variables)
    variables[0].grad = grad = gradients(0)[0].astype("float32")
    optimizer.step()
    assert variables[0].array is array
    assert array.dtype == "float32"
    assert (array != before[0].array).any()
    np.testing.assert_array_equal(grad, gradients(0)[0].astype("float32"))
    assert other == before[1].array
    variables[0].array, array = before[0].array, array.copy()
    optimizer.lr = 0
    optimizer.step()
    np.testing.assert_array_equal(variables[0].array, parameters("float32")[0].array)
    optimizer.lr = 0.1
    optimizer.step()
    assert (before[0].array != parameters("float32")[0].array).any()  # assigned between steps


@MAKES
def test_state_dict_resumes_in_another_optimizer(make: Make) -> None:
    straight = run(make, 4)
    variables = run(make, 0)
    first = make(variables)
    for number in range(4):
        step(first, number)
        second = make(variables)
        second.lr = 3
        second.load_state_dict(first.state_dict())
        first = second
    for ours, expected in zip(variables, straight, strict=True):
        np.testing.assert_array_equal(ours.array, expected.array)


def test_load_state_dict_copies_arrays() -> None:
    variables = parameters()
    first, second = (optim.SGDOptimizer(variables, 0.1, 0.9) for _ in range(2))
    second.load_state_dict(first.state_dict())
    velocities = (o.state_dict()["velocity"][0] for o in (first, second))
    assert not np.shares_memory(*velocities)


def test_state_dict_has_python_numbers() -> None:
    variables = run(OTHERS["novograd"], 0)
    for make, name, kind in (
        (optim.AdamOptimizer, "steps", int),
        (optim.NovogradOptimizer, "square_norms", float),
    ):
        optimizer = make(variables, 0.1)
        variables[0].grad = np.ones((2, 3))
        optimizer.step()
        state = optimizer.state_dict()
        assert [type(number) for number in (state["lr"], *state[name])] == [float, kind, kind]
        for wrong in ("many", "3", None, True, *((-1, 3.7, 1 << 70) if kind is int else ())):
            with pytest.raises(ValueError, match=f"'{name}' of parameter 1 must be a .*number"):
                optimizer.load_state_dict({**state, "lr": 3.0, name: [9, wrong]})
        assert (optimizer.lr, optimizer.state_dict()[name]) == (0.1, state[name])


class Own(optim.FirstOrderOptimizer):
    """An optimizer whose attributes have names of built-in optimizers."""

    def __init__(self, params: Any) -> None:
        self.lr = 0.5
        super().__init__(params, self.lr)
        self._steps: Any = {"all": 0}
        self.first = self.params[0].array

    def step(self) -> None:
        self._steps["all"] += 1


def test_user_defined_optimizer_keeps_its_attributes() -> None:
    optimizer = Own(parameters())
    optimizer.step()
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        copied.step()
        assert (copied._steps, copied.lr, copied.first is copied.params[0].array) == (
            {"all": 2},
            0.5,
            True,
        )
    assert (optimizer._steps, copy.copy(optimizer).first is optimizer.first) == ({"all": 1}, True)


@MAKES
def test_copies_and_pickles_resume_like_the_original(make: Make) -> None:
    optimizer = make(parameters())
    for number in range(3):
        copies = [copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
        for copy_ in (optimizer, *copies):
            copy_.lr = copy_.lr / 2
            step(copy_, number)
        for copy_ in copies:
            assert copy_.state_dict().keys() == optimizer.state_dict().keys()
            for ours, expected in zip(copy_.params, optimizer.params, strict=True):
                np.testing.assert_array_equal(ours.array, expected.array)


def test_shallow_copy_has_its_own_rate() -> None:
    optimizer = optim.SGDOptimizer(parameters(), 0.1)
    copied = copy.copy(optimizer)
    copied.lr = 0.2
    copied._steps += 1
    assert (optimizer.lr, optimizer._steps.sum()) == (0.1, 0)


@MAKES
def test_steps_and_rates_change_no_structure(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, names = make(parameters()), []
    set_attribute = Structured.__setattr__

    def note(self: Structured, name: str, value: object) -> None:
        names.append(name)
        set_attribute(self, name, value)

    monkeypatch.setattr(Structured, "__setattr__", note)
    step(optimizer, 0)
    optimizer.lr = 0.2
    optimizer.zero_grad()
    assert not names
    optimizer.weight_decay = 0.1  # type: ignore[attr-defined]
    assert names == ["weight_decay"]


@for_each(
    "state match",
    [
        ({"lr": 0.1}, r"expected the entries \['lr', 'velocity'\], got \['lr'\]"),
        ({"lr": 0.1, "velocity": [np.zeros((2, 3))]}, "of 2 parameters, got 1"),
        ({"lr": 0.1, "velocity": [np.zeros((2, 3)), np.zeros(4)]}, r"parameter 1 .* got \(4,\)"),
        ({"lr": 0.1, "velocity": [np.ones((2, 3)), None]}, "parameter 1 .* got None"),
        ({"lr": -1.0, "velocity": [np.ones((2, 3)), np.ones(1)]}, "lr must be at least 0"),
    ],
)
def test_load_state_dict_changes_nothing_if_invalid(state: dict[str, Any], match: str) -> None:
    optimizer = optim.SGDOptimizer(parameters(), 0.1, 0.9)
    with pytest.raises(ValueError, match=match):
        optimizer.load_state_dict(state)
    assert not optimizer.state_dict()["velocity"][0].any()
    assert optimizer.lr == 0.1


ONE = [param(np.ones(1))]
# Optimizers and rates with wrong arguments.
INVALID: list[tuple[Callable[[], Any], type[Exception], str]] = [
    *[(lambda make=make, args=args: make(*args), error, words)
        for make in (optim.SGDOptimizer, optim.AdamOptimizer)
        for args, error, words in (
            (([], 0.1), ValueError, "at least one parameter"),
            (([1.0], 0.1), TypeError, "got float in it"),
            ((Linear(1, 1), 0.1), TypeError, r"got Linear. Pass module.params\(\)"),
            ((ONE[0], 0.1), TypeError, "got Variable"),
            ((ONE * 2, 0.1), ValueError, "twice"),
            ((ONE, -0.1), ValueError, "lr must be at least 0, got -0.1"),
            ((ONE, float("nan")), ValueError, "got nan"),
            ((ONE, None), TypeError, "got NoneType"),
        )],
    *[(lambda make=make, options=options: make(ONE, **options), ValueError, words)
        for make, options, words in (
            (optim.SGDOptimizer, {"lr": 0.1, "momentum": -1}, "momentum must be at least 0"),
            (optim.SGDOptimizer, {"lr": 0.1, "weight_decay": -1}, "weight_decay must be at least"),
            (optim.SGDOptimizer, {"lr": 0.1, "nesterov": True}, "momentum must be above 0"),
            (optim.AdamOptimizer, {"lr": 0.1, "beta1": 1}, "beta1 must be below 1"),
            (optim.AdamOptimizer, {"lr": 0.1, "beta2": -0.1}, "beta2 must be at least 0"),
            (optim.AdamOptimizer, {"lr": 0.1, "eps": -1}, "eps must be at least 0"),
            (optim.AdamOptimizer, {"lr": 0.1, "weight_decay": -1}, "weight_decay must be at least"),
            (optim.AdadeltaOptimizer, {"eps": 0}, "eps must be above 0"),
            (optim.RMSPropOptimizer, {"lr": 0.1, "rho": 1}, "rho must be below 1"),
        )],
    (lambda: setattr(optim.SGDOptimizer(ONE, 0.1), "lr", -1), ValueError, "lr must .*, got -1"),
    (lambda: setattr(optim.SGDOptimizer(ONE, 0.1), "lr", "0.1"), TypeError, "number, got str"),
]  # fmt: skip


@for_each("call error words", INVALID)
def test_optimizers_raise_for_invalid_arguments(call: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        call()


def test_adam_stores_means_of_float16_in_float32() -> None:
    """In float16, eps and squares of small gradients are 0, so that steps would be inf or nan."""
    results = []
    for dtype in ("float16", "float64"):
        variable = param(np.ones(3, dtype))
        optimizer = optim.AdamOptimizer([variable], 0.1)
        for _ in range(3):
            variable.grad = np.array([0, 1e-3, 1], dtype)
            optimizer.step()
        assert variable.dtype == dtype
        results.append(variable.array)
    np.testing.assert_allclose(*results, rtol=2e-3)


@for_each(
    "first limit norm scaled",
    [
        ([3, 0], 1, 5, [[0.6, 0], [0, 0.8]]),
        ([3, 0], 5, 5, [[3, 0], [0, 4]]),
        ([3e30, 4e30], 1, 5e30, [[0.6, 0.8], [0, 8e-31]]),  # squares overflow
        ([math.inf, 0], 1, math.inf, [[math.inf, 0], [0, 4]]),
        ([math.nan, 0], 1, math.nan, [[math.nan, 0], [0, 4]]),
    ],
)
def test_clip_grad_norm_scales_all_gradients_in_place(
    first: list[float], limit: float, norm: float, scaled: list[list[float]]
) -> None:
    a, b, without = (param(np.zeros(2, "float32")) for _ in range(3))
    a.grad, b.grad = grads = np.array(first, "float32"), np.array([0, 4], "float32")
    np.testing.assert_allclose(clip_grad_norm([a, b, without], limit), norm, rtol=1e-6)
    np.testing.assert_allclose(grads, scaled, rtol=1e-6)
    assert [a.grad is grads[0], b.grad is grads[1], without.grad] == [True, True, None]


def test_clip_grad_norm_handles_missing_gradients_and_bad_arguments() -> None:
    variables = [param(np.zeros(1))]
    assert clip_grad_norm(variables, 1) == 0
    with pytest.raises(ValueError, match="max_norm must be at least 0"):
        clip_grad_norm(variables, -1)
    with pytest.raises(ValueError, match="at least one parameter"):
        clip_grad_norm([], 1)


@for_each("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_clip_grad_value_limits_each_element_in_place(dtype: str) -> None:
    # Tests of GPUs import this file; their environment has no ml_dtypes.
    dtype = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else dtype
    a, b = param(np.zeros(4, dtype)), param(np.zeros(1, dtype))
    a.grad = grad = np.array([-3, 0.5, 2, math.nan], dtype)
    clip_grad_value([a, b], 1)
    assert a.grad is grad
    np.testing.assert_array_equal(grad.astype("f4"), [-1, 0.5, 1, math.nan])
    assert b.grad is None
    with pytest.raises(ValueError, match="clip_value must be at least 0"):
        clip_grad_value([a], -1)


@for_each("dtype", ["float16", "float32"])
def test_clipping_ignores_numpy_errstate(dtype: str) -> None:
    a = param(np.zeros(5, dtype))
    a.grad = np.array([-3, 1e-7, 0.5, math.inf, math.nan], dtype)
    expected = a.grad.copy()
    with np.errstate(all="raise"):
        clip_grad_value([a], 1e300)
        np.testing.assert_array_equal(a.grad, expected)
        clip_grad_value([a], 1e-300)
        np.testing.assert_array_equal(a.grad, [0, 0, 0, 0, math.nan])
        a.grad = np.array([4e4, 0, 1e-7, -3e4, 0], dtype)
        assert clip_grad_norm([a], 1) == pytest.approx(5e4, rel=1e-3)
    np.testing.assert_allclose(a.grad, [0.8, 0, 2e-12, -0.6, 0], rtol=1e-3, atol=1e-7)


def test_clip_grad_value_is_captured() -> None:
    def make() -> Any:
        x = param(np.ones((3, 4), "float32"))
        loss_of = lambda factor: (x * factor).sum()  # noqa: E731
        return training(SGDOptimizer([x], 0.1), loss_of, lambda: clip_grad_value([x], 2.0)), x

    compare(make, [np.asarray(number, "float32") for number in range(5)])
