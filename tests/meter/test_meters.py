"""Meters of means, counts, accuracies, squared errors and times, alone and combined."""

import copy
import math
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py import kernels
from flashlight_py.meter import AverageValueMeter, CountMeter, Meter, MSEMeter, TimeMeter, TopKMeter
from flashlight_py.structure import Structured
from tests.cupy_stand_in import StandInArray, StandInCupy
from tests.tables import for_each

SCORES = np.array([[0.1, 0.7, 0.2], [0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.4, 0.35, 0.25]])
TARGETS = np.array([1, 1, 0, 2])
VALUES = np.random.default_rng(0).normal(3, 2, 50)


def meter_of(values: Any, weights: Any = None) -> AverageValueMeter:
    meter = AverageValueMeter()
    for value, weight in zip(
        values, np.ones(len(values)) if weights is None else weights, strict=True
    ):
        meter.add(value, weight)
    return meter


@for_each("k percent", [(1, 25.0), (2, 50.0), (3, 100.0)])
def test_top_k_counts_targets_among_the_highest_scores(k: int, percent: float) -> None:
    meter = TopKMeter(k)
    meter.add(SCORES[:2], TARGETS[:2])
    meter.add(SCORES[2:], TARGETS[2:])
    assert meter.value() == percent


def test_top_k_counts_ties_but_not_nan() -> None:
    tied, broken = TopKMeter(1), TopKMeter(1)
    tied.add(np.ones((3, 4)), np.array([0, 1, 3]))
    assert tied.value() == 100
    broken.add(np.full((3, 4), np.nan), np.array([0, 1, 3]))
    broken.add(np.array([[0.0, np.nan]]), np.array([0]))
    assert broken.value() == 0


def test_count_meter_counts_per_category() -> None:
    meter = CountMeter(3)
    meter.add(0)
    meter.add(2, 5)
    meter.add(2)
    assert meter.value() == [1, 0, 6]
    for wrong in (3, -1):
        with pytest.raises(IndexError, match=rf"\[0, 3\), got {wrong}"):
            meter.add(wrong)


