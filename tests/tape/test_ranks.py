"""Captured steps on several ranks: the bits of eager ones, and the same errors."""

from __future__ import annotations

import contextlib
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.distributed.harness import run_outcomes, run_ranks
from tests.tape.steps import assert_same_bits, twins

STEPS = 24


def data(rank: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(rank)
    return (
        random.random((STEPS, 4, 6)).astype(np.float32),
        random.random((STEPS, 4, 3)).astype(np.float32),
    )


def make(kind: str) -> tuple[Any, ...]:
    """What makes a step whose gradients are reduced in a way that ``kind`` names."""
    fl.set_seed(0)
    width = 40_000 if kind == "large buckets" else 9
    model = fl.nn.Sequential(
        fl.nn.Linear(6, width), fl.nn.ReLU(), fl.nn.Dropout(0.2), fl.nn.Linear(width, 3)
    )
    options: dict[str, Any] = {
        "buckets": {},
        "small buckets": {"bucket_bytes": 100},
        "large buckets": {"bucket_bytes": 1_100_000},  # which are reduced in the background
        "reducer": {"reducer": fl.InlineReducer(1 / fl.get_world_size())},
        "hook": {"hook": fl.Float16Compression()},
    }[kind]
    fl.distribute_module_grads(model, **options)
    optimizer = fl.optim.AdamOptimizer(model.params(), 0.01)
    criterion = fl.nn.MeanSquaredError()

    def step(x: np.ndarray, y: np.ndarray) -> Any:
        optimizer.zero_grad()
        loss = criterion(model(fl.input(x)), fl.no_grad(y))
        loss.backward()
        optimizer.step()
        return fl.all_reduce(loss.array * 1, op="avg")

    return step, model.params(), optimizer, model


def train(rank: int, size: int, kind: str) -> int | str:
    models = []

    def without_model() -> tuple[Any, ...]:
        *made, model = make(kind)
        models.append(model)
        return tuple(made)

    eager, captured = twins(without_model)
    xs, ys = data(rank)
    losses: list[list[Any]] = []
    for twin in (eager, captured):
        fl.set_seed(rank)
        losses.append([twin.step(x, y) for x, y in zip(xs, ys, strict=True)])
    assert_same_bits(*losses)
    assert_same_bits(eager.state(), captured.state())
    return captured.step.reason or int(captured.step.replays)


@pytest.mark.parametrize("kind", ["buckets", "small buckets", "large buckets"])
def test_gradients_are_reduced_by_replays(kind: str) -> None:
    assert run_ranks(train, 2, kind) == [STEPS - 3] * 2


def test_gradients_are_reduced_by_replays_through_gloo() -> None:
    assert run_ranks(train, 3, "small buckets", params={"BACKEND": "gloo"}) == [STEPS - 3] * 3


def stay_eager(rank: int, size: int, kind: str) -> Any:
    with pytest.warns(RuntimeWarning, match="stays eager"):
        return train(rank, size, kind)


@pytest.mark.parametrize("kind", ["reducer", "hook"])
def test_what_sends_more_than_arrays_of_the_step_stays_eager(kind: str) -> None:
    for reason in run_ranks(stay_eager, 2, kind):
        assert "test_ranks.py" in reason


def leaf_by_leaf(rank: int, size: int) -> int:
    def make_step() -> tuple[Any, ...]:
        fl.set_seed(0)
        model = fl.nn.Sequential(fl.nn.Linear(6, 9), fl.nn.Dropout(0.2), fl.nn.Linear(9, 3))
        fl.distribute_module_grads(model, leaves=4)
        optimizer = fl.optim.AdamOptimizer(model.params(), 0.01)
        criterion = fl.nn.MeanSquaredError()

        def step(x: np.ndarray, y: np.ndarray) -> Any:
            optimizer.zero_grad()
            for rows, targets in fl.leaves(model, x, y):
                loss = criterion(model(fl.input(rows)), fl.no_grad(targets))
                loss.backward()
            optimizer.step()
            return loss

        return step, model.params(), optimizer

    eager, captured = twins(make_step)
    xs, ys = data(7)
    for number, (x, y) in enumerate(zip(xs, ys, strict=True)):
        for twin in (eager, captured):
            fl.set_seed(number)
            twin.last = twin.step(x, y)
        assert_same_bits(eager.last, captured.last)
        assert_same_bits(eager.state(), captured.state())
    assert captured.step.reason == ""
    return int(captured.step.replays)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_leaves_are_replayed(size: int) -> None:
    assert run_ranks(leaf_by_leaf, size) == [STEPS - 3] * size


def accumulate(rank: int, size: int) -> int:
    fl.set_seed(0)

    def make_step() -> tuple[Any, ...]:
        fl.set_seed(0)
        model = fl.nn.Linear(6, 3)
        fl.distribute_module_grads(model)
        optimizer = fl.optim.SGDOptimizer(model.params(), 0.1)
        criterion = fl.nn.MeanSquaredError()

        def step(x: np.ndarray, y: np.ndarray, last: bool) -> Any:
            loss = criterion(model(fl.input(x)), fl.no_grad(y))
            with contextlib.nullcontext() if last else fl.no_sync(model):
                loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
            return loss

        return step, model.params(), optimizer

    eager, captured = twins(make_step)
    xs, ys = data(rank)
    for number in range(STEPS):
        given = xs[number], ys[number], number % 3 == 2
        assert_same_bits(eager.step(*given), captured.step(*given))
    assert_same_bits(eager.state(), captured.state())
    assert captured.step.reason == ""
    return int(captured.step.replays)


def test_gradients_accumulate_under_no_sync() -> None:
    first, second = run_ranks(accumulate, 2)
    assert first == second > STEPS // 2


def no_sync_from_outside(rank: int, size: int) -> None:
    models = []

    def without_model() -> tuple[Any, ...]:
        *made, model = make("buckets")
        models.append(model)
        return tuple(made)

    eager, captured = twins(without_model)
    xs, ys = data(rank)
    for number, (x, y) in enumerate(zip(xs, ys, strict=True)):
        for twin, model in zip((eager, captured), models, strict=True):
            fl.set_seed(number)
            with fl.no_sync(model) if number % 2 else contextlib.nullcontext():
                twin.last = twin.step(x, y)
        assert_same_bits(eager.last, captured.last)
    assert_same_bits(eager.state(), captured.state())
    assert captured.step.replays > 0


def test_no_sync_around_a_captured_step_is_seen() -> None:
    run_ranks(no_sync_from_outside, 2)


def one_rank_stays_eager(rank: int, size: int) -> None:
    """The calls of a replay are those of an eager step, so that ranks need not agree."""
    step, params, *_ = make("buckets")
    other, expected, *_ = make("buckets")
    mine = fl.capture(step) if rank == 0 else step
    xs, ys = data(rank)
    for number, (x, y) in enumerate(zip(xs, ys, strict=True)):
        fl.set_seed(number)
        mine(x, y)
        fl.set_seed(number)
        other(x, y)
    for one, two in zip(params, expected, strict=True):
        assert one.array.tobytes() == two.array.tobytes()


def test_a_captured_rank_works_beside_an_eager_one() -> None:
    run_ranks(one_rank_stays_eager, 2)


def lose_a_peer(rank: int, size: int) -> str:
    step, *_ = make("buckets")
    captured = fl.capture(step)
    xs, ys = data(rank)
    for number in range(STEPS):
        if rank == 1 and number == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            captured(xs[number], ys[number])
        except fl.errors.PeerLostError as error:
            assert captured.replays == 7
            return str(error)
    return "nobody was lost"


def test_a_killed_peer_is_reported_by_a_replay() -> None:
    outcomes = run_outcomes(lose_a_peer, 2)
    assert "rank 1" in str(outcomes[0])


def communicate_unseen(rank: int, size: int) -> None:
    numbers = np.zeros(3)

    @fl.capture
    def step(x: np.ndarray) -> Any:
        fl.all_reduce(float(rank))  # a number of Python
        return x + numbers

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(6):
            step(np.ones(3))
    assert len(caught) == 1
    assert "is sent that is no array of the step" in str(caught[0].message)


def test_what_is_sent_unseen_ends_the_capture() -> None:
    run_ranks(communicate_unseen, 2)


def profile_replays(rank: int, size: int, path: str) -> None:
    @fl.capture
    def step(x: np.ndarray) -> np.ndarray:
        return fl.all_reduce(x * 2, scale=1 / size)

    for _ in range(3):
        step(np.ones(3))
    with fl.profile(path):
        assert_same_bits(np.full(3, 2.0), step(np.ones(3)))
    assert step.replays == 1


@pytest.mark.parametrize("size", [1, 2])
def test_the_profile_of_a_replay_has_its_collectives(size: int, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    if size == 1:
        profile_replays(0, 1, str(path))
    else:
        run_ranks(profile_replays, size, str(path))
    assert "all_reduce" in path.read_text(encoding="utf-8")
