"""Steps on a GPU, captured into CUDA graphs: what the host does, shown with a stand-in."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py import random
from flashlight_py.distributed.failures import journal
from flashlight_py.distributed.start.world import current_world
from flashlight_py.tape import cublas
from tests.cupy_stand_in import StandInArray, StandInCupy, forget_kernels
from tests.distributed import nccl_stand_in
from tests.distributed.harness import run_ranks
from tests.tape.cublas_stand_in import StandInCublas
from tests.tape.steps import optimizers

STEPS = 12


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInCupy]:
    library = StandInCupy(ordered=True)
    products = StandInCublas(cublas.ffi())
    monkeypatch.setitem(sys.modules, "cupy", library)
    monkeypatch.setattr(cublas, "library", lambda: products)
    forget_kernels()
    random.set_seed(0)
    yield library
    forget_kernels()
    random.set_seed(0)


def on_gpu(cupy: StandInCupy, *models: Any) -> None:
    for model in models:
        for param in model.params():
            param.data = cupy.asarray(param.data)


def batches(cupy: StandInCupy, steps: int = STEPS) -> list[tuple[Any, Any]]:
    draw = np.random.default_rng(1)
    shapes = (4, 6), (4, 3)
    return [
        tuple(cupy.asarray(draw.random(shape).astype(np.float32)) for shape in shapes)  # type: ignore[misc]
        for _ in range(steps)
    ]


def make(
    cupy: StandInCupy,
    optimizer: Callable[[list[fl.Variable]], Any] | None = None,
    dropout: float = 0.0,
) -> tuple[Any, Any, Any]:
    """Return a step, its model and its optimizer."""
    fl.set_seed(0)
    layers = [fl.nn.Linear(6, 5), fl.nn.ReLU(), fl.nn.Linear(5, 3)]
    if dropout:
        layers.insert(2, fl.nn.Dropout(dropout))
    model = fl.nn.Sequential(*layers)
    on_gpu(cupy, model)
    stepper = (optimizer or (lambda params: fl.optim.SGDOptimizer(params, 0.1, 0.9)))(
        model.params()
    )
    criterion = fl.nn.MeanSquaredError()

    def step(x: Any, y: Any) -> fl.Variable:
        stepper.zero_grad()
        loss = criterion(model(fl.input(x)), fl.no_grad(y))
        loss.backward()
        stepper.step()
        return loss

    return step, model, stepper


def bits(*values: Any) -> list[bytes]:
    found = []
    for value in values:
        array = value.data if isinstance(value, fl.Variable) else value
        found.append(array.tobytes() if isinstance(array, StandInArray) else repr(array).encode())
    return found


def run(step: Any, model: Any, calls: list[Any]) -> list[Any]:
    """The bits of what each call returns, and of what they leave behind."""
    returned = [bits(step(*call)) for call in calls]
    return [*returned, bits(*(each for p in model.params() for each in (p, p.grad)))]


def compare(
    cupy: StandInCupy, maker: Callable[[], tuple[Any, Any, Any]], replays: int = STEPS - 2
) -> Any:
    eager, model, _ = maker()
    expected = run(eager, model, batches(cupy))
    step, model, _ = maker()
    captured = fl.capture(step)
    assert run(captured, model, batches(cupy)) == expected
    assert captured.reason == ""
    assert captured.replays == replays
    return captured


@pytest.mark.parametrize("kind", sorted({*optimizers()} - {"novograd"}))
def test_optimizers(cupy: StandInCupy, kind: str) -> None:
    compare(cupy, lambda: make(cupy, optimizers()[kind]))


def test_an_optimizer_that_reads_a_norm_stays_eager(cupy: StandInCupy) -> None:
    step, _, _ = make(cupy, optimizers()["novograd"])
    captured = fl.capture(step)
    with pytest.warns(RuntimeWarning, match="stays eager"):
        run_all(captured, batches(cupy))
    assert captured.replays == 0


def run_all(step: Any, calls: list[Any]) -> None:
    for call in calls:
        step(*call)


def test_dropout_draws_in_every_replay(cupy: StandInCupy) -> None:
    compare(cupy, lambda: make(cupy, dropout=0.5))


def test_the_learning_rate_is_read_by_every_replay(cupy: StandInCupy) -> None:
    rates = np.linspace(0.1, 0.01, STEPS).tolist()
    expected = []
    step, _, optimizer = make(cupy)
    for rate, call in zip(rates, batches(cupy), strict=True):
        optimizer.lr = rate
        expected.append(bits(step(*call)))
    step, _, optimizer = make(cupy)
    captured = fl.capture(step)
    got = []
    for rate, call in zip(rates, batches(cupy), strict=True):
        optimizer.lr = rate
        got.append(bits(captured(*call)))
    assert got == expected
    assert captured.replays == STEPS - 2


def test_each_shape_is_captured_by_itself(cupy: StandInCupy) -> None:
    step, _, _ = make(cupy)
    captured = fl.capture(step)
    for rows in (4, 2, 4, 2, 4, 2, 4, 2):
        zeros = [cupy.asarray(np.zeros((rows, size), np.float32)) for size in (6, 3)]
        captured(*zeros)
    assert (captured.reason, captured.replays) == ("", 4)


def test_gradients_that_are_added_to_are_found_where_they_are(cupy: StandInCupy) -> None:
    def maker() -> tuple[Any, Any, Any]:
        _, model, _ = make(cupy)
        criterion = fl.nn.MeanSquaredError()

        def step(x: Any, y: Any) -> fl.Variable:
            loss = criterion(model(fl.input(x)), fl.no_grad(y))
            loss.backward()
            return loss

        return step, model, None

    compare(cupy, maker)


def test_a_value_that_is_read_ends_the_capture(cupy: StandInCupy) -> None:
    def fresh() -> Any:
        step, _, _ = make(cupy, lambda params: fl.optim.AdamOptimizer(params, 0.1))

        def reading(x: Any, y: Any) -> float:
            return float(step(x, y).array)

        return reading

    eager = fresh()
    expected = [eager(*call) for call in batches(cupy)]
    captured = fl.capture(fresh())
    with pytest.warns(
        RuntimeWarning, match="reading stays eager: .*the host would wait.* at .*.py:"
    ) as caught:
        got = [captured(*call) for call in batches(cupy)]
    assert got == expected
    assert caught[0].filename == __file__
    assert len(caught) == 1
    assert captured.replays == 0


def test_what_a_step_changes_in_python_ends_the_capture(cupy: StandInCupy) -> None:
    step, _, _ = make(cupy)
    calls = [0]

    def counting(x: Any, y: Any) -> Any:
        calls[0] += 1
        return step(x, y)

    captured = fl.capture(counting)
    with pytest.warns(RuntimeWarning, match=r"it changes what lies on no GPU.*calls"):
        run_all(captured, batches(cupy))
    assert calls == [STEPS]


def test_an_argument_that_is_changed_in_place_ends_the_capture(cupy: StandInCupy) -> None:
    captured = fl.capture(lambda x: x.fill(1))
    array = cupy.asarray(np.zeros(3))

    def call() -> list[float]:
        array[...] = 0
        captured(array)
        return array.get().tolist()  # type: ignore[no-any-return]

    with pytest.warns(RuntimeWarning, match="changes array 0 of its arguments in place"):
        found = [call() for _ in range(3)]
    assert found == [[1, 1, 1]] * 3


def test_a_copy_from_the_host_ends_the_capture(cupy: StandInCupy) -> None:
    constant = np.ones(3)
    captured = fl.capture(lambda x: x + cupy.asarray(constant))
    array = cupy.asarray(np.zeros(3))
    with pytest.warns(RuntimeWarning, match="H2D transfers are disallowed"):
        found = [captured(array).get().tolist() for _ in range(4)]
    assert found == [[1, 1, 1]] * 4


def test_numbers_and_arrays_of_the_host_are_compared(cupy: StandInCupy) -> None:
    factors = np.array([2.0])
    captured = fl.capture(lambda x: x * float(factors[0]))
    array = cupy.asarray(np.ones(3))
    for _ in range(4):
        assert captured(array).get().tolist() == [2, 2, 2]
    factors[0] = 3
    for _ in range(4):
        assert captured(array).get().tolist() == [3, 3, 3]
    assert captured.replays == 5


def test_a_parameter_as_an_argument_is_no_replay(cupy: StandInCupy) -> None:
    step, model, _ = make(cupy)
    captured = fl.capture(step)
    weight = model.params()[0].array
    for call in batches(cupy, 4):
        captured(*call)
    assert captured.replays == 2
    captured(weight[:4].copy(), batches(cupy)[0][1])
    assert captured.replays == 3
    for _ in range(3):
        captured(weight[:4], batches(cupy)[0][1])
    assert captured.replays == 3


def test_another_array_in_a_parameter_is_seen(cupy: StandInCupy) -> None:
    step, model, _ = make(cupy)
    captured = fl.capture(step)
    calls = batches(cupy)
    for call in calls[:4]:
        captured(*call)
    other = model.params()[0]
    other.data = cupy.asarray(np.zeros(other.shape, np.float32))
    before = captured.replays
    captured(*calls[4])
    assert captured.replays == before
    assert other.array.get().any()


def test_an_exception_of_the_step_is_raised_and_it_is_captured_later(cupy: StandInCupy) -> None:
    step, _, _ = make(cupy)
    fails = [False]

    @fl.capture
    def failing(x: Any, y: Any) -> Any:
        loss = step(x, y)
        if fails[0]:
            raise ValueError("of the user")
        return loss

    calls = batches(cupy)
    for call in calls[:4]:
        failing(*call)
    fails[0] = True
    for call in calls[4:8]:
        with pytest.raises(ValueError, match="of the user"):
            failing(*call)
    fails[0] = False
    for call in calls[8:]:
        failing(*call)
    assert (failing.reason, failing.replays) == ("", 6)


def test_labels_are_checked_by_every_replay(cupy: StandInCupy) -> None:
    model = fl.nn.Linear(6, 3)
    on_gpu(cupy, model)
    criterion = fl.nn.CategoricalCrossEntropy()

    @fl.capture
    def step(x: Any, labels: Any) -> Any:
        return criterion(model(fl.input(x)), fl.no_grad(labels))

    x = batches(cupy)[0][0]
    for _ in range(4):
        step(x, cupy.asarray(np.array([0, 1, 2, 1])))
    assert (step.reason, step.replays) == ("", 2)
    with pytest.raises(ValueError, match="7"):
        step(x, cupy.asarray(np.array([0, 1, 7, 1])))


def test_a_step_that_another_thread_replays_runs_as_it_is(cupy: StandInCupy) -> None:
    step, _, _ = make(cupy)
    captured = fl.capture(step)
    calls = batches(cupy)
    for call in calls[:4]:
        captured(*call)
    with captured._gpu.lock:
        captured(*calls[4])
    assert captured.replays == 2
    captured(*calls[5])
    assert captured.replays == 3


def test_recordings_are_kept_of_some_kinds_of_arguments(cupy: StandInCupy) -> None:
    captured = fl.capture(lambda x: x * 2)
    for length in range(1, 21):
        for _ in range(3):
            captured(cupy.asarray(np.ones(length)))
    assert (captured.reason, captured.replays) == ("", 20)
    assert len(captured._gpu._programs) == 16


@pytest.mark.parametrize("a", [(3, 4), (2, 3, 4), (5, 2, 3, 4)])
@pytest.mark.parametrize("b", [(4, 5), (2, 4, 5)])
def test_products_of_every_layout(cupy: StandInCupy, a: Any, b: Any) -> None:
    draw = np.random.default_rng(0)
    x, y = draw.random(a), draw.random(b)
    for one in (x, np.asfortranarray(x), x[::-1]):
        for other in (y, np.ascontiguousarray(y.swapaxes(-1, -2)).swapaxes(-1, -2)):
            products = cublas.Products(cupy.empty(1, np.uint8))
            got = products(StandInArray(one), StandInArray(other))  # type: ignore[arg-type]
            np.testing.assert_array_almost_equal_nulp(got.get(), one @ other, 4)  # type: ignore[attr-defined]


def install(rank: int) -> StandInCupy:
    """Make this process believe in a GPU; NCCL's part is played by the world's CPU backend."""
    nccl_stand_in.install(current_world().group.backend(), ordered=True)
    fl.distributed.use_local_device()
    library: Any = sys.modules["cupy"]
    products = StandInCublas(cublas.ffi())
    cublas.library = lambda: products  # type: ignore[assignment]
    current_world().group.join_gpus()
    return library


def train_ranks(rank: int, size: int, bucket_bytes: int) -> None:
    cupy = install(rank)

    def maker() -> tuple[Any, Any, Any]:
        step, model, optimizer = make(cupy, lambda params: fl.optim.AdamOptimizer(params, 0.1))
        fl.distribute_module_grads(model, bucket_bytes=bucket_bytes)
        return step, model, optimizer

    calls = batches(cupy, STEPS * size)[rank::size]
    eager, model, _ = maker()
    expected = run(eager, model, calls)
    step, model, _ = maker()
    captured = fl.capture(step)
    before = journal.groups()["world"]["calls"]
    assert run(captured, model, calls) == expected
    assert (captured.reason, captured.replays) == ("", STEPS - 2)
    # As many calls as eagerly, compared between the ranks; none while it was captured.
    buckets = 2 if bucket_bytes == 100 else 1
    assert journal.groups()["world"]["calls"] - before == buckets * STEPS


@pytest.mark.parametrize("bucket_bytes", [100, pytest.param(1 << 20, marks=pytest.mark.slow)])
def test_collectives_stand_between_graphs(bucket_bytes: int) -> None:
    run_ranks(train_ranks, 2, bucket_bytes)
