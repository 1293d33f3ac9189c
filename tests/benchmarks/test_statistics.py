"""Ratios within rounds, which a slow round does not change."""

import pytest

from harness.statistics import Measurement, median, ratios


def test_ratios_divide_times_of_the_same_round() -> None:
    quiet_then_busy = {"ours": [1.0, 10.0], "peer": [2.0, 20.0]}
    assert ratios(quiet_then_busy, of="peer", to="ours") == [2.0, 2.0]


@pytest.mark.parametrize("missing", ["ours", "peer"])
def test_ratios_are_empty_if_a_contender_was_not_measured(missing: str) -> None:
    seconds = {"ours": [1.0], "peer": [2.0]}
    del seconds[missing]
    assert ratios(seconds, of="peer", to="ours") == []


def test_ratios_raise_if_numbers_of_rounds_differ() -> None:
    with pytest.raises(ValueError, match="zip"):
        ratios({"ours": [1.0], "peer": [2.0, 3.0]}, of="peer", to="ours")


def test_median_ignores_one_slow_round() -> None:
    case = Measurement("all_reduce", "float32", 4, 2, {"ours": [1, 1, 9], "peer": [3, 3, 3]})
    assert median(case.ratios("peer", "ours")) == 3