def test_mse_meter_sums_per_call_and_averages_over_calls() -> None:
    meter = MSEMeter()
    meter.add(np.array([1, 2, 3], np.uint8), np.array([4, 5, 6], np.uint8))
    assert meter.value() == 27
    meter.add(np.array([1.0]), np.array([0.0]))
    assert meter.value() == 14


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock in seconds that the test sets."""
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    return now


def test_time_meter_runs_between_resume_and_stop(clock: list[float]) -> None:
    meter = TimeMeter()
    steps = [(meter.value, 5, 0), (meter.resume, 2, 2), (meter.resume, 1, 3), (meter.stop, 10, 3)]
    steps += [(meter.stop, 10, 3), (meter.resume, 1, 4), (meter.reset, 1, 0)]
    for step, seconds, expected in steps:
        step()
        clock[0] += seconds
        assert meter.value() == expected


def test_time_meter_divides_by_units(clock: list[float]) -> None:
    meter = TimeMeter(unit=True)
    assert math.isnan(meter.value())
    meter.resume()
    clock[0] += 6
    meter.inc_unit(2)
    assert meter.value() == 3
    meter.stop_and_inc_unit()
    assert meter.value() == 2
    meter.set(10.0, 4)
    assert meter.value() == 2.5


def fed(meter: Any, *calls: tuple[Any, ...]) -> Any:
    for arguments in calls:
        meter.set(*arguments) if isinstance(meter, TimeMeter) else meter.add(*arguments)
    return meter


def erred(*errors: float) -> Any:
    return fed(MSEMeter(), *((np.array([error]), np.array([0.0])) for error in errors))


def timed(unit: bool, seconds: float, units: int) -> Any:
    return fed(TimeMeter(unit), (seconds, units))


@for_each(
    "parts together",
    [
        ([fed(CountMeter(2), (0,), (1,)), fed(CountMeter(2), (1,))], [1, 2]),
        ([fed(TopKMeter(1), (SCORES[r], TARGETS[r])) for r in (slice(0, 1), slice(1, 4))], 25.0),
        ([erred(1, 2), erred(3)], 14 / 3),
        ([timed(False, 4, 1), timed(False, 6, 1)], 5.0),
        ([timed(True, 4, 1), timed(True, 6, 4)], 2.0),
        (
            [AverageValueMeter(), meter_of(VALUES[:10]), meter_of(VALUES[10:13], [2, 3, 4])],
            pytest.approx(meter_of(VALUES[:13], [1] * 10 + [2, 3, 4]).value(), rel=1e-12),
        ),
    ],
)
def test_sum_of_states_equals_the_state_of_all_data(parts: list[Meter], together: object) -> None:
    before = repr([part.value() for part in parts])
    for _ in range(2):
        state = np.sum([part.state() for part in parts], axis=0)
        assert state.dtype == np.float64
        assert parts[0].value_of(state) == together
    assert repr([part.value() for part in parts]) == before


@for_each("kind", [AverageValueMeter, TimeMeter])
def test_new_meter_equals_a_reset_meter(kind: type[Any]) -> None:
    class More(kind):
        def reset(self) -> None:
            super().reset()
            self.more = 0

    assert More().more == 0


USES: dict[str, tuple[Callable[[], Meter], Callable[[Any], object]]] = {
    "average": (AverageValueMeter, lambda meter: meter.add(1.5, 2)),
    "average of arrays": (AverageValueMeter, lambda meter: meter.add(SCORES)),
    "count": (lambda: CountMeter(3), lambda meter: meter.add(1)),
    "mse": (MSEMeter, lambda meter: meter.add(SCORES, SCORES + 1)),
    "time": (TimeMeter, lambda meter: (meter.resume(), meter.stop_and_inc_unit(2))),
    "time that was set": (TimeMeter, lambda meter: meter.set(2.0, 3)),
    "top k": (lambda: TopKMeter(1), lambda meter: meter.add(SCORES, TARGETS)),
}


@for_each("kind", USES)
def test_meters_keep_their_arrays_and_structure(kind: str) -> None:
    make, use = USES[kind]
    meter, unused = make(), make().state()
    arrays = {name: id(value) for name, value in vars(meter).items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Structured, "__setattr__", None)  # no attribute is assigned
        use(meter)
        state = meter.state()
        again = pickle.loads(pickle.dumps(meter))
        meter.reset()
    assert (state != unused).any()
    np.testing.assert_array_equal(again.state(), state)
    state[:] = 99  # a copy
    np.testing.assert_array_equal(meter.state(), unused)
    assert arrays == {name: id(value) for name, value in vars(meter).items()}


# Calls with wrong numbers or shapes.
INVALID: list[tuple[Callable[[], object], str]] = [
    (lambda: TopKMeter(0), "at least 1, got 0"),
    (lambda: CountMeter(0), "at least 1, got 0"),
    (lambda: AverageValueMeter().add(1.0, -1), "weight must be at least 0, got -1"),
    (lambda: MSEMeter().add(np.ones(2), np.ones((1, 2))), r"got \(2,\) and \(1, 2\)"),
    *[(lambda arrays=arrays: TopKMeter(2).add(*arrays), "got")
        for arrays in (
            (SCORES, TARGETS[:3]), (SCORES[0], TARGETS[:1]), (SCORES, TARGETS.astype(float)),
            (SCORES, TARGETS + 1), (SCORES, TARGETS - 1), (SCORES[:, :1], np.zeros(4, int)),
        )],
]  # fmt: skip


@for_each("call words", INVALID)
def test_meters_raise_value_error_for_invalid_arguments(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


class Tensor:
    """A number like those of torch, whose size is a method."""

    ndim = 0

    def size(self) -> tuple[int, ...]:
        return ()

    def __float__(self) -> float:
        return 3.0


def moments(values: np.ndarray) -> tuple[float, float, float]:
    return values.astype(float).mean(), values.astype(float).var(ddof=1), values.size


SQUARES = 1 * (1 - 17 / 6) ** 2 + 2 * (2 - 17 / 6) ** 2 + 3 * (4 - 17 / 6) ** 2
NARROW, INTEGERS = VALUES.astype("f4"), (10 * VALUES).astype("i4")
# Values, weights, and the expected mean, variance and sum of weights.
AVERAGES: list[tuple[Any, Any, tuple[float, float, float]]] = [
    (VALUES, None, moments(VALUES)),
    ([1.0, 2.0, 4.0], [1, 2, 3], (17 / 6, SQUARES / (6 - (1 + 4 + 9) / 6), 6)),
    ([1.0, 99.0, 3.0], [1, 0, 1], (2, 2, 2)),
    ([1e9, 1e9 + 1, 1e9 + 2], None, (1e9 + 1, 1, 3)),  # a large mean
    ([np.float32(2), np.array(4.0), 3, Tensor()], None, moments(np.array([2, 4, 3, 3]))),
    ([], None, (math.nan, math.nan, 0)),
    ([5.0], None, (5, math.nan, 1)),
    *[([array[:20].reshape(4, 5), array[20:], array[:0]], None, moments(array))
        for array in (VALUES, NARROW, INTEGERS)],
]  # fmt: skip


@for_each("values weights expected", AVERAGES)
def test_average_meter_returns_mean_and_unbiased_variance(
    values: Any, weights: Any, expected: tuple[float, float, float]
) -> None:
    actual = meter_of(values, weights).value()
    assert actual == pytest.approx(expected, rel=1e-13, nan_ok=True)


NUMBERS = np.random.default_rng(0).normal(3, 2, 12).astype("float32")
RATINGS = np.random.default_rng(1).random((6, 4))
CLASSES = np.array([0, 1, 2, 3, 0, 1])


@contextmanager
def no_copy_to_host() -> Iterator[None]:
    """Make every method of a device array fail that returns a value to the host."""

    def fail(self: StandInArray, *_: object) -> Any:
        raise AssertionError("the host waits for the device")

    names = ("get", "item", "tolist", "__float__", "__int__", "__bool__")
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(StandInArray, name, fail, raising=False)
        yield


MakeArray = Callable[[Any], Any]
DEVICE_USES: dict[str, tuple[Callable[[], Meter], Callable[[Any, MakeArray], object]]] = {
    "0-dim arrays": (
        AverageValueMeter,
        lambda meter, to: [meter.add(to(value), 1 + 0.5 * k) for k, value in enumerate(NUMBERS)],
    ),
    "arrays of one element": (AverageValueMeter, lambda meter, to: meter.add(to(NUMBERS[:1]))),
    "arrays": (AverageValueMeter, lambda meter, to: meter.add(to(NUMBERS.reshape(3, 4)), 2.0)),
    "empty arrays": (AverageValueMeter, lambda meter, to: meter.add(to(NUMBERS[:0]))),
    "variables": (AverageValueMeter, lambda meter, to: meter.add(fl.no_grad(to(NUMBERS[0])))),
    "mse": (MSEMeter, lambda meter, to: meter.add(to(NUMBERS), to(NUMBERS + 1))),
    "top k": (lambda: TopKMeter(2), lambda meter, to: meter.add(to(RATINGS), to(CLASSES))),
}  # fmt: skip


@for_each("kind", DEVICE_USES)
def test_add_of_cupy_arrays_makes_no_copy_to_the_host(kind: str, strict: StandInCupy) -> None:
    make, use = DEVICE_USES[kind]
    meter, expected = make(), make()
    with no_copy_to_host():
        use(meter, strict.asarray)
        use(meter, strict.asarray)
    use(expected, np.asarray)
    use(expected, np.asarray)
    for _ in range(3):
        np.testing.assert_allclose(meter.value(), expected.value(), rtol=1e-13)
        np.testing.assert_allclose(meter.state(), expected.state(), rtol=1e-13)
        np.testing.assert_array_equal(fl.sync_meter(meter), meter.value_of(meter.state()))
        use(meter, np.asarray)  # values merge the arrays of both libraries
        use(expected, np.asarray)


def test_add_of_a_number_launches_one_kernel(strict: StandInCupy) -> None:
    meter = AverageValueMeter()
    for value in NUMBERS:
        meter.add(strict.asarray(value))
    assert kernels._elementwise("add_moments").launches() == len(NUMBERS)
    mean, variance, weight = meter.value()
    assert mean == pytest.approx(NUMBERS.astype(float).mean(), rel=1e-14)
    assert variance == pytest.approx(NUMBERS.astype(float).var(ddof=1), rel=1e-13)
    assert weight == len(NUMBERS)


@for_each("kind", DEVICE_USES)
def test_reset_zeroes_the_device_sums_in_place(
    kind: str, strict: StandInCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, use = DEVICE_USES[kind]
    meter, unused = make(), make().state()
    use(meter, strict.asarray)
    use(meter, np.asarray)
    sums: Any = meter._device_sums  # type: ignore[attr-defined]
    expected = make()
    use(expected, np.asarray)
    with no_copy_to_host(), monkeypatch.context() as patch:
        patch.setattr(Structured, "__setattr__", None)
        meter.reset()
        use(meter, strict.asarray)
        meter.reset()
        assert meter._device_sums is sums  # type: ignore[attr-defined]
    np.testing.assert_array_equal(meter.state(), unused)
    use(meter, strict.asarray)
    assert meter._device_sums is sums  # type: ignore[attr-defined]
    np.testing.assert_allclose(meter.state(), expected.state(), rtol=1e-13)


@for_each("again", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@for_each("kind", DEVICE_USES)
def test_copies_and_pickles_contain_numpy_arrays(
    kind: str, again: Callable[[Any], Any], strict: StandInCupy
) -> None:
    make, use = DEVICE_USES[kind]
    meter = make()
    use(meter, np.asarray)
    use(meter, strict.asarray)
    state, copied = meter.state(), again(meter)
    assert not any(isinstance(value, StandInArray) for value in vars(copied).values())
    np.testing.assert_array_equal(copied.state(), state)
    use(copied, strict.asarray)
    np.testing.assert_array_equal(meter.state(), state)


def test_meter_keeps_sums_of_a_previous_device(strict: StandInCupy) -> None:
    meter, expected = AverageValueMeter(), AverageValueMeter()
    meter.add(strict.asarray(NUMBERS[:5]))
    former: Any = meter._device_sums
    former.elsewhere = 1
    meter.add(strict.asarray(NUMBERS[5:]))
    assert meter._device_sums is not former
    expected.add(NUMBERS)
    assert meter.value() == pytest.approx(expected.value(), rel=1e-13)


def test_top_k_is_nan_if_a_device_target_is_out_of_range(strict: StandInCupy) -> None:
    meter: Any = TopKMeter(2)
    for target in (-1, 4):
        targets = strict.asarray([0, 1, 2, 3, 0, target])
        with no_copy_to_host():
            meter.add(strict.asarray(RATINGS), targets)
        assert np.isnan(meter.value())
        meter.reset()
    meter.add(strict.asarray(RATINGS), strict.asarray(CLASSES))
    assert 0 <= meter.value() <= 100
