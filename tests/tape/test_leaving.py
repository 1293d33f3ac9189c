"""Steps that stay eager, with their reasons; decisions on a GPU with stand-ins."""

import collections
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.autograd import functions as F
from flashlight_py.distributed.backends.nccl import library as nccl_library
from flashlight_py.distributed.groups.membership import members_of
from flashlight_py.tape.graphs import Graphs, _spanning
from tests.cupy_stand_in import Event, StandInArray, StandInCupy, Stream
from tests.distributed import nccl_stand_in
from tests.distributed.harness import run_ranks
from tests.distributed.nccl_stand_in import StandInLibrary, StandInNccl
from tests.tables import for_each
from tests.tape.steps import compare, trained, training

GENERATOR = np.random.default_rng(0)
X = np.random.default_rng(0).random((50, 4, 3))
WEIGHT = fl.param(X[0])
SCHEDULE = fl.optim.ExponentialLR(fl.optim.SGDOptimizer([WEIGHT], 0.1), 0.5)


READS: dict[str, Callable[[Any, Any], Any]] = {
    "float": lambda loss, x: float(loss),
    "scalar": lambda loss, x: loss.scalar() + 1,
    "if": lambda loss, x: 1 if loss.array > 1 else 2,
    "bool": lambda loss, x: bool(loss),
    "format": lambda loss, x: f"{loss.array:.3f}",
    "asarray": lambda loss, x: np.asarray(loss.array).tolist(),
    "tolist": lambda loss, x: x.tolist(),
    "comparison": lambda loss, x: np.array_equal(x, x),
    "mask": lambda loss, x: x[x > 0.5].sum(),
    "number": lambda loss, x: np.asarray([loss.scalar(), 1.0]),
    "complex": lambda loss, x: complex(x.sum()),
    "byteswap": lambda loss, x: x.copy().byteswap(True),
}


@for_each("read", READS)
def test_reading_a_value_stays_eager_and_names_the_line(read: str) -> None:
    reason = rf'test_leaving\.py:\d+ \("{read}": lambda loss, x:'
    compare(partial(trained, READS[read]), X[:6], reason=reason)


def test_returned_number_does_not_stop_the_capture() -> None:
    compare(partial(trained, lambda loss, x: loss.scalar()), X)


def gradient_of_its_own() -> Any:
    """The gradient of a bias depends only on the seed, which the recording does not contain."""
    model = trained()[1]
    optimizer = fl.optim.SGDOptimizer(model.params(), lr=0.1)

    def step(x: np.ndarray) -> None:
        optimizer.zero_grad()
        model(fl.input(x)).backward(np.ones((4, 1)))
        optimizer.step()

    return step, model


def made_anew() -> Any:
    kept: dict[int, Any] = {}

    def step(x: np.ndarray) -> Any:
        kept[len(kept)] = x * 2
        return x + 1

    return step, kept


def number_of_the_last_one() -> Any:
    holder = SimpleNamespace(total=0.0)

    def step(x: np.ndarray) -> Any:
        holder.total = holder.total + x.sum()
        return x * holder.total

    return step, holder


def count_of_calls() -> Any:
    holder = SimpleNamespace(calls=0)

    def step(x: np.ndarray) -> Any:
        holder.calls += 1
        return x * holder.calls

    return step, holder


def changing_hands(keep: bool) -> Callable[[], Any]:
    def make() -> Any:
        state, before = SimpleNamespace(array=np.arange(12.0).reshape(4, 3)), list[Any]()

        def step(x: np.ndarray) -> Any:
            old = state.array
            state.array = old * 0.5 + x
            if keep:
                before.append(old)
            return None if keep else (old, old[1:])

        return step, state, before

    return make


def norm_that_is_used() -> Any:
    weight = fl.param(np.ones(3))

    def step(x: np.ndarray) -> Any:
        weight.zero_grad()
        (weight * x).sum().backward()
        norm = fl.optim.clip_grad_norm([weight], 1.0)
        return norm > 5  # read

    return step, weight


class Counting(fl.optim.SGDOptimizer):
    count = 0

    def step(self) -> None:
        self.count += 1
        for param in self.params:
            param.array[...] -= param.grad / self.count


def counting() -> Any:
    weight = fl.param(np.ones(3))
    optimizer = Counting([weight], 0.1)
    return training(optimizer, lambda x: (weight * x).sum()), weight


