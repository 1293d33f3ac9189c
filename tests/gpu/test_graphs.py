"""Captured steps on GPUs: CUDA graphs next to eager steps, with one rank and with several."""

import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.distributed.harness import run_outcomes
from tests.gpu import verbs
from tests.gpu.conftest import world

pytestmark = pytest.mark.gpu

STEPS, ROWS, FEATURES = 8, 16, 10
TIMEOUT = 6.0

Optimizers = dict[str, Callable[[Any], Any]]
OPTIMIZERS: Optimizers = {
    "sgd": lambda params: fl.optim.SGDOptimizer(params, 1e-2, momentum=0.9),
    "adam": lambda params: fl.optim.AdamOptimizer(params, 1e-2),
}


class Training:
    """A perceptron on the GPU with a step, captured or eager."""

    def __init__(
        self, optimizer: str, captured: bool, check: bool = False, drop: float = 0
    ) -> None:
        fl.set_seed(3)
        self.model = fl.nn.Sequential(
            *(fl.nn.Linear(FEATURES, 32), fl.nn.ReLU(), fl.nn.Dropout(drop), fl.nn.Linear(32, 1))
        )
        self.model.to(fl.distributed.use_local_device())
        self.optimizer = OPTIMIZERS[optimizer](self.model.params())
        self.meter = fl.meter.AverageValueMeter()
        criterion = fl.nn.MeanSquaredError()

        def step(x: Any, y: Any) -> Any:
            self.optimizer.zero_grad()
            loss = criterion(self.model(fl.input(x)), fl.no_grad(y))
            loss.backward()
            self.optimizer.step()
            self.meter.add(loss)
            return loss

        def step_of_example(x: Any, y: Any) -> None:
            step(x, y)

        self.step: Any = fl.capture(step, check=check) if captured else step
        self.example: Any = fl.capture(step_of_example) if captured else step_of_example

    def state(self) -> list[Any]:
        """Return all arrays that the steps change."""
        params = self.model.params()
        arrays: list[Any] = [*(param.array for param in params), *(param.grad for param in params)]
        return [*(array.get() for array in arrays), *self.meter.value()]


def batches(rank: int = 0, count: int = STEPS, rows: int = ROWS) -> Iterator[tuple[Any, Any]]:
    random = np.random.default_rng([7, rank])
    for _ in range(count):
        x = random.random((rows, FEATURES), dtype=np.float32)
        yield verbs.on_gpu(x), verbs.on_gpu(x.sum(1, keepdims=True))


def train(training: Training, rank: int = 0, count: int = STEPS) -> list[float]:
    """Return the losses of steps, with another learning rate for the last steps."""
    losses = []
    for number, batch in enumerate(batches(rank, count)):
        if number == count - 2:
            training.optimizer.lr = 5e-3
        losses.append(training.step(*batch))
    return [loss.scalar() for loss in losses]


def compare(rank: int, size: int, optimizer: str, drop: float = 0) -> None:
    """Check that captured and eager steps have the same bits, each in its own training."""
    results = []
    for captured in (False, True):
        training = Training(optimizer, captured, drop=drop)
        if size > 1:
            fl.broadcast_parameters(training.model)
            fl.distribute_module_grads(training.model)
        fl.set_seed(5)
        losses = train(training, rank)
        results.append([*losses, *training.state()])
        if captured:
            assert not training.step.reason
            assert training.step.replays == STEPS - 1
    for eager, replayed in zip(*results, strict=True):
        np.testing.assert_array_equal(eager, replayed)


def forms(rank: int, size: int) -> None:
    """Run batches of another length, train() and eval(), a reset meter; then check=True."""
    training = Training("sgd", captured=True)
    training.model.eval()  # the first call adds attributes to the layers
    training.model.train()
    for rows in (ROWS, ROWS, 3, 3, ROWS, 3):
        for batch in batches(rank, 1, rows):
            training.step(*batch)
    assert training.step.replays == 4
    training.model.eval()
    training.model.train()
    training.meter.reset()
    for batch in batches(rank, 1):
        loss = training.step(*batch)
    assert training.step.replays == 5
    assert training.meter.value()[0] == pytest.approx(loss.scalar())
    checked = Training("adam", captured=True, check=True)
    train(checked, rank)
    assert checked.step.replays == STEPS - 1


