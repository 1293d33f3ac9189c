"""Optimizers, clipping and schedules: rules against NumPy and torch, state, wrong arguments."""

import copy
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py import optim
from flashlight_py.autograd import Variable, param
from flashlight_py.nn import Linear
from flashlight_py.optim import SGDOptimizer, clip_grad_norm, clip_grad_value
from flashlight_py.structure import Structured
from tests.distributed.conformance import on_ranks
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


BASE, STEPS = 0.8, 13
T = np.arange(STEPS)


def cosine(start: float, end: float, part: Any) -> Any:
    return end + (start - end) * (1 + np.cos(np.pi * part)) / 2


# Constructors in this library and in torch, and the rates of 13 steps by the published formulas.
SCHEDULES: dict[str, tuple[str, Any]] = {
    "step": ("StepLR(o, 3, 0.5)", BASE * 0.5 ** (T // 3)),
    "multi step": ("MultiStepLR(o, [8, 2, 8], gamma=0.1)",
        BASE * 0.1 ** np.array([0, 0, *[1] * 6, *[3] * 5])),
    "exponential": ("ExponentialLR(o, 0.9)", BASE * 0.9**T),
    "linear": ("LinearLR(o, start_factor=0.5, end_factor=0.75, total_iters=6)",
        np.interp(T, [0, 6], [BASE / 2, BASE * 0.75])),
    "lambda": ("LambdaLR(o, lambda t: 1 / (1 + t))", BASE / (1 + T)),
    "cosine": ("CosineAnnealingLR(o, T_max=8, eta_min=0.1)", cosine(BASE, 0.1, T / 8)),
    "one cycle": ("OneCycleLR(o, 2.0, epochs=13, steps_per_epoch=1, **more)",
        np.where(T <= 2.9, cosine(0.08, 2, T / 2.9), cosine(2, 8e-6, (T - 2.9) / 9.1))),
    "one cycle in three phases": ("OneCycleLR(o, 2.0, 13, None, None, 0.4, 'linear', "
        "div_factor=10, final_div_factor=4, three_phase=True, **more)",
        np.interp(T, [0, 4.2, 8.4, 12], [0.2, 2, 0.2, 0.05])),
    "warm-up, then cosine": ("SequentialLR(o, [LinearLR(o, start_factor=0.25, total_iters=4), "
        "CosineAnnealingLR(o, T_max=9, eta_min=0.01)], milestones=[4])",
        [*np.interp(T[:4], [0, 4], [BASE / 4, BASE]), *cosine(BASE, 0.01, T[:9] / 9)]),
}  # fmt: skip
TORCH_RATES = """
from torch.optim.lr_scheduler import *
more, y = {"cycle_momentum": False}, []
o = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], 0.8)
schedule = MAKE
for _ in range(13):
    y.append(o.param_groups[0]["lr"])
    o.step()
    schedule.step()
"""
EACH = for_each("name", SCHEDULES)


def optimizer_of_rate(rate: float = BASE) -> optim.SGDOptimizer:
    return optim.SGDOptimizer([fl.param(np.ones(2))], rate)


def made(name: str, optimizer: optim.SGDOptimizer) -> Any:
    return eval(SCHEDULES[name][0], {**vars(fl.optim), "o": optimizer, "more": {}})


def rates(schedule: Any, of: Callable[[], float], steps: int) -> list[float]:
    results = []
    for step in range(steps):
        results.append(of())
        if step + 1 < steps:
            schedule.step()
    return results


@EACH
def test_rates_equal_the_published_formulas(name: str) -> None:
    expected, optimizer = SCHEDULES[name][1], optimizer_of_rate()
    schedule = made(name, optimizer)
    result = rates(schedule, lambda: optimizer.lr, STEPS)
    np.testing.assert_allclose(result, expected, rtol=1e-12)
    assert schedule.get_last_lr() == [optimizer.lr] == [schedule.last_lr]
    assert result == [schedule.rate_at(step) for step in range(STEPS)]


@EACH
def test_rates_equal_torch(name: str, oracle: Oracle) -> None:
    code, expected = SCHEDULES[name]
    np.testing.assert_allclose(oracle(TORCH_RATES.replace("MAKE", code))["y"], expected, rtol=1e-12)


@EACH
def test_schedule_resumes_at_any_step(name: str) -> None:
    first, again = optimizer_of_rate(), optimizer_of_rate(0.3)
    one, other = made(name, first), made(name, again)
    rates(one, lambda: first.lr, 6)
    other.load_state_dict(one.state_dict())
    assert again.lr == first.lr
    assert rates(other, lambda: again.lr, 8) == rates(one, lambda: first.lr, 8)


def test_second_schedule_starts_from_the_first_base_rate() -> None:
    optimizer = fl.DistributedOptimizer(optimizer_of_rate(0.1))
    first = optim.ExponentialLR(optimizer, 0.5)
    first.step()
    assert optimizer.lr == 0.05
    second = optim.LambdaLR(optimizer, lambda step: 1 + step)
    assert (second.base_lr, optimizer.lr) == (0.1, 0.1)
    second.step()
    assert optim.ExponentialLR(optimizer, 0.5).base_lr == 0.1
    optimizer.lr = 0.3  # set by the user
    assert optim.ExponentialLR(optimizer, 0.5).base_lr == 0.3
    first.step()  # continues from its own rate
    assert optimizer.lr == 0.025


@for_each(
    "make metric",
    [
        (lambda optimizer: optim.StepLR(optimizer, 2, gamma=0.1), ()),
        (lambda optimizer: optim.ReduceLROnPlateau(optimizer, patience=1), (2.0,)),
    ],
)
def test_checkpoint_and_synchronize_accept_schedules(
    make: Any, metric: Any, tmp_path: Path
) -> None:
    one, other = (fl.DistributedOptimizer(optimizer_of_rate(rate)) for rate in (BASE, 9.0))
    schedule, loaded = make(one), make(other)
    for steps in (0, 2):  # no best metric exists at first
        for _ in range(steps):
            schedule.step(*metric)
        fl.save(tmp_path, optimizer=one, schedule=schedule)
        fl.load(tmp_path, optimizer=other, schedule=loaded)
        assert loaded.state_dict() == fl.synchronize(schedule).state_dict() == schedule.state_dict()
        assert other.lr == one.lr
    schedule.step(*metric)
    loaded.step(*metric)
    assert other.lr == one.lr == pytest.approx(BASE * 0.1)


@on_ranks(("shm", 2))
def test_synchronize_copies_the_schedule_of_the_root(rank: int, size: int) -> None:
    optimizer = optimizer_of_rate(rank + 1.0)
    schedule = optim.ExponentialLR(optimizer, 0.5)
    for _ in range(rank + 1):
        schedule.step()
    fl.synchronize(schedule)
    assert (schedule.base_lr, optimizer.lr, schedule.last_step) == (1.0, 0.5, 1)


def test_schedules_raise_for_invalid_arguments() -> None:
    optimizer, other = optimizer_of_rate(), optim.StepLR(optimizer_of_rate(), 3)
    plateau = optim.ReduceLROnPlateau(optimizer)
    refused: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: optim.StepLR(object(), 3), TypeError, "an optimizer with a learning rate lr"),  # type: ignore[arg-type]
        (lambda: optim.StepLR(optimizer, 0), ValueError, "step_size must be at least 1"),
        (lambda: optim.StepLR(optimizer, 1.5), TypeError, "step_size must be an integer"),  # type: ignore[arg-type]
        (lambda: optim.ExponentialLR(optimizer, -1), ValueError, "gamma must be at least 0"),
        (lambda: optim.MultiStepLR(optimizer, [1], -1), ValueError, "gamma"),
        (lambda: optim.LambdaLR(optimizer, lambda t: -1), ValueError, "lr must be at least 0"),
        (lambda: optim.CosineAnnealingLR(optimizer, 5, -1), ValueError, "eta_min"),
        (lambda: optim.LinearLR(optimizer, -1), ValueError, "start_factor"),
        (lambda: optim.OneCycleLR(optimizer, 1.0), ValueError, "expected total_steps"),
        (lambda: optim.OneCycleLR(optimizer, 1.0, 9, pct_start=0), ValueError, "each phase must"),
        (lambda: optim.OneCycleLR(optimizer, 1.0, 9, anneal_strategy="x"), ValueError, "cos or"),
        (lambda: optim.OneCycleLR(optimizer, 1.0, 9, div_factor=0), ValueError, "above 0"),
        (lambda: optim.SequentialLR(optimizer, [made("step", optimizer)], [1]), ValueError, "0 m"),
        (lambda: optim.SequentialLR(optimizer, [other], []), ValueError, "the same optimizer"),
        (lambda: optim.SequentialLR(optimizer, [plateau], []), ValueError, "needs a metric"),
        (lambda: optim.ReduceLROnPlateau(optimizer, "least"), ValueError, "mode .* got 'least'"),
        (lambda: optim.ReduceLROnPlateau(optimizer, factor=1.0), ValueError, r"below 1.* 1\.0"),
        (lambda: optim.ReduceLROnPlateau(optimizer, patience=-1), ValueError, "patience .* got -1"),
    ]
    for make, kind, words in refused:
        with pytest.raises(kind, match=words):
            make()
    assert optimizer.lr == BASE


