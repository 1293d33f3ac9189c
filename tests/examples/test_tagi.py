"""The examples of fl.tagi, as a user starts them: alone, and by MPI."""

import re
from pathlib import Path

import numpy as np
import pytest

from tests.distributed.harness import mpirun_command
from tests.examples.programs import ALONE, output

SERIES = "tagi_time_series.py"
SHORT = ("--num-epochs", 5, "--samples", 400)


def printed(program: str, *options: object, ranks: int = 1) -> str:
    """Return what the example wrote to stdout; it must succeed without a warning."""
    start = [] if ranks == 1 else mpirun_command(ranks)
    return output((*start, *ALONE), program, *options)


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"(?<![\w.])\d+\.?\d*", text)]


def test_the_curve_is_learnt_and_the_band_is_wide_where_nothing_was_seen(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    band = tmp_path / "band.png"
    error, within, beyond = numbers(printed("tagi_regression.py", "--plot", band))
    assert error < 4.5  # the errors of the observations have a deviation of 3
    assert beyond > 2 * within
    assert band.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_size_of_the_errors_is_learnt_as_well(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    band = tmp_path / "band.png"
    error, within, beyond = numbers(printed("tagi_regression.py", "--heteros", "--plot", band))
    assert error < 0.06
    assert 0.15 < within < 0.25  # the mean of 0.05 + 0.3 |x| is 0.2
    assert beyond > 1.5 * within
    assert band.read_bytes().startswith(b"\x89PNG")


def accuracies(*options: object, ranks: int = 1) -> list[float]:
    """Return the percentage of right answers after each epoch of the digits' example."""
    pytest.importorskip("sklearn")
    text = printed("tagi_digits.py", *options, ranks=ranks)
    return [float(number) for number in re.findall(r"accuracy ([\d.]+)%", text)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "epochs", "goal"), [("mlp", 10, 98.0), ("cnn", 5, 98.3)], ids=["mlp", "cnn"]
)
def test_any_number_of_ranks_learns_the_same_digits(model: str, epochs: int, goal: float) -> None:
    job = ("--model", model, "--num-epochs", epochs)
    alone, *together = (accuracies(*job, ranks=ranks) for ranks in (1, 2, 4))
    assert alone[-1] >= goal
    for found in together:
        assert found[-1] >= goal
        assert np.abs(np.subtract(found, alone)).max() < 0.6  # two samples: rounding only


@pytest.mark.slow
def test_averaging_learns_less_than_adding_up() -> None:
    job = ("--num-epochs", 2, "--batch-size", 32)
    assert accuracies(*job, ranks=4)[-1] > accuracies(*job, "--average", ranks=4)[-1]


def errors_of_resnet(*options: object, ranks: int = 2) -> tuple[str, list[float]]:
    """Return the first line of the ResNet's example, and the test error after each epoch."""
    pytest.importorskip("sklearn")
    first, *epochs = printed("ddp_cifar_resnet.py", *options, ranks=ranks).splitlines()
    return first, [float(re.findall(r"test error: ([\d.]+)%", line)[0]) for line in epochs]


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--sync-batch-norm",)], ids=["local", "sync"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_best_epoch_of_a_small_resnet(ranks: int, more: tuple[str, ...]) -> None:
    """A single epoch may fail by far, as it is known of such networks; the best one counts."""
    job = ("--model", "small", "--num-epochs", 5, "--batch-size", 64 // ranks, *more)
    first, errors = errors_of_resnet(*job, ranks=ranks)
    assert first == "Data: digits, enlarged; 1437 images to learn, 360 to test"
    assert len(errors) == 5
    assert min(errors) <= 6


@pytest.mark.slow
def test_resnet18_reads_the_binary_files_of_cifar(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    for name in (*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"):
        records = random.integers(0, 256, (4, 3073), dtype=np.uint8)
        records[:, 0] %= 10
        records.tofile(tmp_path / f"{name}.bin")
    job = ("--num-epochs", 1, "--batch-size", 2, "--data-dir", tmp_path)
    first, errors = errors_of_resnet(*job)
    assert first == f"Data: CIFAR-10 from {tmp_path}; 20 images to learn, 4 to test"
    assert len(errors) == 1


@pytest.mark.slow
def test_the_series_is_forecast_by_its_windows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "forecast.png"
    error, repeated, _, ahead = numbers(printed(SERIES, *SHORT, "--plot", file))
    assert error < 0.08 < repeated
    assert ahead < repeated
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_number_of_processes_does_not_change_the_forecast() -> None:
    alone, together = (numbers(printed(SERIES, *SHORT, ranks=ranks)) for ranks in (1, 2))
    assert alone == pytest.approx(together, abs=0.002)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_its_own_length_is_enough_with_any_seed(ranks: int) -> None:
    for seed in range(3):
        error, *_ = numbers(printed(SERIES, "--seed", seed, ranks=ranks))
        assert error < 0.08