def stays_eager(rank: int, size: int) -> dict[str, str]:
    """Return the reasons why steps stay eager; check that their results are correct."""
    x = verbs.on_gpu(np.ones(3))
    numbers = np.zeros(1)

    def reads(x: Any) -> Any:
        return x * float(x.sum())

    def copies(x: Any) -> Any:
        return x + verbs.cupy().asarray(np.arange(3.0))

    def changes(x: Any) -> Any:
        x += 1
        return x * 2

    def counts(x: Any) -> Any:
        numbers[0] += 1
        return x * 1

    reasons = {}
    for step in (reads, copies, changes, counts):
        captured: Any = fl.capture(step)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for number in range(4):
                scaled, eager = x * number, x * number
                np.testing.assert_array_equal(captured(scaled).get(), step(eager).get())
                np.testing.assert_array_equal(scaled.get(), eager.get())
        reasons[step.__name__] = captured.reason
    assert numbers[0] == 8
    return reasons


def test_step_stays_eager_if_cuda_cannot_capture_it(ranks: Any) -> None:
    if ranks.size > 1:
        return
    (reasons,) = ranks.run(stays_eager)
    assert reasons["reads"]
    assert "copied to the GPU" in reasons["copies"]
    assert "changed in place" in reasons["changes"]
    assert "array of the CPU changes" in reasons["counts"]


def products(rank: int, size: int) -> None:
    """Products that cuBLAS computes: plain, transposed, batched, narrow."""
    cupy, random = verbs.cupy(), np.random.default_rng(0)
    for dtype in ("float32", "float64", "float16"):
        a = verbs.on_gpu(random.standard_normal((5, 7, 9)).astype(dtype))
        b = verbs.on_gpu(random.standard_normal((5, 9, 4)).astype(dtype))

        def step(a: Any, b: Any) -> Any:
            first, second = a[0], b[0]
            return [
                first @ second,
                second.T @ first.T,
                first.T.dot(first),
                cupy.matmul(a, b),
                a @ second,
                cupy.ascontiguousarray(second.T).dot(first.T),
            ]

        captured: Any = fl.capture(step)
        for _ in range(3):
            result = captured(a, b)
        assert captured.replays == 2, captured.reason
        tolerance = 1e-2 if dtype == "float16" else 1e-5
        for replayed, eager in zip(result, step(a, b), strict=True):
            np.testing.assert_allclose(replayed.get(), eager.get(), tolerance, tolerance)


def uneven(rank: int, size: int) -> list[float]:
    """Give one rank a shorter batch from time to time; then all ranks run the step eagerly."""
    training = Training("sgd", captured=True)
    fl.distribute_module_grads(training.model)
    for number in range(6):
        rows = 3 if number == 4 and rank == 0 else ROWS
        for batch in batches(number, 1, rows):
            training.step(*batch)
    assert training.step.replays == 4, training.step.reason
    return [float(param.array.sum()) for param in training.model.params()]


def test_ranks_run_eagerly_if_one_has_another_form(ranks: Any) -> None:
    if ranks.size == 2:
        one, other = ranks.run(uneven)
        assert one == other


def of_verbs(rank: int, size: int) -> None:
    """Call verbs in a step in two groups, which may be closed while the graph exists."""
    group = fl.new_group(range(size))

    def step(x: Any) -> Any:
        fl.all_reduce(x * 1, async_op=True).wait()
        y = fl.all_reduce(x * 2, group=group)
        return fl.all_gather(y), fl.broadcast(y + rank, root=size - 1)

    captured: Any = fl.capture(step)
    for number in range(4):
        gathered, sent = captured(verbs.on_gpu(np.full(2, float(rank + number))))
        total = sum(2.0 * (other + number) for other in range(size))
        assert gathered.get().tolist() == [total] * 2 * size
        assert sent.get().tolist() == [total + size - 1] * 2
    assert captured.replays == 3, captured.reason
    group.close()
    fl.barrier()