def test_failed_step_and_load_change_nothing() -> None:
    optimizer = optimizer_of_rate()
    schedule = optim.OneCycleLR(optimizer, 1.0, total_steps=5)
    for _ in range(5):  # the loop steps once per 5 steps
        schedule.step()
    last = optimizer.lr
    with pytest.raises(ValueError, match="at most 5 steps, got step 6"):
        schedule.step()
    with pytest.raises(ValueError, match="got step 7"):
        schedule.load_state_dict({"last_step": 7, "base_lr": 3.0})
    with pytest.raises(ValueError, match="expected the entries"):
        schedule.load_state_dict({"last_epoch": 2})
    assert (schedule.last_step, schedule.base_lr, optimizer.lr) == (5, BASE, last)
    other = optim.LambdaLR(optimizer, lambda step: [1.0, 0.5][step])
    with pytest.raises(IndexError):
        other.load_state_dict({"last_step": 2, "base_lr": 7.0})
    assert (other.last_step, other.base_lr, optimizer.lr) == (0, BASE, BASE)


def test_schedule_accepts_any_formula() -> None:
    schedule = optim.LearningRateSchedule(
        optimizer_of_rate(), lambda base, t: base / (t + 1) ** 0.5
    )
    schedule.step()
    assert schedule.last_lr == BASE / 2**0.5
    assert repr(schedule) == f"LearningRateSchedule(step 1, lr {schedule.last_lr:g})"


