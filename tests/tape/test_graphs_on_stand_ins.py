"""Decisions of steps captured on a GPU, with stand-ins for CuPy, CUDA and NCCL.

A capture runs the step on NumPy arrays. A launch runs a function of the test. tests/gpu tests real
graphs.
"""

import collections
import sys
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.distributed.backends.nccl import library as nccl_library
from flashlight_py.distributed.groups.membership import members_of
from flashlight_py.tape.graphs import Graphs, _spanning
from tests.cupy_stand_in import Event, StandInArray, StandInCupy, Stream
from tests.distributed import nccl_stand_in
from tests.distributed.harness import run_ranks
from tests.distributed.nccl_stand_in import StandInLibrary, StandInNccl
from tests.tables import for_each


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
