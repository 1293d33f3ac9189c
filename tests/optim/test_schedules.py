"""Learning-rate schedules: rates compared with torch's, resuming, rejected arguments."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py import optim
from tests.distributed.conformance import on_ranks
from tests.nn.oracle import Oracle
from tests.tables import for_each

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
TORCH = """
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
    np.testing.assert_allclose(oracle(TORCH.replace("MAKE", code))["y"], expected, rtol=1e-12)


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
