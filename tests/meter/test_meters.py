"""Meters of means, counts, accuracies, squared errors and times, alone and combined."""

import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from flashlight_py.meter import AverageValueMeter, CountMeter, Meter, MSEMeter, TimeMeter, TopKMeter
from flashlight_py.structure import Structured
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


@for_each(
    "output target",
    [
        (SCORES, TARGETS[:3]),
        (SCORES[0], TARGETS[:1]),
        (SCORES, TARGETS.astype(float)),
        (SCORES, TARGETS + 1),
        (SCORES, TARGETS - 1),
        (SCORES[:, :1], np.zeros(4, int)),
    ],
)
def test_top_k_raises_value_error_for_wrong_shapes(output: np.ndarray, target: np.ndarray) -> None:
    meter = TopKMeter(2)
    with pytest.raises(ValueError, match="got"):
        meter.add(output, target)
    assert math.isnan(meter.value())


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
    with pytest.raises(ValueError, match=r"got \(2,\) and \(1, 2\)"):
        meter.add(np.ones(2), np.ones((1, 2)))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock in seconds that the test sets."""
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    return now


def test_time_meter_runs_between_resume_and_stop(clock: list[float]) -> None:
    meter = TimeMeter()
    clock[0] += 5
    assert meter.value() == 0
    meter.resume()
    clock[0] += 2
    meter.resume()
    clock[0] += 1
    assert meter.value() == 3
    meter.stop()
    clock[0] += 10
    meter.stop()
    assert meter.value() == 3
    meter.resume()
    clock[0] += 1
    assert meter.value() == 4
    meter.reset()
    clock[0] += 1
    assert meter.value() == 0


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


def counted(*categories: int) -> Meter:
    meter = CountMeter(2)
    for category in categories:
        meter.add(category)
    return meter


def ranked(rows: slice) -> Meter:
    meter = TopKMeter(1)
    meter.add(SCORES[rows], TARGETS[rows])
    return meter


def erred(*errors: float) -> Meter:
    meter = MSEMeter()
    for error in errors:
        meter.add(np.array([error]), np.array([0.0]))
    return meter


def timed(unit: bool, seconds: float, units: int) -> Meter:
    meter = TimeMeter(unit)
    meter.set(seconds, units)
    return meter


@for_each(
    "parts together",
    [
        ([counted(0, 1), counted(1)], [1, 2]),
        ([ranked(slice(0, 1)), ranked(slice(1, 4))], 25.0),
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


@pytest.mark.parametrize("kind", [AverageValueMeter, TimeMeter])
def test_new_meter_equals_a_reset_meter(kind: type[Any]) -> None:
    class More(kind):
        def reset(self) -> None:
            super().reset()
            self.more = 0

    assert More().more == 0


def test_state_returns_a_copy() -> None:
    meter = counted(0)
    meter.state()[:] = 99
    assert meter.value() == [1, 0]


USES: dict[str, tuple[Callable[[], Meter], Callable[[Any], object]]] = {
    "average": (AverageValueMeter, lambda meter: meter.add(1.5, 2)),
    "average of arrays": (AverageValueMeter, lambda meter: meter.add(SCORES)),
    "count": (lambda: CountMeter(3), lambda meter: meter.add(1)),
    "mse": (MSEMeter, lambda meter: meter.add(SCORES, SCORES + 1)),
    "time": (TimeMeter, lambda meter: (meter.resume(), meter.stop_and_inc_unit(2))),
    "time that was set": (TimeMeter, lambda meter: meter.set(2.0, 3)),
    "top k": (lambda: TopKMeter(1), lambda meter: meter.add(SCORES, TARGETS)),
}


@pytest.mark.parametrize("kind", USES)
def test_meters_keep_their_arrays_and_structure(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, use = USES[kind]
    meter, unused = make(), make().state()
    arrays = {name: id(value) for name, value in vars(meter).items()}
    monkeypatch.setattr(Structured, "__setattr__", refuse)
    use(meter)
    state = meter.state()
    assert (state != unused).any()
    again = pickle.loads(pickle.dumps(meter))
    np.testing.assert_array_equal(again.state(), state)
    meter.reset()
    np.testing.assert_array_equal(meter.state(), unused)
    assert arrays == {name: id(value) for name, value in vars(meter).items()}


def refuse(self: Structured, name: str, value: object) -> None:
    raise AssertionError(f"{type(self).__name__}.{name} is assigned")


@pytest.mark.parametrize("make", [lambda: TopKMeter(0), lambda: CountMeter(0)])
def test_meters_raise_value_error_for_invalid_arguments(make: Callable[[], Meter]) -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        make()


def test_average_meter_returns_mean_and_unbiased_variance() -> None:
    mean, variance, weight = meter_of(VALUES).value()
    assert mean == pytest.approx(VALUES.mean(), rel=1e-14)
    assert variance == pytest.approx(VALUES.var(ddof=1), rel=1e-13)
    assert weight == 50


def test_average_meter_applies_weights() -> None:
    mean, variance, weight = meter_of([1.0, 2.0, 4.0], [1, 2, 3]).value()
    assert mean == pytest.approx(17 / 6)
    squares = 1 * (1 - 17 / 6) ** 2 + 2 * (2 - 17 / 6) ** 2 + 3 * (4 - 17 / 6) ** 2
    assert variance == pytest.approx(squares / (6 - (1 + 4 + 9) / 6))
    assert weight == 6


@for_each("dtype", [np.float32, np.float64, np.int32])
def test_average_meter_counts_each_element_of_an_array(dtype: type) -> None:
    values = (10 * VALUES).astype(dtype)
    by_array, one_by_one = AverageValueMeter(), meter_of(values.astype(float))
    by_array.add(values[:20].reshape(4, 5))
    by_array.add(values[20:])
    by_array.add(values[:0])
    assert by_array.value() == pytest.approx(one_by_one.value(), rel=1e-12)


def test_average_meter_accepts_numbers_of_other_types() -> None:
    class Tensor:  # like torch.Tensor, whose size is a method
        ndim = 0

        def size(self) -> tuple[int, ...]:
            return ()

        def __float__(self) -> float:
            return 3.0

    values = [np.float32(2), np.array(4.0), 3, Tensor()]
    assert meter_of(values).value()[0] == pytest.approx(3)


def test_average_meter_variance_is_accurate_for_a_large_mean() -> None:
    _, variance, _ = meter_of([1e9, 1e9 + 1, 1e9 + 2]).value()
    assert variance == pytest.approx(1.0)


def test_average_meter_returns_nan_for_too_few_values() -> None:
    empty, single = AverageValueMeter().value(), meter_of([5.0]).value()
    assert math.isnan(empty[0])
    assert math.isnan(empty[1])
    assert empty[2] == 0
    assert single[0] == 5
    assert math.isnan(single[1])


def test_average_meter_ignores_zero_weight_and_rejects_negative_weight() -> None:
    meter = meter_of([1.0, 99.0], [1, 0])
    assert meter.value()[0] == 1
    with pytest.raises(ValueError, match="weight must be at least 0, got -1"):
        meter.add(1.0, -1)


def test_reset_discards_all_values() -> None:
    meter = meter_of(VALUES)
    meter.reset()
    meter.add(7.0)
    assert meter.value()[0] == 7
    assert meter.value()[2] == 1
