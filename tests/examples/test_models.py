"""The models of examples/ with one process, flrun and mpirun: the same bits on any number of
ranks."""

import re
from pathlib import Path

import pytest

from tests.examples import programs
from tests.examples.programs import ALONE, FLRUN

# Options for few and small steps.
SMALL = {
    "digits_cnn": ("--steps", 4, "--every", 2, "--batch-size", 24),
    "tiny_gpt": ("--steps", 4, "--every", 2, "--letters", 3),
    "cifar_resnet": ("--steps", 4, "--every", 2, "--batch-size", 8, "--width", 2),
}


def output(start: tuple[object, ...], name: str, *options: object) -> str:
    return programs.output(start, f"{name}.py", *SMALL[name], *options)


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
    alone = digest(output(ALONE, name, "--leaves", 8))
    assert digest(output((*FLRUN, ranks), name, "--leaves", 8, *options)) == alone


@pytest.mark.slow
def test_model_continues_from_its_checkpoint(tmp_path: Path) -> None:
    """The checkpoint restores random generators and the learning rate of the schedule."""
    unbroken = output(ALONE, "tiny_gpt")
    folder = tmp_path / "run"
    output((*FLRUN, 2), "tiny_gpt", "--folder", folder)
    (newest, _) = sorted(folder.iterdir(), reverse=True)
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()
    rest = output((*FLRUN, 2), "tiny_gpt", "--folder", folder)
    assert "step     2" in unbroken
    assert "step     2" not in rest
    assert "step     4" in rest


@pytest.mark.slow
def test_model_has_the_same_bits_with_mpirun_and_flrun() -> None:
    """Both captured and eager."""
    result = output(("mpirun", "-n", 2, *ALONE), "cifar_resnet")
    assert digest(output((*FLRUN, 2), "cifar_resnet", "--capture")) == digest(result)


@pytest.mark.slow
def test_digits_cnn_reaches_its_accuracy_with_default_options(tmp_path: Path) -> None:
    options = "--steps", 1_000, "--every", 200, "--batch-size", 64, "--capture"
    text = output(ALONE, "digits_cnn", *options, "--folder", tmp_path / "run")
    assert float(re.findall(r"accuracy ([\d.]+)%", text)[-1]) >= 98.5
    picture = tmp_path / "losses.png"
    programs.output(ALONE, "plot_losses.py", picture, tmp_path / "run")
    assert picture.stat().st_size > 10_000
