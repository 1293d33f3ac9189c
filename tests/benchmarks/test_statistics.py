"""Ratios are taken round by round, so that what slows a whole round slows nobody's ratio."""

import pytest

from harness.statistics import Measurement, median, ratios


def test_ratios_are_of_the_same_round() -> None:
    quiet_then_busy = {"ours": [1.0, 10.0], "peer": [2.0, 20.0]}
    assert ratios(quiet_then_busy, of="peer", to="ours") == [2.0, 2.0]


def test_a_ratio_above_one_means_that_the_second_is_faster() -> None:
    assert ratios({"slow": [3.0], "fast": [1.0]}, of="slow", to="fast") == [3.0]


@pytest.mark.parametrize("missing", ["ours", "peer"])
def test_who_was_not_measured_has_no_ratio(missing: str) -> None:
    seconds = {"ours": [1.0], "peer": [2.0]}
    del seconds[missing]
    assert ratios(seconds, of="peer", to="ours") == []


def test_unequal_numbers_of_rounds_are_a_fault() -> None:
    with pytest.raises(ValueError, match="zip"):
        ratios({"ours": [1.0], "peer": [2.0, 3.0]}, of="peer", to="ours")


def test_one_disturbed_round_does_not_move_the_median() -> None:
    case = Measurement("all_reduce", "float32", 4, 2, {"ours": [1, 1, 9], "peer": [3, 3, 3]})
    assert median(case.ratios("peer", "ours")) == 3
