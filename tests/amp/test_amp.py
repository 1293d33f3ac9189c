"""The dtypes in which functions compute under autocast, and the loss scale."""

import hashlib
import random
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.autograd import functions as F
from tests.nn.oracle import Oracle
from tests.tables import for_each, pairs

HALVES = ("float16", "bfloat16")
LABELS = np.array([0, 2])


def of_one(*names: str) -> dict[str, Callable[..., Any]]:
    return {name: lambda x, w, name=name: getattr(F, name)(x) for name in names}


def of_two(*names: str) -> dict[str, Callable[..., Any]]:
    return {name: lambda x, w, name=name: getattr(F, name)(x, x) for name in names}


# The policy. Each function is called with two inputs of shapes (2, 3) and (3, 3).
HALF: dict[str, Callable[..., Any]] = {
    "matmul": F.matmul,
    "linear": F.linear,
    "linear_relu": F.linear_relu,
    "operator": lambda x, w: x @ w,
}
FLOAT32: dict[str, Callable[..., Any]] = {
    **of_one("exp", "log", "sum", "mean", "var", "softmax", "log_softmax"),
    "pow": lambda x, w: F.pow(x, 2.0),
    "mean_squared_error": lambda x, w: F.mean_squared_error(x, x),
    "categorical_cross_entropy": lambda x, w: F.categorical_cross_entropy(x, LABELS),
}
WIDEST: dict[str, Callable[..., Any]] = {
    **of_one("negative", "sqrt", "sin", "cos", "tanh", "sigmoid", "relu", "abs", "max", "min"),
    **of_one("flat", "transpose"),
    **of_two("add", "sub", "mul", "div", "maximum", "minimum"),
    "clamp": lambda x, w: F.clamp(x, 0.0, 1.0),
    "dropout": lambda x, w: F.dropout(x, 0.5),
    "concatenate": lambda x, w: F.concatenate([x, x]),
    "index": lambda x, w: x[0],
    "reshape": lambda x, w: F.reshape(x, -1),
}
POLICY = [
    (name, function, made)
    for made, functions in (("half", HALF), ("float32", FLOAT32), ("widest", WIDEST))
    for name, function in functions.items()
]


def inputs(dtype: Any) -> tuple[fl.Variable, fl.Variable]:
    random = np.random.default_rng(0)
    return tuple(fl.param(random.random(n).astype(dtype)) for n in ((2, 3), (3, 3)))  # type: ignore[return-value]


@for_each("half", HALVES)
@for_each("dtype", ["half", "float32", "float64"])
@for_each("name function made", POLICY)
def test_autocast_selects_the_documented_dtypes(
    name: str, function: Any, made: str, dtype: str, half: str
) -> None:
    dtype = {"half": half}.get(dtype, dtype)
    x, weight = inputs(F.astype(np.ones(1), dtype).dtype)
    with fl.amp.autocast(half):
        result = function(x, weight)
    expected = {"half": half, "widest": dtype}.get(made, made)
    assert result.dtype.name == ("float64" if dtype == "float64" else expected)
    result.backward(np.ones_like(result.array))
    assert x.grad.dtype == x.dtype
    assert function(x, weight).dtype.name == dtype  # outside autocast


def test_products_round_their_inputs() -> None:
    x, weight = inputs(np.float32)
    a, w = (variable.array.astype(np.float16).astype(np.float32) for variable in (x, weight))
    with fl.amp.autocast():
        y = F.linear(x, weight)
    assert np.array_equal(y.array, (a @ w.T).astype(np.float16))
    grad = np.linspace(0, 1, y.size).reshape(y.shape).astype(np.float16)
    y.backward(grad)
    wide = grad.astype(np.float32)
    assert np.array_equal(weight.grad, (wide.T @ a).astype(np.float16).astype(np.float32))
    assert np.array_equal(x.grad, (wide @ w).astype(np.float16).astype(np.float32))


def products(dtype: Any = np.float16) -> Any:
    x, weight = inputs(np.float32)
    return F.matmul(x, weight).dtype == dtype


