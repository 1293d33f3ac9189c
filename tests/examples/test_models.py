"""The models of examples/: alone, under flrun and mpirun, the same bits on any number of ranks."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Options that make few and small steps of each.
SMALL = {
    "digits_cnn": ("--steps", 4, "--every", 2, "--batch-size", 24),
    "tiny_gpt": ("--steps", 4, "--every", 2, "--letters", 3),
    "cifar_resnet": ("--steps", 4, "--every", 2, "--batch-size", 8, "--width", 2),
}
# What is divided among leaves has no state of its own there, as statistics of batches are.
PLAIN = {"digits_cnn", "tiny_gpt"}
ALONE = (sys.executable, "-W", "error")
FLRUN = (sys.executable, "-m", "flashlight_py.launch", "-n")


def output(start: tuple[object, ...], name: str, *options: object) -> str:
    """What an example prints; it must end well."""
    command = [*start, ROOT / "examples" / f"{name}.py", *SMALL[name], *options]
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def digest(text: str) -> str:
    found = re.search(r"SHA-256 of the parameters: (\w{64})", text)
    assert found, text
    return found[1]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in PLAIN)) for name in SMALL]
)
def test_leaves_have_the_same_bits_on_any_number_of_ranks(name: str) -> None:
    """Captured and eager."""
    alone = digest(output(ALONE, name, "--leaves", 8))
    assert digest(output((*FLRUN, 2), name, "--leaves", 8, "--capture")) == alone


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_leaves_on_three_and_four_ranks(name: str) -> None:
    found = {digest(output((*FLRUN, ranks), name, "--leaves", 8)) for ranks in (1, 3, 4)}
    assert len(found) == 1


@pytest.mark.parametrize("name", ["tiny_gpt"])
def test_a_run_that_was_ended_goes_on(name: str, tmp_path: Path) -> None:
    """With what dropout and batches draw, and the rate of the schedule's step."""
    whole = output(ALONE, name)
    folder = tmp_path / "run"
    output((*FLRUN, 2), name, "--folder", folder)
    (newest, _) = sorted(folder.iterdir(), reverse=True)
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()
    rest = output((*FLRUN, 2), name, "--folder", folder)
    assert "step     2" in whole
    assert "step     2" not in rest
    assert "step     4" in rest


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_mpirun_and_flrun_do_the_same(name: str) -> None:
    """Captured and eager."""
    found = output(("mpirun", "-n", 2, *ALONE), name)
    assert digest(output((*FLRUN, 2), name, "--capture")) == digest(found)


@pytest.mark.slow
def test_digits_are_learned(tmp_path: Path) -> None:
    """With the options that the example has by itself: the last ones count."""
    options = "--steps", 1_000, "--every", 200, "--batch-size", 64, "--capture"
    text = output(ALONE, "digits_cnn", *options, "--folder", tmp_path / "run")
    assert float(re.findall(r"accuracy ([\d.]+)%", text)[-1]) >= 98.5
    picture = tmp_path / "losses.png"
    program = ROOT / "examples" / "plot_losses.py"
    subprocess.run([*ALONE, program, picture, tmp_path / "run"], check=True, timeout=60)
    assert picture.stat().st_size > 10_000
