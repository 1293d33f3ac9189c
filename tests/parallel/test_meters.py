"""Meters over ranks: as if one had seen everything, as often as one likes."""

import numpy as np
import pytest

import flashlight_py as fl
from tests.distributed.conformance import on_ranks

VALUES = np.random.default_rng(3).standard_normal(60)


@on_ranks(("single", 1), ("shm", 2), ("shm", 4))
def test_a_synchronised_meter_has_seen_what_all_have_seen(rank: int, size: int) -> None:
    average, squares = fl.meter.AverageValueMeter(), fl.meter.MSEMeter()
    for value in VALUES[rank::size]:  # unequal numbers of values where size does not divide 60
        average.add(value)
        squares.add(np.array([value]), np.array([0.0]))
    before = average.value()
    results = [fl.sync_meter(average) for _ in range(3)]
    assert results[0] == results[1] == results[2]
    assert average.value() == before
    mean, variance, weight = results[0]
    assert mean == pytest.approx(VALUES.mean(), rel=1e-12)
    assert variance == pytest.approx(VALUES.var(ddof=1), rel=1e-12)
    assert weight == 60
    assert fl.sync_meter(squares) == pytest.approx((VALUES**2).mean(), rel=1e-12)


def test_only_meters_are_synchronised() -> None:
    with pytest.raises(TypeError, match="Meter"):
        fl.sync_meter(3.0)  # type: ignore[arg-type]
