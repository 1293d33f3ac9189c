"""Captured steps of modules that ranks have in common, and of differentiable collectives."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.parallel import functional
from tests.distributed.harness import run_ranks
from tests.tape.steps import assert_same_bits, twins
from tests.tape.test_ranks import data


def shard(model: Any) -> None:
    fl.fully_shard(model)


def shard_and_step_in_backward(model: Any) -> None:
    fl.fully_shard(model, step_in_backward=True)


def cut(model: Any) -> None:
    fl.parallel.shard_linear(model[0], "column")
    fl.parallel.shard_linear(model[2], "row")


def sharded(rank: int, size: int, divide: Any, optimizer_type: Any) -> tuple[str, int]:
    def make_step() -> tuple[Any, ...]:
        fl.set_seed(0)
        layers = fl.nn.Linear(6, 400_000), fl.nn.ReLU(), fl.nn.Linear(400_000, 3)
        model = fl.nn.Sequential(*layers)
        divide(model)
        optimizer = optimizer_type(model.params(), 0.01)
        criterion = fl.nn.MeanSquaredError()

        def step(x: np.ndarray, y: np.ndarray) -> Any:
            optimizer.zero_grad()
            loss = criterion(model(fl.input(x)), fl.no_grad(y))
            loss.backward()
            optimizer.step()
            return loss

        return step, model.params(), optimizer

    eager, captured = twins(make_step)
    xs, ys = data(0 if divide is cut else rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for x, y in zip(xs[:8], ys[:8], strict=True):
            assert_same_bits(eager.step(x, y), captured.step(x, y))
            assert_same_bits(eager.state(), captured.state())
    return str(captured.step.reason), int(captured.step.replays)


@pytest.mark.parametrize("divide", [shard, cut])
@pytest.mark.parametrize(
    "kind",
    [
        fl.optim.AdamOptimizer,
        pytest.param(fl.optim.NovogradOptimizer, marks=pytest.mark.slow),
    ],
)
def test_sharded_modules_are_replayed(divide: Any, kind: Any) -> None:
    assert run_ranks(sharded, 2, divide, kind) == [("", 5)] * 2


def test_a_step_in_backward_stays_eager() -> None:
    found = run_ranks(sharded, 2, shard_and_step_in_backward, fl.optim.AdamOptimizer)
    assert found == [("it uses a module sharded in a way that is not recorded", 0)] * 2


def without_sync(rank: int, size: int) -> tuple[str, int]:
    """Two passes, the first within no_sync, of a module with more in it than its parameters."""

    def make_step() -> tuple[Any, ...]:
        fl.set_seed(0)
        layers = fl.nn.Linear(6, 400_000), fl.nn.Dropout(0.3), fl.nn.Linear(400_000, 3)
        model = fl.nn.Sequential(*layers)
        fl.fully_shard(model)
        scale = fl.param(np.ones(3, np.float32))  # of each rank's own
        optimizer = fl.optim.SGDOptimizer([*model.params(), scale], 1e-6, momentum=0.9)
        criterion = fl.nn.MeanSquaredError()

        def step(x: np.ndarray, y: np.ndarray) -> Any:
            for part in range(2):
                with fl.no_sync(model) if part == 0 else contextlib.nullcontext():
                    rows = slice(2 * part, 2 * part + 2)
                    out = model(fl.input(x[rows])) * scale
                    criterion(out, fl.no_grad(y[rows])).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step, [*model.params(), scale], optimizer

    eager, captured = twins(make_step)
    for number, (x, y) in enumerate(zip(*data(rank), strict=True)):
        for each in (eager, captured):
            fl.set_seed(number)
            each.step(x, y)
        assert_same_bits(eager.state(), captured.state())
    return str(captured.step.reason), int(captured.step.replays)


def test_passes_within_no_sync() -> None:
    assert run_ranks(without_sync, 2) == [("", 21)] * 2


VERBS: dict[str, Callable[[fl.Variable, int], fl.Variable]] = {
    "all_reduce": lambda v, rank: functional.all_reduce(v),
    "reduce_scatter": lambda v, rank: functional.reduce_scatter(v),
    "all_gather": lambda v, rank: functional.all_gather(v),
    "all_to_all": lambda v, rank: functional.all_to_all(v),
    "all_to_all of parts": lambda v, rank: functional.all_to_all(v, [1, 3]),
    "broadcast": lambda v, rank: functional.broadcast(v, 1),
    "messages": lambda v, rank: (
        functional.send(v, 1) if rank == 0 else functional.recv(v.array, 0) + v
    ),
}


def differentiable(rank: int, size: int) -> dict[str, Any]:
    found = {}
    for name, verb in VERBS.items():

        def make_step(verb: Callable[..., fl.Variable] = verb) -> tuple[Any, ...]:
            weight = fl.param(np.ones((6, 3), np.float32))
            optimizer = fl.optim.SGDOptimizer([weight], 0.1)

            def step(x: np.ndarray) -> Any:
                optimizer.zero_grad()
                loss = (verb(fl.input(x) @ weight, rank) ** 2).sum()
                loss.backward()
                optimizer.step()
                return loss

            return step, [weight], optimizer

        eager, captured = twins(make_step)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for batch in data(rank)[0][:8]:
                assert_same_bits(eager.step(batch), captured.step(batch))
                assert_same_bits(eager.state(), captured.state())
        found[name] = captured.step.reason or captured.step.replays
    return found


def test_differentiable_collectives() -> None:
    for found in run_ranks(differentiable, 2):
        assert found == dict.fromkeys(VERBS, 5)


def exchange(rank: int, size: int) -> tuple[str, int]:
    def make_step() -> tuple[Any, ...]:
        def step(x: np.ndarray) -> Any:
            sent, peer = x * 2, 1 - rank
            got = fl.sendrecv(sent, peer, sent * 0, peer)
            sending = fl.isend(got + 1, peer, 3)
            other = fl.irecv(sent * 0, peer, 3).wait()
            sending.wait()
            return got + other, fl.all_gather(other * 2, async_op=True).wait()

        return step, []

    eager, captured = twins(make_step)
    for batch in data(rank)[0][:8]:
        assert_same_bits(eager.step(batch), captured.step(batch))
    return str(captured.step.reason), int(captured.step.replays)


def test_messages() -> None:
    assert run_ranks(exchange, 2) == [("", 5)] * 2


def begin_and_leave(rank: int, size: int) -> str:
    works = []

    def step(x: np.ndarray) -> Any:
        works.append(fl.all_reduce(x * 2, async_op=True))
        return x + 1

    captured = fl.capture(step)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for batch in data(rank)[0][:5]:
            captured(batch)
    expected = [2 * sum(data(each)[0][number] for each in range(size)) for number in range(5)]
    assert_same_bits(expected, [work.wait() for work in works])
    return str(captured.reason)


def test_what_is_begun_has_to_end_in_the_step() -> None:
    for reason in run_ranks(begin_and_leave, 2):
        assert "does not wait for" in reason
