"""Counts, accuracies, squared errors and times, alone and of several meters together."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from flashlight_py.meter import CountMeter, Meter, MSEMeter, TimeMeter, TopKMeter

SCORES = np.array([[0.1, 0.7, 0.2], [0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.4, 0.35, 0.25]])
TARGETS = np.array([1, 1, 0, 2])


@pytest.mark.parametrize(("k", "percent"), [(1, 25.0), (2, 50.0), (3, 100.0)])
def test_top_k_counts_targets_among_the_highest(k: int, percent: float) -> None:
    meter = TopKMeter(k)
    meter.add(SCORES[:2], TARGETS[:2])
    meter.add(SCORES[2:], TARGETS[2:])
    assert meter.value() == percent


def test_top_k_favours_ties_and_never_nan() -> None:
    tied, broken = TopKMeter(1), TopKMeter(1)
    tied.add(np.ones((3, 4)), np.array([0, 1, 3]))
    assert tied.value() == 100
    broken.add(np.full((3, 4), np.nan), np.array([0, 1, 3]))
    broken.add(np.array([[0.0, np.nan]]), np.array([0]))
    assert broken.value() == 0


@pytest.mark.parametrize(
    ("output", "target"),
    [
        (SCORES, TARGETS[:3]),
        (SCORES[0], TARGETS[:1]),
        (SCORES, TARGETS.astype(float)),
        (SCORES, TARGETS + 1),
        (SCORES, TARGETS - 1),
        (SCORES[:, :1], np.zeros(4, int)),
    ],
)
def test_top_k_refuses_what_does_not_fit(output: np.ndarray, target: np.ndarray) -> None:
    meter = TopKMeter(2)
    with pytest.raises(ValueError, match=r"got|asked"):
        meter.add(output, target)
    assert math.isnan(meter.value())


def test_counts_per_category() -> None:
    meter = CountMeter(3)
    meter.add(0)
    meter.add(2, 5)
    meter.add(2)
    assert meter.value() == [1, 0, 6]
    for wrong in (3, -1):
        with pytest.raises(IndexError, match=rf"\[0, 3\), got {wrong}"):
            meter.add(wrong)


def test_squared_error_is_summed_per_call_and_averaged_over_calls() -> None:
    meter = MSEMeter()
    meter.add(np.array([1, 2, 3], np.uint8), np.array([4, 5, 6], np.uint8))
    assert meter.value() == 27
    meter.add(np.array([1.0]), np.array([0.0]))
    assert meter.value() == 14
    with pytest.raises(ValueError, match=r"\(2,\) and \(1, 2\)"):
        meter.add(np.ones(2), np.ones((1, 2)))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time as the test sets it, in seconds."""
    now = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    return now


def test_time_runs_between_resume_and_stop(clock: list[float]) -> None:
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


def test_time_per_unit(clock: list[float]) -> None:
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


@pytest.mark.parametrize(
    ("parts", "together"),
    [
        ([counted(0, 1), counted(1)], [1, 2]),
        ([ranked(slice(0, 1)), ranked(slice(1, 4))], 25.0),
        ([erred(1, 2), erred(3)], 14 / 3),
        ([timed(False, 4, 1), timed(False, 6, 1)], 5.0),
        ([timed(True, 4, 1), timed(True, 6, 4)], 2.0),
    ],
    ids=["count", "top k", "mse", "time", "time per unit"],
)
def test_the_sum_of_states_is_the_state_of_all(parts: list[Meter], together: object) -> None:
    before = [part.value() for part in parts]
    for _ in range(2):
        state = np.sum([part.state() for part in parts], axis=0)
        assert state.dtype == np.float64
        assert parts[0].value_of(state) == together
    assert [part.value() for part in parts] == before


def test_a_state_is_a_copy() -> None:
    meter = counted(0)
    meter.state()[:] = 99
    assert meter.value() == [1, 0]


@pytest.mark.parametrize("make", [lambda: TopKMeter(0), lambda: CountMeter(0)])
def test_senseless_arguments_are_refused(make: Callable[[], Meter]) -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        make()