def test_regions_can_be_nested() -> None:
    region = fl.amp.autocast()
    with region, region:
        with fl.amp.autocast(enabled=False):
            assert products(np.float32)
        with fl.amp.autocast("bfloat16"):
            assert not products()
        assert products()
    assert products(np.float32)
    with pytest.raises(LookupError), region:
        raise LookupError
    assert products(np.float32)
    assert fl.amp.autocast()(products)()
    assert fl.amp.autocast(np.float16)(products)()
    assert not fl.amp.autocast(enabled=False)(products)()


def test_region_is_local_to_its_thread() -> None:
    results: list[bool] = []
    with fl.amp.autocast():
        thread = threading.Thread(target=lambda: results.append(products()))
        thread.start()
        thread.join()
    assert results == [False]


def test_autocast_raises_for_other_dtypes() -> None:
    for wrong, error in (("float32", ValueError), ("int8", TypeError), ("what", TypeError)):
        with pytest.raises(error, match=f"autocast.*{wrong}"):
            fl.amp.autocast(wrong)


def test_parameter_is_cast_once_until_it_changes() -> None:
    x, weight = inputs(np.float32)
    optimizer = fl.optim.SGDOptimizer([weight], 0.5)
    with fl.amp.autocast():
        for _ in range(3):  # the cast is freed after each step
            optimizer.zero_grad()
            loss = F.linear(x, weight) + F.linear(x, weight)
            (first, _), (second, _) = (edge[0].edges[0] for edge in loss.node.edges)  # type: ignore
            assert first is second
            expected = x.array.astype(np.float16) @ weight.array.astype(np.float16).T
            np.testing.assert_allclose(loss.array, 2 * expected, rtol=1e-2)
            loss.backward(np.ones_like(loss.array))
            optimizer.step()


def test_weight_written_in_place_is_cast_in_the_next_region() -> None:
    x, weight = inputs(np.float32)
    with fl.amp.autocast():
        assert F.linear(x, weight).array.all()
        weight.array[...] = 0
    with fl.amp.autocast():
        assert not F.linear(x, weight).array.any()


def model_of(recomputed: bool = False) -> Any:
    fl.set_seed(0)
    block = fl.nn.Sequential(fl.nn.Linear(6, 8), fl.nn.Tanh(), fl.nn.Linear(8, 8))
    if recomputed:
        fl.recompute(block)
    return fl.nn.Sequential(block, fl.nn.ReLU(), fl.nn.Linear(8, 3), fl.nn.LogSoftmax())


def batch() -> tuple[np.ndarray, np.ndarray]:
    return np.random.default_rng(0).standard_normal((16, 6)).astype(np.float32), np.arange(16) % 3


def train(model: Any, half: str | None, captured: str = "", steps: int = 5) -> list[Any]:
    optimizer = fl.optim.AdamOptimizer(model.params(), 0.05)
    enabled = half is not None
    region = fl.amp.autocast(half or "float16", enabled=enabled)

    def inside() -> Any:
        return nullcontext() if captured == "around" else fl.amp.autocast(region.dtype, enabled)

    def step(x: Any, labels: Any) -> Any:
        optimizer.zero_grad()
        with inside():
            loss = F.categorical_cross_entropy(model(fl.input(x)), fl.input(labels))
        loss.backward()
        optimizer.step()
        return loss

    run = fl.capture(step) if captured else step
    with region if captured == "around" else nullcontext():
        return [float(run(*batch()).scalar()) for _ in range(steps)]


@for_each("half", HALVES)
def test_training_under_autocast_reduces_the_loss(half: str) -> None:
    mixed, exact = train(model_of(), half), train(model_of(), None)
    assert mixed != exact
    np.testing.assert_allclose(mixed, exact, atol=0.02)


@for_each("captured", ["inside", "around"])
@for_each("half", HALVES)
def test_captured_step_may_enter_autocast(half: str, captured: str) -> None:
    assert train(model_of(), half, captured) == train(model_of(), half)


def test_captured_step_is_recorded_per_region() -> None:
    weight = fl.param(np.full((1, 1), 1 / 3, np.float32))
    captured = fl.capture(lambda x: F.matmul(fl.input(x), weight))
    x, results = np.ones((1, 1), np.float32), []
    for turn in range(8):
        with fl.amp.autocast(enabled=turn % 2 == 1):
            results.append(captured(x).dtype.name)
    assert results == ["float32", "float16"] * 4