METRICS = [5.0, 4, 4, 4, 3.999, 4, 3, 3, 3, 3, 3, float("nan"), 2.9, 3, 3, 3, 3, 3, 3, 3]


@for_each(
    "options",
    [
        {"patience": 2},
        {"patience": 1, "factor": 0.5, "cooldown": 2, "min_lr": 0.3},
        {"patience": 2, "mode": "max", "threshold": 0.5, "threshold_mode": "abs"},
        {"patience": 0, "mode": "max", "threshold": 0.1},
    ],
)
def test_plateau_rates_equal_torch(options: dict[str, Any], oracle: Oracle) -> None:
    code = """
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], 0.8)
schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, eps=0, **options)
y = []
for metric in metrics:
    schedule.step(metric)
    y.append(optimizer.param_groups[0]["lr"])
"""
    optimizer, results = optimizer_of_rate(), []
    schedule = optim.ReduceLROnPlateau(optimizer, **options)
    for number, metric in enumerate(METRICS):
        if number == 7:  # another schedule continues
            state, optimizer = schedule.state_dict(), optimizer_of_rate(9.0)
            schedule = optim.ReduceLROnPlateau(optimizer, **options)
            schedule.load_state_dict(state)
        schedule.step(fl.input(np.array(metric)))
        results.append(optimizer.lr)
    np.testing.assert_allclose(results, oracle(code, metrics=METRICS, options=options)["y"])


def test_plateau_keeps_rates_below_the_minimum() -> None:
    optimizer = optimizer_of_rate(0.1)
    schedule = optim.ReduceLROnPlateau(optimizer, patience=0, min_lr=0.5)
    for _ in range(3):
        schedule.step(1.0)
    assert optimizer.lr == 0.1