PROGRAMS: dict[str, tuple[tuple[int, ...], Callable[..., None], tuple[Any, ...]]] = {
    "SGD has the bits of the eager step": ((1, 2), compare, ("sgd",)),
    "Adam has the bits of the eager step": ((1, 2), compare, ("adam",)),
    "dropout draws anew in each replay": ((1,), compare, ("sgd", 0.5)),
    "other forms of arguments are captured by themselves": ((1,), forms, ()),
    "products are right": ((1,), products, ()),
    "verbs": ((2,), of_verbs, ()),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_captured_steps_equal_eager_steps(ranks: Any, name: str) -> None:
    sizes, program, arguments = PROGRAMS[name]
    if ranks.size in sizes:
        ranks.run(program, *arguments)


def worlds(rank: int, size: int, meeting: Path) -> list[float]:
    """End the world with a graph, and capture the step again in the next world."""
    training, sums = None, []
    for number in range(2):
        path = {"FILE_PATH": str(meeting / str(number))}
        fl.distributed_init(fl.DistributedInit.FILE_SYSTEM, rank, size, path)
        training = training or Training("sgd", captured=True)
        fl.distribute_module_grads(training.model)
        train(training, rank, 4)
        assert training.step.replays == 3 * (number + 1), training.step.reason
        sums.append(float(training.model.params()[0].array.sum()))
        fl.distributed_shutdown()
    return sums


def test_graphs_are_destroyed_with_their_world(tmp_path: Path) -> None:
    outcomes = run_outcomes(worlds, 2, tmp_path, init=None, env=world(2)["env"], deadline=100.0)
    assert all(outcome.ok for outcome in outcomes), "\n".join(o.report() for o in outcomes)
    assert outcomes[0].value == outcomes[1].value


def ends_in_replays(rank: int, size: int, end_kind: str) -> tuple[str, str, float]:
    """Let rank 1 die, stop or leave the loop while rank 0 replays."""
    training = Training("sgd", captured=True)
    fl.distribute_module_grads(training.model)
    train(training, rank, 4)
    processes: list[int] = fl.all_gather_object(os.getpid())
    if rank == 1 and end_kind != "leaves":
        os.kill(os.getpid(), signal.SIGKILL if end_kind == "dies" else signal.SIGSTOP)

    def go_on() -> None:
        if rank == 1 and end_kind == "leaves":
            fl.all_reduce(verbs.on_gpu(np.ones(3)))
            fl.sync_distributed()
        while True:
            train(training, rank, 4)
            fl.sync_distributed()

    began = time.monotonic()
    with pytest.raises(fl.errors.DistributedError) as caught:
        go_on()
    if rank == 0 and end_kind == "stops":
        os.kill(processes[1], signal.SIGCONT)
    with suppress(fl.errors.DistributedError):  # raised again by the pending calls
        fl.distributed_shutdown()
    return type(caught.value).__name__, str(caught.value), time.monotonic() - began


@pytest.mark.parametrize(
    ("end_kind", "kind", "seconds"),
    [
        ("dies", "PeerLostError", 4.0),
        ("stops", "CollectiveTimeoutError", 2 * TIMEOUT),
        ("leaves", "MismatchError", 4.0),
    ],
)
def test_survivors_name_a_rank_that_dies_during_replays(
    end_kind: str, kind: str, seconds: float, record_property: Callable[[str, object], None]
) -> None:
    outcomes = run_outcomes(
        ends_in_replays, 2, end_kind, deadline=60.0, **world(2, TIMEOUT=TIMEOUT)
    )
    assert outcomes[0].ok, outcomes[0].report()
    result, message, took = outcomes[0].value
    record_property(end_kind, f"{result} after {took:.2f} s")
    assert result == kind, message
    assert "rank 1" in message
    assert took < seconds


def times(rank: int, size: int) -> dict[str, float]:
    """Return the host's and the total microseconds of a step like the step of the example."""
    cupy = verbs.cupy()
    results = {}
    for captured in (False, True):
        training = Training("sgd", captured)
        if size > 1:
            fl.distribute_module_grads(training.model)
        batches_of_rank = list(batches(rank, 1))
        for _ in range(10):
            training.example(*batches_of_rank[0])
        count, series = 5, []  # more would fill CUDA's queue, because the ranks share the GPU
        for _ in range(5):
            cupy.cuda.Device().synchronize()
            fl.barrier()
            began = time.perf_counter()
            for _ in range(count):
                training.example(*batches_of_rank[0])
            host = time.perf_counter() - began
            cupy.cuda.Device().synchronize()
            series.append((host / count * 1e6, (time.perf_counter() - began) / count * 1e6))
        name = "captured" if captured else "eager"
        results[f"{name}, host"], results[f"{name}, all"] = np.median(series, axis=0)
    return results


def test_step_time_is_reported(ranks: Any, record_property: Callable[[str, object], None]) -> None:
    """Measures without a bound."""
    if ranks.size < 4:
        for name, microseconds in ranks.run(times)[0].items():
            record_property(f"{ranks.size} ranks, {name}", f"{microseconds:.1f} us")
