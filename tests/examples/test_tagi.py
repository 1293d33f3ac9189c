"""The examples of fl.tagi, as a user starts them: alone, and by MPI."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.harness import mpirun_command

EXAMPLES = Path(__file__).parents[2] / "examples"
DEADLINE = 100.0


def printed(program: str, *options: object, ranks: int = 1) -> str:
    """Return what the example wrote to stdout; it must succeed without a warning."""
    command = [sys.executable, "-W", "error", str(EXAMPLES / program), *map(str, options)]
    start = [] if ranks == 1 else mpirun_command(ranks)
    done = subprocess.run(
        [*start, *command], capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def refused(program: str, *options: object) -> str:
    """Return the complaint about options that must be refused before anything starts."""
    command = [sys.executable, str(EXAMPLES / program), *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    return done.stderr


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"(?<![\w.])\d+\.?\d*", text)]


def test_the_curve_is_learnt_and_the_band_is_wide_where_nothing_was_seen(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    band = tmp_path / "band.png"
    error, within, beyond = numbers(printed("tagi_regression.py", "--plot", band))
    assert error < 4.5  # the errors of the observations have a deviation of 3
    assert beyond > 2 * within
    assert band.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--batch-size", 0], "--num-epochs and --batch-size are from 1 on"),
        (["--sigma-v", 0], "--sigma-v is above 0"),
        (["--plot", "/no/such/folder/p.png"], "the folder of /no/such/folder/p.png does not"),
    ],
)
def test_bad_options_of_the_regression_are_refused(options: list[object], complaint: str) -> None:
    assert complaint in refused("tagi_regression.py", *options)


FORECAST = ("tagi_time_series.py", "--num-epochs", 5, "--samples", 400)


def test_the_series_is_forecast_by_its_windows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "forecast.png"
    output = printed(*FORECAST, "--plot", file)
    error, repeated, _, ahead = numbers(output)
    assert error < 0.08 < repeated
    assert ahead < repeated
    assert file.read_bytes().startswith(b"\x89PNG")


def test_number_of_processes_does_not_change_the_forecast() -> None:
    alone, together = (numbers(printed(*FORECAST, ranks=ranks)) for ranks in (1, 2))
    assert alone == pytest.approx(together, abs=0.002)


def test_bad_options_of_the_forecast_are_refused() -> None:
    assert "--samples: more than a window of 12" in refused("tagi_time_series.py", "--samples", 12)
