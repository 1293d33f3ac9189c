"""Captured steps on GPUs beside eager ones."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.gpu import verbs

pytestmark = pytest.mark.gpu

STEPS = 30
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda params: fl.optim.SGDOptimizer(params, 0.05, 0.9),
    "adam": lambda params: fl.optim.AdamOptimizer(params, 0.01),
}


def train(
    rank: int, size: int, kind: str, captured: bool, dropout: float = 0.0
) -> tuple[list[np.ndarray], float, int, str]:
    """Train with batches of this rank's own; return parameters, seconds per step and replays."""
    cp = verbs.cupy()
    fl.set_seed(0)
    device = fl.distributed.use_local_device()
    layers = [
        fl.nn.Linear(10, 100, dtype="float64"),
        fl.nn.ReLU(),
        fl.nn.Linear(100, 1, dtype="float64"),
    ]
    if dropout:
        layers.insert(2, fl.nn.Dropout(dropout))
    model = fl.nn.Sequential(*layers)
    model.to(device)
    fl.broadcast_parameters(model)
    fl.distribute_module_grads(model)
    optimizer = OPTIMIZERS[kind](model.params())
    criterion = fl.nn.MeanSquaredError()

    def step(x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = criterion(model(fl.input(x)), fl.no_grad(y))
        loss.backward()
        optimizer.step()
        return loss

    run: Any = fl.capture(step) if captured else step
    random = cp.random.default_rng(rank)
    losses = []
    for number in range(STEPS):
        optimizer.lr = 0.05 / (1 + number)
        x = random.random((8, 10))
        losses.append(run(x, x.sum(axis=1, keepdims=True)).array)
    cp.cuda.Device().synchronize()
    began = time.perf_counter()
    for _ in range(100):
        run(x, x[:, :1].copy())
    cp.cuda.Device().synchronize()
    took = (time.perf_counter() - began) / 100
    found = [each.get() for each in (*losses, *(param.array for param in model.params()))]
    return found, took, getattr(run, "replays", 0), getattr(run, "reason", "")


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
def test_replays_compute_what_the_step_does(
    ranks: Any, kind: str, record_property: Callable[[str, Any], None]
) -> None:
    expected = ranks.run(train, kind, False)
    for (one, eager, *_), (other, captured, replays, reason) in zip(
        expected, ranks.run(train, kind, True), strict=True
    ):
        assert (replays, reason) == (STEPS + 98, "")
        for a, b in zip(one, other, strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-10, atol=1e-12)
        record_property("step", f"eager {eager * 1e6:.0f} us, captured {captured * 1e6:.0f} us")


def drop_out(rank: int, size: int) -> list[np.ndarray]:
    eager, *_ = train(rank, size, "sgd", captured=False, dropout=0.5)
    captured, _, replays, reason = train(rank, size, "sgd", captured=True, dropout=0.5)
    assert (replays, reason) == (STEPS + 98, "")
    for one, other in zip(eager, captured, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-10, atol=1e-12)
    return captured


def test_dropout_draws_the_same_numbers(ranks: Any) -> None:
    ranks.run(drop_out)


def read(rank: int, size: int) -> None:
    cp = verbs.cupy()
    captured = fl.capture(lambda x: float((x * 2).sum()))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [captured(cp.full(3, float(n))) for n in range(5)]
    assert found == [0.0, 6.0, 12.0, 18.0, 24.0]
    assert (len(caught), captured.replays) == (1, 0)


def test_a_value_that_is_read_leaves_the_step_as_it_is(ranks: Any) -> None:
    ranks.run(read)


def classify(rank: int, size: int) -> None:
    cp = verbs.cupy()
    model = fl.nn.Linear(6, 3)
    model.to(fl.distributed.use_local_device())
    criterion = fl.nn.CategoricalCrossEntropy()
    step = fl.capture(lambda x, labels: criterion(model(fl.input(x)), fl.no_grad(labels)))
    x = cp.ones((4, 6), np.float32)
    for _ in range(4):
        step(x, cp.array([0, 1, 2, 1]))
    assert (step.reason, step.replays) == ("", 2)
    with pytest.raises(ValueError, match="7"):
        step(x, cp.array([0, 1, 7, 1]))


def test_labels_are_checked_by_replays(ranks: Any) -> None:
    ranks.run(classify)


def run_short_of_memory(rank: int, size: int) -> None:
    cp = verbs.cupy()
    step = fl.capture(lambda x: ((x * 2) ** 2 + x).sum())
    x = cp.arange(1e6)
    expected = float(step(x))
    for _ in range(3):
        step(x)
    for programs in step._gpu._programs.values():
        programs[0]._pool.free_all_blocks()  # as CuPy does where memory is short
    taken = [cp.zeros(1_000_000) for _ in range(8)]
    assert float(step(x)) == expected
    assert step.replays == 3
    assert not any(map(cp.any, taken))


def test_memory_of_graphs_is_not_given_back(ranks: Any) -> None:
    ranks.run(run_short_of_memory)
