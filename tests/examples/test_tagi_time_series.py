"""examples/tagi_time_series.py as a user starts it: alone, and by MPI."""

from pathlib import Path

import pytest

from tests.examples.test_tagi import numbers, printed

PROGRAM = "tagi_time_series.py"
SHORT = ("--num-epochs", 5, "--samples", 400)


@pytest.mark.slow
def test_the_series_is_forecast_by_its_windows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "forecast.png"
    error, repeated, _, ahead = numbers(printed(PROGRAM, *SHORT, "--plot", file))
    assert error < 0.08 < repeated
    assert ahead < repeated
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_number_of_processes_does_not_change_the_forecast() -> None:
    alone, together = (numbers(printed(PROGRAM, *SHORT, ranks=ranks)) for ranks in (1, 2))
    assert alone == pytest.approx(together, abs=0.002)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_its_own_length_is_enough_with_any_seed(ranks: int) -> None:
    for seed in range(3):
        error, *_ = numbers(printed(PROGRAM, "--seed", seed, ranks=ranks))
        assert error < 0.08
