"""A job that dies at random steps and is started again ends as one that did not, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.launch.launcher import launch, write

EXAMPLE = Path(__file__).parents[2] / "examples" / "ResumableTraining.py"
RANKS, STEPS, DEATHS = 2, 100, 2

# The example itself, with a rank that kills itself in the backward pass of a random step.
DYING = """
import os, runpy, signal, sys
import numpy as np
import flashlight_py as fl

example, seed, ranks, steps, deaths = sys.argv[1], *map(int, sys.argv[2:6])
attempt = int(os.environ["FLASHLIGHT_RESTART_COUNT"])
random = np.random.default_rng([seed, attempt])
victim, moment = int(random.integers(ranks)), int(random.integers(steps // (deaths + 1)))
calls, backward = 0, fl.Variable.backward

def dying(self, *arguments, **options):
    global calls
    if attempt < deaths and calls == moment and int(os.environ["RANK"]) == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    calls += 1
    return backward(self, *arguments, **options)

fl.Variable.backward = dying
sys.argv = [example, *sys.argv[6:]]
runpy.run_path(example, run_name="__main__")
"""


def parameters(file: Path) -> dict[str, bytes]:
    with np.load(file) as saved:
        return {name: saved[name].tobytes() for name in saved.files}


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0])
def test_restarts_change_nothing(tmp_path: Path, seed: int) -> None:
    job = ("--epochs", 2, "--save-every", 5)
    whole = launch(
        *("-n", RANKS, EXAMPLE, *job),
        *("--folder", tmp_path / "whole", "--result", tmp_path / "whole.npz"),
    )
    assert whole.returncode == 0, whole.stderr
    dying = write(tmp_path, DYING)
    again = launch(
        *("-n", RANKS, "--max-restarts", DEATHS, dying, EXAMPLE, seed, RANKS, STEPS, DEATHS, *job),
        *("--folder", tmp_path / "again", "--result", tmp_path / "again.npz"),
    )
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("was killed by SIGKILL") == DEATHS
    assert parameters(tmp_path / "again.npz") == parameters(tmp_path / "whole.npz")
