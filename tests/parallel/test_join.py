"""Unequal numbers of batches: results equal one process that weights by samples."""

import contextlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.distributed import conformance
from tests.distributed.conformance import on_ranks
from tests.distributed.harness import run_outcomes
from tests.tables import for_each

BACKENDS = ["gloo", "shm"]
# Backend, and number of batches of each rank in each use of join.
SCHEDULES: list[tuple[str, list[tuple[int, ...]]]] = [
    *(("single", [(3,)]), ("single", [(0,)]), ("gloo", [(3, 1)]), ("gloo", [(0, 0)])),
    *(("gloo", [(2, 5, 0)]), ("shm", [(0, 2)]), ("shm", [(2, 2)]), ("shm", [(4, 1, 4)])),
    ("shm", [(1, 3, 0), (2, 2, 2), (0, 0, 1)]),
]


class Counting(fl.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = fl.nn.Sequential(fl.nn.Linear(6, 8), fl.nn.Tanh(), fl.nn.Linear(8, 3))
        self.add_buffer("passes", np.zeros(1, np.int64))

    def forward(self, x: Any) -> Any:
        self.passes += 1
        return self.layers(x)


def build() -> Any:
    fl.set_seed(0)
    return Counting().astype(np.float64)


def batch(rank: int, step: int) -> tuple[Any, Any]:
    random = np.random.default_rng([rank, step])
    count = 1 + (3 * rank + 5 * step) % 7
    return random.standard_normal((count, 6)), random.standard_normal((count, 3))


def backward(model: Any, x: Any, y: Any) -> None:
    fl.nn.MeanSquaredError()(model(fl.input(x)), fl.no_grad(y)).backward()


def sgd(model: Any) -> Any:
    return fl.optim.SGDOptimizer(model.params(), 0.05, momentum=0.9)


def result(model: Any, optimizer: Any) -> list[Any]:
    arrays = [*model.state_dict().values(), *optimizer.state_dict().get("velocity", ())]
    return [array.copy() for array in arrays]


def alone(*schedules: tuple[int, ...], weighted: bool = True, total: float = 0) -> list[Any]:
    """Train in one process; without weights, gradient sums are divided by ``total``."""
    model = build()
    optimizer = sgd(model)
    for schedule in schedules:
        for step in range(max(schedule)):
            batches = [batch(rank, step) for rank, n in enumerate(schedule) if step < n]
            weights = [len(x) if weighted else 1 for x, _ in batches]
            parts = [gradients(model, x, y) for x, y in batches]
            for param, *grads in zip(model.params(), *parts, strict=True):
                summed = sum(w * g for w, g in zip(weights, grads, strict=True))
                param.grad = summed / (total or sum(weights))
            optimizer.step()
    model.passes[:] = sum(max(schedule) for schedule in schedules)
    return result(model, optimizer)


def gradients(model: Any, x: Any, y: Any) -> list[Any]:
    model.zero_grad()
    backward(model, x, y)
    return [param.grad for param in model.params()]


def check(results: list[Any], expected: list[Any], tolerance: float = 1e-10) -> None:
    for got in results:
        for array, first, want in zip(got, results[0], expected, strict=True):
            np.testing.assert_array_equal(array, first)
            np.testing.assert_allclose(array, want, rtol=0, atol=tolerance)


def train(
    rank: int, size: int, *schedules: tuple[int, ...], count: bool = True, **options: Any
) -> Any:
    model = build()
    optimizer = sgd(model)
    if "reducer" not in options:
        options["bucket_bytes"] = 200  # one bucket per parameter
    fl.distribute_module_grads(model, **options)
    for schedule in schedules:
        with fl.join(model, optimizer) as joined:
            for step in range(schedule[rank]):
                x, y = batch(rank, step)
                if count:
                    joined.count(len(x))
                optimizer.zero_grad()
                backward(model, x, y)
                optimizer.step()
    return result(model, optimizer)


@pytest.mark.parametrize(("backend", "schedules"), SCHEDULES)
def test_join_trains_like_one_process_with_weights(
    pool: Any, backend: str, schedules: list[tuple[int, ...]]
) -> None:
    world = pool(len(schedules[0]), **conformance.BACKENDS[backend][1])
    check(world.run(train, *schedules), alone(*schedules))


# Training of rank 0 and rank 1, and the divisor of the sum of their gradients.
SUMS: dict[str, tuple[Callable[[], dict[str, Any]], float]] = {
    "no counts": (lambda: {"count": False}, 0),  # all ranks with data have equal weights
    "scale": (lambda: {"scale": 0.5}, 2),
    "inline": (lambda: {"reducer": fl.InlineReducer(0.5)}, 2),
    "coalescing": (lambda: {"reducer": fl.CoalescingReducer(0.5, bucket_bytes=500)}, 2),
}


@pytest.mark.parametrize("kind", SUMS)
@on_ranks(("shm", 2))
def test_join_without_counts_or_with_a_scale(rank: int, size: int, kind: str) -> None:
    schedule, (mode, total) = (1, 3), SUMS[kind]
    results = fl.all_gather_object(train(rank, size, schedule, **mode()))
    check(results, alone(schedule, weighted=False, total=total))


# Tolerances of the parameters after a few steps.
HOOKS = {"Float16Compression": 1e-2, "Bfloat16Compression": 1e-2, "PowerSGDCompression": 5e-2}


@on_ranks(("shm", 3))
@for_each("name", HOOKS)
def test_join_works_with_compression_hooks(rank: int, size: int, name: str) -> None:
    """Ranks without data send zeros and their remaining errors."""
    results = train(rank, size, (1, 3, 0), hook=getattr(fl, name)())
    check(fl.all_gather_object(results), alone((1, 3, 0)), HOOKS[name])


def accumulate(rank: int, size: int, steps: int) -> Any:
    """Train ``steps - r`` steps of two passes on rank r; the first pass is not synchronised."""
    model = build()
    optimizer = sgd(model)
    fl.distribute_module_grads(model)
    with fl.join(model, optimizer) as joined:
        for step in range(steps - rank):
            optimizer.zero_grad()
            for half in range(2):
                x, y = batch(rank, 2 * step + half)
                joined.count(len(x))
                with contextlib.nullcontext() if half else fl.no_sync(model):
                    backward(model, x, y)
            optimizer.step()
        with fl.no_sync(model):
            backward(model, x, y)  # incomplete, so not used
    return [param.array.copy() for param in model.params()]


def test_join_adds_counts_of_accumulated_passes(pool: Any) -> None:
    model = build()
    optimizer = sgd(model)
    for step in range(3):
        summed, samples = [np.zeros_like(param.array) for param in model.params()], 0
        for rank in (0, 1):
            if step < 3 - rank:
                pair = [batch(rank, 2 * step + half) for half in range(2)]
                count = sum(len(x) for x, _ in pair)
                samples += count
                for grads in (gradients(model, x, y) for x, y in pair):
                    summed = [s + count * g for s, g in zip(summed, grads, strict=True)]
        for param, grad in zip(model.params(), summed, strict=True):
            param.grad = grad / samples
        optimizer.step()
    check(pool(2).run(accumulate, 3), [param.array for param in model.params()])


@on_ranks(("shm", 2))
def test_join_copies_optimizer_state_of_the_last_training_rank(rank: int, size: int) -> None:
    model = build()
    optimizer = fl.optim.AdamOptimizer(model.params(), 0.01 * (rank + 1))
    fl.distribute_module_grads(model)
    with fl.join(model, optimizer):
        for step in range(rank):
            optimizer.zero_grad()
            backward(model, *batch(rank, step))
            optimizer.step()
    state = optimizer.state_dict()
    assert (state["lr"], state["steps"]) == (0.02, [1] * 4)
    assert type(state["steps"][0]) is int
    for other in fl.all_gather_object(state):
        np.testing.assert_equal(other, state)


@on_ranks(("shm", 2))
def test_join_ignores_a_batch_without_samples(rank: int, size: int) -> None:
    """The mean over no samples is NaN, which a count of 0 excludes."""
    model = build()
    fl.distribute_module_grads(model)
    with fl.join(model) as joined, np.errstate(invalid="ignore", divide="ignore"):
        x, y = batch(0, 0)
        joined.count(len(x) if rank else 0)
        loss = fl.nn.MeanSquaredError()(model(fl.input(x)), fl.no_grad(y))
        loss.backward(np.array(1.0 if rank else np.nan))
    check([[param.grad for param in model.params()]], gradients(build(), *batch(0, 0)))


@on_ranks(("shm", 2))
def test_nested_join_raises_value_error_and_changes_nothing(rank: int, size: int) -> None:
    models = build(), build()
    for model in models:
        fl.distribute_module_grads(model)
    with fl.join(models[0]):
        for model in models:
            with pytest.raises(ValueError, match="expected at most one open join"), fl.join(model):
                raise AssertionError("was not refused")
        if rank:
            backward(models[0], *batch(rank, 0))
    assert models[0].params()[0].grad is not None
    check([train(rank, size, (1, 2))], alone((1, 2)))


def joined_passes(model: Any, rank: int, passes: int, after: Any) -> None:
    with fl.join(model):
        for step in range(passes):
            backward(model, *batch(rank, step))
            after()


def fail() -> None:
    raise ZeroDivisionError("on purpose")


@on_ranks(("shm", 2))
def test_exception_leaves_the_body_of_join_at_once(rank: int, size: int) -> None:
    model = build()
    fl.distribute_module_grads(model)
    with pytest.raises(ZeroDivisionError):
        joined_passes(model, rank, 2, fail)
    # Both left by the exception, so no call is pending and the module is unchanged.
    backward(model, *batch(rank, 1))
    with fl.join(model):
        pass


def fail_on_one(rank: int, size: int, error: type[BaseException]) -> str:
    model = build()
    fl.distribute_module_grads(model)
    expected = fl.errors.PeerLostError, fl.errors.CollectiveTimeoutError
    try:
        with fl.join(model):
            backward(model, *batch(rank, 0))
            if rank == 1:
                raise error("on purpose")
            if rank == 2:
                backward(model, *batch(rank, 1))
    except expected as caught:
        return f"{type(caught).__name__}: {caught}"
    return "joined as if nothing had happened"


@pytest.mark.parametrize("backend", ["gloo", pytest.param("shm", marks=pytest.mark.slow)])
def test_rank_that_raises_leaves_join(backend: str) -> None:
    world = {"params": {"BACKEND": backend, "TIMEOUT": 0.5}}
    outcomes = run_outcomes(fail_on_one, 3, ZeroDivisionError, **world)
    assert outcomes[1].kind == "raised"
    assert "on purpose" in outcomes[1].report()
    for rank in (0, 2):
        assert "TimeoutError: " in outcomes[rank].value
        assert "rank 1 did not join" in outcomes[rank].value


@pytest.mark.parametrize("backend", BACKENDS)
def test_join_raises_peer_lost_error_if_a_rank_exits(backend: str) -> None:
    outcomes = run_outcomes(fail_on_one, 3, SystemExit, params={"BACKEND": backend})
    for rank in (0, 2):
        reported = outcomes[rank].value  # on Gloo also the other rank, if it has exited
        assert re.match(r"PeerLostError: .*: lost ranks? ([02], )?1\b", reported), reported


@on_ranks(("shm", 2))
def test_join_raises_on_every_rank_for_other_collectives(rank: int, size: int) -> None:
    model = build()
    fl.distribute_module_grads(model)
    with pytest.raises(
        fl.errors.MismatchError, match=r"called all_reduce\(float64 \(2,\)"
    ) as caught:
        joined_passes(model, rank, rank, lambda: fl.all_reduce(np.zeros(2)))
    assert rank or "join: rank 0 of 2 has no more data" in str(caught.value)
    fl.barrier()


def test_join_raises_for_invalid_arguments() -> None:
    model = build()
    with pytest.raises(ValueError, match="distribute_module_grads"), fl.join(model):
        pass
    net = fl.tagi.Sequential(fl.tagi.Linear(2, 2))
    with pytest.raises(TypeError, match=r"fl\.tagi\.DDPSequential, got Sequential"), fl.join(net):  # type: ignore[arg-type]
        pass
    fl.distribute_module_grads(model)
    with pytest.raises(TypeError, match="optimizer"), fl.join(model, "sgd"):  # type: ignore[arg-type]
        pass
    with fl.join(model) as joined:
        joined.count(np.int32(3))
        with pytest.raises(ValueError, match="at least 0"):
            joined.count(-1)
        with pytest.raises(TypeError, match="join: count: samples must be an integer, got float"):
            joined.count(1.5)  # type: ignore[arg-type]
