"""The loss scale is bit-identical to torch's scale. Calls in the wrong order raise errors."""

import hashlib
import random
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.nn.oracle import Oracle
from tests.tables import for_each


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
