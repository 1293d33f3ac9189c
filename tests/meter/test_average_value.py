"""Mean, variance and weight, alone and of several meters together."""

import math
from typing import Any

import numpy as np
import pytest

from flashlight_py.meter import AverageValueMeter

VALUES = np.random.default_rng(0).normal(3, 2, 50)


def meter_of(values: Any, weights: Any = None) -> AverageValueMeter:
    meter = AverageValueMeter()
    for value, weight in zip(
        values, np.ones(len(values)) if weights is None else weights, strict=True
    ):
        meter.add(value, weight)
    return meter


def test_mean_and_unbiased_variance() -> None:
    mean, variance, weight = meter_of(VALUES).value()
    assert mean == pytest.approx(VALUES.mean(), rel=1e-14)
    assert variance == pytest.approx(VALUES.var(ddof=1), rel=1e-13)
    assert weight == 50


def test_weights() -> None:
    mean, variance, weight = meter_of([1.0, 2.0, 4.0], [1, 2, 3]).value()
    assert mean == pytest.approx(17 / 6)
    squares = 1 * (1 - 17 / 6) ** 2 + 2 * (2 - 17 / 6) ** 2 + 3 * (4 - 17 / 6) ** 2
    assert variance == pytest.approx(squares / (6 - (1 + 4 + 9) / 6))
    assert weight == 6


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32])
def test_an_array_counts_each_element(dtype: type) -> None:
    values = (10 * VALUES).astype(dtype)
    by_array, one_by_one = AverageValueMeter(), meter_of(values.astype(float))
    by_array.add(values[:20].reshape(4, 5))
    by_array.add(values[20:])
    by_array.add(values[:0])
    assert by_array.value() == pytest.approx(one_by_one.value(), rel=1e-12)


def test_numbers_of_other_kinds() -> None:
    class Tensor:  # of torch, which need not be there: its size is a method
        ndim = 0

        def size(self) -> tuple[int, ...]:
            return ()

        def __float__(self) -> float:
            return 3.0

    values = [np.float32(2), np.array(4.0), 3, Tensor()]
    assert meter_of(values).value()[0] == pytest.approx(3)


def test_variance_survives_a_large_mean() -> None:
    _, variance, _ = meter_of([1e9, 1e9 + 1, 1e9 + 2]).value()
    assert variance == pytest.approx(1.0)


def test_what_is_undefined_is_nan() -> None:
    empty, single = AverageValueMeter().value(), meter_of([5.0]).value()
    assert math.isnan(empty[0])
    assert math.isnan(empty[1])
    assert empty[2] == 0
    assert single[0] == 5
    assert math.isnan(single[1])


def test_a_weight_of_zero_adds_nothing_and_a_negative_one_is_refused() -> None:
    meter = meter_of([1.0, 99.0], [1, 0])
    assert meter.value()[0] == 1
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        meter.add(1.0, -1)


def test_reset_forgets() -> None:
    meter = meter_of(VALUES)
    meter.reset()
    meter.add(7.0)
    assert meter.value()[0] == 7
    assert meter.value()[2] == 1


def test_the_sum_of_states_is_the_state_of_all_and_can_be_asked_repeatedly() -> None:
    parts = [meter_of(VALUES[:10]), meter_of(VALUES[10:13], [2, 3, 4]), AverageValueMeter()]
    together = meter_of(VALUES[:13], [1] * 10 + [2, 3, 4]).value()
    before = [part.value() for part in parts[:2]]
    for _ in range(2):
        state = np.sum([part.state() for part in parts], axis=0)
        assert parts[2].value_of(state) == pytest.approx(together, rel=1e-12)
    assert [part.value() for part in parts[:2]] == before