REASONS: dict[str, tuple[Callable[[], Any], str]] = {
    "a gradient of its own": (gradient_of_its_own, "stays eager"),
    "made anew": (made_anew, "puts a new array into"),
    "a count of steps": (counting, "it changes optimizer.count, which no replay does"),
    "a count of calls": (
        count_of_calls, r"changes holder\.calls, .*; keep it in an array, or pass it as an arg",
    ),
    "a number of the last one": (
        number_of_the_last_one, r"puts a new array into holder\.total",
    ),
    "returned and replaced": (changing_hands(False), "it returns the old array of"),
    "kept and replaced": (changing_hands(True), "state.array is replaced"),
    "objects": (lambda: lambda x: (x.astype(object) * 10**30).tolist(), "of object"),
    "a schedule": (lambda: lambda x: SCHEDULE.step(), "a learning rate is set"),
    "a gradient": (lambda: lambda x: setattr(WEIGHT, "grad", x), "an argument becomes a gradient"),
    "a norm that is used": (norm_that_is_used, r"norm > 5  # read"),
    "a seed": (lambda: lambda x: fl.set_seed(1), "generator of random numbers is set"),
    "a state of draws": (
        lambda: lambda x: x * len(fl.random.state_dict()), "state of the random generator is read",
    ),
    "a draw": (
        partial(trained, lambda loss, x: fl.random.generator().random() * 0), r"test_leaving\.py",
    ),
}  # fmt: skip


@for_each("case", REASONS)
def test_capture_reports_the_reason_to_stay_eager(case: str) -> None:
    make, reason = REASONS[case]
    compare(make, X[:10], reason=reason)


def asked_for(x: np.ndarray) -> Any:
    yield x


def noisy(x: np.ndarray) -> Any:
    even = x * np.ones(3)
    return even, x + GENERATOR.normal(size=3)


def checked(x: np.ndarray) -> Any:
    return x * 0 if np.isnan(x).any() else x


# The line that draws the noise, and the replacement to suggest.
ANEW = r"differ each time, at .*py:\d+ \(.*GENERATOR.*\); draw random ones from fl\.random\.gen"
# Steps that always stay eager, with their calls.
ALONE: dict[str, tuple[Callable[..., Any], list[Any], str]] = {
    "draws": (lambda x: x * np.random.random(3), [(X[0],)] * 10, "differ each time"),
    "draws of another": (lambda x: x * GENERATOR.random(3), [(X[0],)] * 10, ANEW),
    "draws beside constants": (noisy, [(X[0],)] * 10, ANEW),
    "a check": (checked, [(X[0],)], r"else x\); check arguments before the call"),
    "a number": (lambda x: x * float(x.sum()), [(X[0],)], r"\); return it, and read it after"),
    "a generator": (asked_for, [(X[0],)], "is a generator or a coroutine function"),
    "ever other values": (
        lambda x, power: x * power, [(X[0], n) for n in range(200)], "were not replayed",
    ),
}  # fmt: skip


@for_each("step calls reason", ALONE.values(), ALONE)
def test_varying_steps_report_the_reason(step: Any, calls: list[Any], reason: str) -> None:
    captured = fl.capture(step)
    with pytest.warns(RuntimeWarning, match=reason):
        results = [captured(*args) for args in calls]
    assert captured.replays == 0
    assert step is not asked_for or next(results[0]) is calls[0][0]


@for_each("layers", [(), (fl.nn.Dropout(0.5),)])
def test_value_checks_raise_in_replays(layers: tuple[Any, ...]) -> None:
    criterion = fl.nn.CategoricalCrossEntropy()

    def make() -> Any:
        fl.set_seed(1)
        model = fl.nn.Sequential(fl.nn.Linear(3, 4), *layers, fl.nn.LogSoftmax()).astype("f8")
        optimizer = fl.optim.AdamOptimizer(model.params(), lr=0.1)
        loss_of = lambda x, y: criterion(model(fl.input(x)), fl.no_grad(y))  # noqa: E731
        return training(optimizer, loss_of), model, optimizer

    calls = [(x, np.arange(4) + 5 * (number % 7 == 6)) for number, x in enumerate(X[:20])]
    compare(make, calls, raises="got target 5 in", eager=3)


DRAWN: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "embedding": (F.embedding, r"IndexError\('embedding: .* 0..2 for axis 0 .* index [567] in"),
    "gather": (lambda x, index: F.gather(x, index[:, None], 1), "gather: .* index [567]"),
    "labels": (
        lambda x, index: F.categorical_cross_entropy(x[index * 0], index), "got target [567] in"
    ),
    "probabilities": (
        lambda x, index: F.binary_cross_entropy(
            F.dropout(x[:1], 0.5), fl.input(index[None] / 4)
        ),
        "ValueError.*targets .* 0 to 1",
    ),
}  # fmt: skip


