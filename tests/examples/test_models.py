"""The models and the examples of fl.tagi with one process, flrun and MPI."""

import re
from pathlib import Path

import numpy as np
import pytest

from flashlight_py.doctor import mpirun_command
from tests.examples.programs import ALONE, FLRUN, output

# Options for few and small steps.
SMALL = {
    "digits_cnn": ("--steps", 4, "--every", 2, "--batch-size", 24),
    "tiny_gpt": ("--steps", 4, "--every", 2, "--letters", 3),
    "cifar_resnet": ("--steps", 4, "--every", 2, "--batch-size", 8, "--width", 2),
}


def trained(start: tuple[object, ...], name: str, *options: object) -> str:
    return output(start, f"{name}.py", *SMALL[name], *options)


def digest(text: str) -> str:
    match = re.search(r"SHA-256 of the parameters: (\w{64})", text)
    assert match, text
    return match[1]


@pytest.mark.parametrize(
    ("name", "ranks", "options"),
    [
        ("digits_cnn", 2, ["--capture"]),
        pytest.param("cifar_resnet", 3, [], marks=pytest.mark.slow),
        pytest.param("tiny_gpt", 4, ["--capture"], marks=pytest.mark.slow),
    ],
)
def test_models_with_leaves_have_the_same_bits(name: str, ranks: int, options: list[str]) -> None:
    alone = digest(trained(ALONE, name, "--leaves", 8))
    assert digest(trained((*FLRUN, ranks), name, "--leaves", 8, *options)) == alone


@pytest.mark.slow
def test_model_continues_from_its_checkpoint(tmp_path: Path) -> None:
    """The checkpoint restores random generators and the learning rate of the schedule."""
    unbroken = trained(ALONE, "tiny_gpt")
    folder = tmp_path / "run"
    trained((*FLRUN, 2), "tiny_gpt", "--folder", folder)
    (newest, _) = sorted(folder.iterdir(), reverse=True)
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()
    rest = trained((*FLRUN, 2), "tiny_gpt", "--folder", folder)
    assert "step     2" in unbroken
    assert "step     2" not in rest
    assert "step     4" in rest


@pytest.mark.slow
def test_model_has_the_same_bits_with_mpirun_and_flrun() -> None:
    """Both captured and eager."""
    result = trained(("mpirun", "-n", 2, *ALONE), "cifar_resnet")
    assert digest(trained((*FLRUN, 2), "cifar_resnet", "--capture")) == digest(result)


@pytest.mark.slow
def test_digits_cnn_reaches_its_accuracy_with_default_options(tmp_path: Path) -> None:
    options = "--steps", 1_000, "--every", 200, "--batch-size", 64, "--capture"
    text = trained(ALONE, "digits_cnn", *options, "--folder", tmp_path / "run")
    assert float(re.findall(r"accuracy ([\d.]+)%", text)[-1]) >= 98.5
    picture = tmp_path / "losses.png"
    output(ALONE, "plot_losses.py", picture, tmp_path / "run")
    assert picture.stat().st_size > 10_000


SERIES = "tagi_time_series.py"
SHORT = ("--num-epochs", 5, "--samples", 400)


def printed(program: str, *options: object, ranks: int = 1) -> str:
    """Return the stdout of the example, which must succeed without a warning."""
    start = [] if ranks == 1 else mpirun_command(ranks)
    return output((*start, *ALONE), program, *options)


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"(?<![\w.])\d+\.?\d*", text)]


@pytest.mark.parametrize("options", [(), pytest.param(("--heteros",), marks=pytest.mark.slow)])
def test_regression_predicts_a_large_deviation_far_from_points(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    pytest.importorskip("matplotlib")
    band = tmp_path / "band.png"
    error, within, beyond = numbers(printed("tagi_regression.py", *options, "--plot", band))
    if options:
        assert error < 0.06
        assert 0.15 < within < 0.25  # the mean of 0.05 + 0.3 |x| is 0.2
        assert beyond > 1.5 * within
    else:
        assert error < 4.5  # the errors of the observations have a deviation of 3
        assert beyond > 2 * within
    assert band.read_bytes().startswith(b"\x89PNG")


def accuracies(*options: object, ranks: int = 1) -> list[float]:
    """Return the percentage of correct answers after each epoch of the digits example."""
    pytest.importorskip("sklearn")
    text = printed("tagi_digits.py", *options, ranks=ranks)
    return [float(number) for number in re.findall(r"accuracy ([\d.]+)%", text)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "epochs", "goal"), [("mlp", 10, 98.0), ("cnn", 5, 98.3)], ids=["mlp", "cnn"]
)
def test_digits_accuracy_does_not_depend_on_ranks(model: str, epochs: int, goal: float) -> None:
    job = ("--model", model, "--num-epochs", epochs)
    alone, together = (accuracies(*job, ranks=ranks) for ranks in (1, 4))
    assert min(alone[-1], together[-1]) >= goal
    assert np.abs(np.subtract(together, alone)).max() < 0.6  # two samples, from rounding


@pytest.mark.slow
def test_digits_learn_more_slowly_with_average() -> None:
    job = ("--num-epochs", 2, "--batch-size", 32)
    assert accuracies(*job, ranks=4)[-1] > accuracies(*job, "--average", ranks=4)[-1]


def errors_of_resnet(*options: object, ranks: int = 2) -> tuple[str, list[float]]:
    """Return the first line of the ResNet example, and the test error after each epoch."""
    pytest.importorskip("sklearn")
    first, *epochs = printed("ddp_cifar_resnet.py", *options, ranks=ranks).splitlines()
    return first, [float(re.findall(r"test error: ([\d.]+)%", line)[0]) for line in epochs]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "more"), [(1, ()), (2, ()), (4, ("--sync-batch-norm",))])
def test_small_resnet_reaches_its_best_error(ranks: int, more: tuple[str, ...]) -> None:
    """Single epochs of such networks may fail, so the best epoch counts."""
    job = ("--model", "small", "--num-epochs", 5, "--batch-size", 64 // ranks, *more)
    first, errors = errors_of_resnet(*job, ranks=ranks)
    assert first == "Data: digits, enlarged; 1437 images to learn, 360 to test"
    assert len(errors) == 5
    assert min(errors) <= 6


@pytest.mark.slow
def test_resnet18_reads_binary_files_of_cifar(tmp_path: Path) -> None:
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
def test_time_series_forecasts_one_step_from_each_window(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "forecast.png"
    alone = numbers(printed(SERIES, *SHORT, "--plot", file))
    assert alone == pytest.approx(numbers(printed(SERIES, *SHORT, ranks=2)), abs=0.002)
    error, repeated, _, ahead = alone
    assert error < 0.08 < repeated
    assert ahead < repeated
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 4])
def test_time_series_learns_with_default_length_and_any_seed(ranks: int) -> None:
    for seed in range(3):
        error, *_ = numbers(printed(SERIES, "--seed", seed, ranks=ranks))
        assert error < 0.08