@for_each("half", HALVES)
def test_recompute_uses_the_dtype_of_the_region(half: str) -> None:
    one, other = model_of(), model_of(recomputed=True)
    assert train(one, half) == train(other, half)
    for a, b in zip(one.params(), other.params(), strict=True):
        assert np.array_equal(a.array, b.array)


@np.errstate(all="ignore")
def on_ranks(rank: int, size: int, half: str, sharded: bool) -> Any:
    model = model_of()
    fl.fully_shard(model) if sharded else fl.distribute_module_grads(model)
    optimizer, (x, labels) = fl.optim.AdamOptimizer(model.params(), 0.05), batch()
    scaler = fl.amp.DynamicScaler(2.0**4)
    rows = slice(rank * 16 // size, (rank + 1) * 16 // size)
    for turn in range(5):
        optimizer.zero_grad()
        with fl.amp.autocast(half):
            loss = F.categorical_cross_entropy(model(fl.input(x[rows])), fl.input(labels[rows]))
        if turn == 3 and rank == 0:
            loss = loss * np.inf  # makes the gradients of one rank infinite
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler.state_dict(), {n: np.array(a) for n, a in model.state_dict().items()}


@for_each("half sharded", pairs(HALVES, [False, True]))
def test_ranks_train_under_autocast(pool: Any, half: str, sharded: bool) -> None:
    first, second = pool(2).run(on_ranks, half, sharded)
    alone = on_ranks(0, 1, half, False)
    assert first[0] == second[0] == alone[0]
    assert first[0]["scale"] == 8
    for name, array in alone[1].items():
        assert np.array_equal(first[1][name], second[1][name])
        np.testing.assert_allclose(first[1][name], array, atol=0.03)


class Bare:
    """An optimizer that counts its steps."""

    def __init__(self, *params: Any) -> None:
        self.params, self.steps = list(params), 0

    def step(self) -> int:
        self.steps += 1
        return self.steps


def param(grad: float = 1, dtype: Any = np.float32) -> Any:
    result = fl.param(np.zeros(1, dtype))
    result.grad = np.full(1, grad, dtype)
    return result


# Steps, growth interval, and fraction of gradients that are not finite.
RUNS = [
    (1_000, 10, 0.04),
    (300, 3, 0.0),
    (300, 5, 0.9),
    (200, 3, 1.0),  # the scale decreases to 0
]


# Returns the final state, the number of optimizer steps, and a digest of all states.
TORCH = """
import hashlib, random

class Bare:  # an optimizer, as far as a scaler knows one
    def __init__(self, param):
        self.param_groups, self.steps = [{"params": [param]}], 0

    def step(self):
        self.steps += 1

def run(steps, growth_interval, share):
    scaler = torch.amp.GradScaler("cpu", growth_interval=growth_interval)
    param = torch.zeros(1, requires_grad=True)
    param.grad = torch.zeros(1)
    scaler.scale(param)
    optimizer, drawn, digest = Bare(param), random.Random(7), hashlib.sha256()
    for _ in range(steps):
        chance = drawn.random()
        grad = torch.nan if chance < share / 2 else torch.inf if chance < share else 1.0
        param.grad.fill_(grad)
        scaler.step(optimizer)
        scaler.update()
        digest.update(repr((scaler.get_scale(), scaler._get_growth_tracker())).encode())
    return [scaler.state_dict(), optimizer.steps, digest.hexdigest()]

y = [run(*each) for each in runs]
"""


def test_state_dict_equals_torch(oracle: Oracle) -> None:
    assert oracle(TORCH, runs=RUNS)["y"] == [run(*arguments) for arguments in RUNS]


def run(steps: int, interval: int, share: float) -> Any:
    scaler = fl.amp.DynamicScaler(growth_interval=interval)
    leaf, drawn, digest = param(), random.Random(7), hashlib.sha256()
    optimizer, grad = Bare(leaf), leaf.grad
    for _ in range(steps):
        chance = drawn.random()
        grad[0] = np.nan if chance < share / 2 else np.inf if chance < share else 1
        scaler.step(optimizer)
        scaler.update()
        digest.update(repr((scaler.get_scale(), scaler._tracker.item())).encode())
    return [scaler.state_dict(), optimizer.steps, digest.hexdigest()]


def test_step_unscales_once_and_skips_infinite_gradients() -> None:
    leaf, other = param(8), param(16)
    optimizer, scaler = Bare(leaf, other), fl.amp.DynamicScaler(8)
    scaler.unscale(optimizer)
    assert (leaf.grad[0], other.grad[0]) == (1, 2)
    assert scaler.step(optimizer) == 1
    assert leaf.grad[0] == 1
    scaler.update()
    other.grad[0] = np.inf
    assert scaler.step(optimizer) is None
    scaler.update()
    assert (optimizer.steps, scaler.get_scale()) == (1, 4)


def test_scale_multiplies_losses() -> None:
    scaler, leaf = fl.amp.DynamicScaler(4), param()
    leaf.grad = None
    for loss in scaler.scale([leaf * 1.0, leaf * 2.0]):
        loss.backward()
    assert leaf.grad[0] == 12
    with pytest.raises(TypeError, match=r"expected a Variable.* got float"):
        scaler.scale(1.0)
    off = fl.amp.DynamicScaler(4, enabled=False)
    assert off.scale(leaf) is leaf
    assert (off.get_scale(), off.state_dict(), off.step(Bare(leaf))) == (1, {}, 1)
    off.unscale(Bare(leaf))
    off.update()
    off.load_state_dict({})


OUT_OF_TURN: dict[str, tuple[list[str], str]] = {
    "unscaled twice": (["unscale", "unscale"], "since the last update"),
    "unscaled after the step": (["step", "unscale"], r"step\(\) was already called"),
    "stepped twice": (["step", "step"], "since the last update"),
    "updated without gradients": (["update"], r"step\(\) was not called"),
    "updated twice": (["step", "update", "update"], r"step\(\) was not called"),
}


@for_each("name", OUT_OF_TURN)
def test_calls_out_of_order_raise_runtime_error(name: str) -> None:
    calls, message = OUT_OF_TURN[name]
    optimizer, scaler = Bare(param()), fl.amp.DynamicScaler()
    arguments: dict[str, Any] = {"update": ()}
    for call in calls[:-1]:
        getattr(scaler, call)(*arguments.get(call, (optimizer,)))
    with pytest.raises(RuntimeError, match=message):
        getattr(scaler, calls[-1])(*arguments.get(calls[-1], (optimizer,)))


def test_unscale_raises_for_invalid_gradients() -> None:
    scaler = fl.amp.DynamicScaler()
    with pytest.raises(ValueError, match="float16"):
        scaler.step(Bare(param(1, np.float16)))
    with pytest.raises(RuntimeError, match="no parameter of this optimizer has a gradient"):
        scaler.step(Bare(fl.param(np.zeros(1))))


WRONG: list[dict[str, float]] = [
    {"initial_scale": 0}, {"initial_scale": np.inf}, {"growth_factor": 1},
    {"backoff_factor": 1}, {"backoff_factor": 0}, {"growth_interval": 0},
]  # fmt: skip


@for_each("options", WRONG)
def test_scaler_raises_value_error_for_numbers_out_of_range(options: Any) -> None:
    with pytest.raises(ValueError, match=r"DynamicScaler: .* must be"):
        fl.amp.DynamicScaler(**options)


def test_load_state_dict_restores_the_state() -> None:
    one, other = fl.amp.DynamicScaler(4, 3, 0.25, 7), fl.amp.DynamicScaler()
    one.step(optimizer := Bare(param()))
    one.update()
    other.load_state_dict(one.state_dict())
    assert other.state_dict() == one.state_dict()
    assert one.state_dict()["_growth_tracker"] == 1
    other.step(optimizer)
    other.update(64)
    assert other.get_scale() == 64
    with pytest.raises(ValueError, match="expected the entries"):
        other.load_state_dict({"scale": 1.0})
    with pytest.raises(ValueError, match="finite and above 0"):
        other.load_state_dict({**one.state_dict(), "scale": -1.0})
    for wrong in (0, -1, np.inf):
        with pytest.raises(ValueError, match="finite and above 0"):
            other.update(wrong)


def test_load_state_dict_accepts_scale_zero() -> None:
    one, other = fl.amp.DynamicScaler(1e-45, backoff_factor=0.4), fl.amp.DynamicScaler()
    one.step(Bare(param(np.inf)))
    one.update()
    assert one.get_scale() == 0
    other.load_state_dict(one.state_dict())
    assert other.state_dict() == one.state_dict()