@for_each("case", DRAWN)
def test_checks_of_random_values_raise_in_replays(case: str) -> None:
    """The generator has changed before the check, so that the replay cannot restart."""
    function, raised = DRAWN[case]

    def make() -> Any:
        fl.set_seed(1)
        table = fl.param(X[:3, 0] / 9)
        optimizer = fl.optim.AdamOptimizer([table], lr=0.001)

        def loss_of(shift: np.ndarray) -> fl.Variable:
            index = fl.random.generator().integers(0, 3, 3) + shift
            loss = (function(table, index) ** 2).sum()
            index += 10**7  # backward() uses a copy
            return loss

        return training(optimizer, loss_of), table, optimizer

    calls = [np.array([5 * (number % 7 == 6)]) for number in range(20)]
    compare(make, calls, raises=raised, eager=3)


def test_exception_in_a_recording_restores_the_state() -> None:
    stop = {"now": True}

    def read(loss: fl.Variable, x: np.ndarray) -> None:
        if stop["now"]:
            raise KeyError("stop")

    change = lambda number, *_: stop.update(now=number == 0)  # noqa: E731
    compare(partial(trained, read), X[:10], change, raises="stop", eager=2)


@for_each("is_checked", [False, True])
@for_each("is_late", [False, True])
def test_failed_replay_keeps_gradients(is_late: bool, is_checked: bool) -> None:
    """A gradient is None if the failed replay has not computed it."""

    def make() -> Any:
        params = [fl.param(np.full((64, 64), 0.1 * number)) for number in range(3)]

        def step(x: np.ndarray, matrix: np.ndarray, index: np.ndarray) -> Any:
            out = fl.input(x)
            for param in params:
                param.zero_grad()
                out = fl.autograd.functions.tanh(out @ param)
            inverse = None if is_late else np.linalg.inv(matrix)
            rows = F.embedding(out, index) if is_checked else out
            (rows * rows).sum().backward()
            return out, inverse if inverse is not None else np.linalg.inv(matrix)

        return step, params

    x = np.random.default_rng(0).random((64, 64))
    calls = [(x, np.eye(2) * (number % 3 != 2), np.arange(9)) for number in range(6)]
    compare(make, calls, raises="Sing", eager=3)


def test_failed_check_keeps_gradients() -> None:
    def make() -> Any:
        param = fl.param(np.full((64, 64), 0.1))

        def step(x: np.ndarray, index: np.ndarray) -> Any:
            rows = F.embedding(fl.input(x) @ param, index + (x * 0).sum(0)[:9].astype(int))
            param.zero_grad()
            (rows * rows).sum().backward()

        return step, param

    calls = [(np.ones((64, 64)), np.arange(9) + 99 * (number == 3)) for number in range(5)]
    compare(make, calls, raises="index", eager=2)


def on_a_gpu(gpu: Any) -> dict[str, Callable[[Any], Any]]:
    ones = gpu.asarray(np.ones(3))
    weight, module, totals = fl.param(ones), fl.nn.Sequential(), (ones,)
    optimizer = fl.optim.SGDOptimizer([weight], 0.1, momentum=0.9)
    module.add_buffer("total", ones)
    return {
        "argument": lambda x: (fl.input(x) * 2).sum(),
        "parameters": training(optimizer, lambda x: (weight * x).sum()),
        "buffer": lambda x: fl.input(module.total + x),
        "tuple": lambda x: float(totals[0].sum()) + x,
    }


@pytest.mark.parametrize("case", ["argument", "parameters", "buffer", "tuple"])
def test_gpu_step_stays_eager_and_warns_once(case: str, strict: Any) -> None:
    calls = map(strict.asarray, X[:5]) if case == "argument" else [2.0] * 5
    compare(lambda: on_a_gpu(strict)[case], calls, reason="the stand-in captures nothing")


class StandInDriver:
    """A CUDA driver that copies immediately and calls ``launched`` for each graph launch."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.launched: Callable[[], None] = lambda: None
        self.is_capturing = False
        ffi = nccl_stand_in._native.load_extension("nccl").ffi
        functions: Any = StandInNccl(ffi, None)
        functions.cuMemcpyDtoDAsync_v2 = self._copy
        functions.cuGraphLaunch = lambda *_: self.launched() or 0
        functions.cuEventRecord = lambda *_: 0
        self._ffi, library = ffi, StandInLibrary(ffi, functions, "stand-in", 22809)
        patch.setattr(nccl_library, "driver_address", library.address)
        patch.setattr(Stream, "begin_capture", lambda _: setattr(self, "is_capturing", True), False)
        patch.setattr(Stream, "end_capture", self._end, False)
        patch.setattr(Stream, "record", lambda _: Event(), False)
        cupy: Any = sys.modules["cupy"]
        patch.setattr(cupy, "empty", lambda shape, dtype: gpu(np.empty(shape, dtype)), False)

    def _end(self) -> Any:
        self.is_capturing = False
        return SimpleNamespace(graphExec=1)

    def _copy(self, target: int, source: int, count: int, _: Any) -> int:
        cast = self._ffi.cast
        self._ffi.memmove(cast("char *", target), cast("char *", source), count)
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInDriver]:
    monkeypatch.setitem(sys.modules, "cupy", StandInCupy(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # steps that stay eager warn
        yield StandInDriver(monkeypatch)


def gpu(values: Any) -> Any:
    return StandInArray(np.array(values))


def stays_eager(step: Callable[[Any], Any], results: list[float], reason: str) -> None:
    captured: Any = fl.capture(step)
    assert [captured(gpu([1.0])).get()[0] for _ in results] == results
    assert reason in captured.reason


def test_strided_argument_is_copied_elementwise(driver: StandInDriver) -> None:
    captured: Any = fl.capture(lambda x: x * 1)
    every_second = gpu(np.arange(8.0))[::2]
    captured(every_second)
    captured(every_second)
    captured(gpu(np.arange(10.0, 18.0))[::2])
    assert captured.replays == 2
    (graph,) = captured._graphs._graphs
    assert graph.inputs[0].get().tolist() == [10.0, 12.0, 14.0, 16.0]
    assert every_second.get().tolist() == [0.0, 2.0, 4.0, 6.0]


def test_step_that_replaces_an_array_stays_eager(driver: StandInDriver) -> None:
    weight = fl.Variable(gpu([1.0]), calc_grad=False)

    def step(x: Any) -> Any:
        weight.data = weight.data - x
        return weight.data * 1

    stays_eager(step, [0.0, -1.0, -2.0, -3.0], "weight.data gets another value")


@for_each("holds", ["object", "list", "dict"])
def test_failed_capture_changes_no_state(driver: StandInDriver, holds: str) -> None:
    holder: Any = SimpleNamespace(hidden=fl.Variable(gpu([1.0])), items=[gpu([1.0]), gpu([2.0])])
    named = {"grad": gpu([1.0])}

    def step(x: Any) -> Any:
        if holds == "object":
            holder.hidden = fl.Variable(holder.hidden.data + x)
            return holder.hidden.data * 1
        if holds == "list":
            holder.items.append(holder.items.pop() + x)
            return holder.items[-1] * 1
        named["grad"] = named["grad"] + x
        return named["grad"] * 1

    captured: Any = fl.capture(step)
    results = [captured(gpu([1.0])).get()[0] for _ in range(4)]
    assert results == [3.0, 4.0, 5.0, 6.0] if holds == "list" else [2.0, 3.0, 4.0, 5.0]
    assert captured.reason


def test_memory_of_an_old_gradient_is_not_state(driver: StandInDriver) -> None:
    weight = fl.param(gpu([1.0, 2.0]))
    weight.grad = None

    def step(x: Any) -> Any:
        weight.zero_grad()
        (weight * x).sum().backward()
        return x * 1

    captured: Any = fl.capture(step)
    captured(gpu([1.0, 2.0]))
    old = weight.grad
    captured(gpu([1.0, 2.0]))
    captured(old)
    assert (captured.replays, captured.reason) == (2, "")


def test_call_with_state_as_argument_runs_eagerly(driver: StandInDriver) -> None:
    weight = fl.Variable(gpu([1.0, 2.0]), calc_grad=False)

    def step(x: Any) -> Any:
        weight.data[...] = weight.data - 1
        return x * 1

    captured: Any = fl.capture(step)
    for _ in range(3):
        captured(weight.data[1:])
    assert weight.data.get().tolist() == [-2.0, -1.0]
    assert (captured.replays, captured.reason) == (0, "")


Pair = collections.namedtuple("Pair", "first second")


def test_results_in_named_tuples_are_copies(driver: StandInDriver) -> None:
    captured: Any = fl.capture(lambda x: Pair(x * 1, x * 2))
    for _ in range(2):
        captured(gpu([1.0]))
    one, other = captured(gpu([1.0])), captured(gpu([2.0]))
    assert type(one) is Pair
    assert one.first is not other.first
    assert captured.replays == 3
    unsupported: Any = fl.capture(lambda x: SimpleNamespace(value=x * 1))
    for _ in range(3):
        unsupported(gpu([1.0]))
    assert "an object of SimpleNamespace" in unsupported.reason


def test_random_draws_on_the_cpu_stay_eager(driver: StandInDriver) -> None:
    fl.set_seed(7)
    expected = [fl.random.generator().random() for _ in range(4)]
    fl.set_seed(7)
    step = lambda x: x * fl.random.generator().random()  # noqa: E731
    stays_eager(step, expected, "random numbers are drawn on the CPU")


def test_step_stays_eager_without_memory_for_two(driver: StandInDriver) -> None:
    def step(x: Any) -> Any:
        if driver.is_capturing:
            raise MemoryError("out of memory allocating 512 bytes")
        return x * 2

    stays_eager(step, [2.0] * 3, "out of memory")


@for_each("calls", [2, 4])
def test_step_stays_eager_if_most_calls_are_captures(driver: StandInDriver, calls: int) -> None:
    captured: Any = fl.capture(lambda x: x * 1)
    for length in range(1, 20):
        for _ in range(calls):
            captured(gpu(np.ones(length)))
    assert bool(captured.reason) is (calls == 2)
    assert captured.reason in ("", "17 calls had to be captured, and 16 were replayed")


@for_each("calls", [1, 3])
def test_changed_number_needs_another_graph(driver: StandInDriver, calls: int) -> None:
    config = SimpleNamespace(beta=0.0)
    captured: Any = fl.capture(lambda x: x * config.beta)
    for number in range(20 * calls):
        config.beta = float(number // calls)
        result = captured(gpu([1.0])).get()[0]
        assert result == config.beta
    every_call = "config.beta has another value in every call; keep it in an array, or pass it as"
    assert captured.reason.startswith(every_call) if calls == 1 else captured.reason == ""


def test_loss_scale_on_a_gpu_follows_updates(driver: StandInDriver) -> None:
    scaler, loss = fl.amp.DynamicScaler(4.0), fl.param(gpu(1.0))
    first = scaler.scale(loss).data.get()
    in_place = scaler._scales["cuda:0"]
    scaler.update(8.0)
    assert (float(first), float(scaler.scale(loss).data.get())) == (4, 8)
    assert scaler._scales["cuda:0"] is in_place


def agree(rank: int, size: int) -> tuple[int, str]:
    """Rank 0 is in two groups, rank 1 has a shorter batch, and rank 2 has a graph."""
    groups = [fl.new_group([0, 1]), fl.new_group([0, 2])]
    graphs = Graphs(lambda: None, ())
    joined: Any = [group for group in groups if group.is_member]
    graphs._groups = joined
    return graphs._agreed({0: 5, 1: 0, 2: 5}[rank]), graphs.reason


def test_ranks_stay_eager_without_a_containing_group() -> None:
    for agreed, reason in run_ranks(agree, 3):
        assert agreed == 0
        assert "no group contains all ranks" in reason


def test_ranks_agree_in_the_containing_group() -> None:
    one, two, all_ranks, again = (
        SimpleNamespace(ranks=ranks) for ranks in ((0, 1), (0, 2), (0, 1, 2), (2, 1, 0))
    )
    groups: Any = [one, all_ranks, two, again]
    assert _spanning(groups) == [all_ranks]
    assert _spanning([one, two]) == [one, two]  # type: ignore[list-item]


def capture_on_one(rank: int, size: int, problem: str) -> tuple[list[Any], str, int]:
    """Capture a step with a collective. Rank 0 captures no step, or a step with another factor."""
    nccl_stand_in.install(members_of(None).backend())
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        driver = StandInDriver(patch)
        reduce: Any = StandInNccl._do
        patch.setattr(StandInNccl, "_do", lambda *args: 0 if driver.is_capturing else reduce(*args))

        def step(x: Any) -> Any:
            y, scale = x * 2, 1.0
            if driver.is_capturing and rank == 0:
                if problem == "reads":
                    raise RuntimeError("cudaErrorStreamCaptureUnsupported")
                scale = 2.0 if problem == "differs" else 1.0
            fl.all_reduce(y, scale)
            return y

        captured: Any = fl.capture(step)
        results = [captured(gpu([1.0, 2.0])).get().tolist() for _ in range(3)]
        fl.sync_distributed()
        return results, captured.reason, captured.replays


@for_each("problem", ["reads", "differs", "alike"])
def test_ranks_stay_eager_if_captures_differ(problem: str) -> None:
    for rank, (results, reason, replays) in enumerate(run_ranks(capture_on_one, 2, problem)):
        if problem == "alike":
            assert (reason, replays) == ("", 2)
        else:
            assert results == [[4.0, 8.0]] * 3
            expected = (
                "cudaErrorStreamCapture" if (problem, rank) == ("reads", 0) else "another rank"
            )
            assert expected in reason
