"""examples/ResumableTraining.py --leaves 8: the same bits after random kills, on any number of
ranks.

The environment variable KILLS sets the number of rounds.
"""

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.examples.programs import ALONE, DEADLINE, EXAMPLES, FLRUN, output
from tests.launch.launcher import LAUNCH

PROGRAM = EXAMPLES / "ResumableTraining.py"
EPOCHS, SAVES = 3, 37  # 150 steps, with a checkpoint after every 4th
JOB = ("--leaves", "8", "--epochs", str(EPOCHS), "--save-every", "4")
ROUNDS = int(os.environ.get("KILLS", "8"))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: Any) -> str:
    """Return the SHA-256 of an undisturbed run with one process."""
    return digest(output(ALONE, PROGRAM, "--folder", str(tmp_path_factory.mktemp("alone")), *JOB))


def digest(text: str) -> str:
    return text.partition("SHA-256 of the parameters: ")[2].strip()


def ranks_of(folder: Path) -> list[int]:
    """Return the rank processes that train in ``folder``, without the launcher."""
    results = []
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            entries = (process / "environ").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError, PermissionError):  # the process has ended
            continue
        if bytes(folder) in words and any(entry.startswith(b"RANK=") for entry in entries):
            results.append(int(process.name))
    return results


def disturbed(folder: Path, random: Any, ranks: int, kills: int, *options: str) -> tuple[str, int]:
    """Run the launcher, kill random ranks at random moments, and return its output."""
    command = [*LAUNCH, "-n", str(ranks), *options, str(PROGRAM), "--folder", str(folder), *JOB]
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    killed = 0
    lines: list[str] = []
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, **pipes) as launcher:
        try:
            for _ in range(kills):
                moment = random.integers(2, 2 + SAVES // (2 * kills + 1))
                lines += [launcher.stdout.readline() for _ in range(moment)]
                time.sleep(random.uniform(0, 0.01))  # the moment of the kill is random
                if victims := ranks_of(folder):
                    os.kill(victims[random.integers(len(victims))], signal.SIGKILL)
                    killed += 1
            rest, errors = launcher.communicate(timeout=DEADLINE)
        finally:
            launcher.kill()
    assert launcher.returncode == 0, errors
    return "".join(lines) + rest, killed


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(ROUNDS))
def test_training_has_equal_bits_after_any_kills(tmp_path: Path, expected: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    folder = tmp_path / "run"
    for _ in range(2):  # the whole job is killed and starts again with another number of ranks
        command = [*LAUNCH, "-n", str(random.integers(1, 9)), str(PROGRAM)]
        with subprocess.Popen(
            [*command, "--folder", str(folder), *JOB], stdout=subprocess.PIPE, text=True
        ) as launcher:
            for _ in range(random.integers(1, 10)):
                launcher.stdout.readline()
            launcher.kill()
    kills, ranks = int(random.integers(1, 4)), int(random.integers(2, 9))
    options = ("--max-restarts", str(kills))
    if random.random() < 0.5:
        options, kills = ("--min-n", "1"), min(kills, ranks - 1)
    text, _ = disturbed(folder, random, ranks, kills, *options)
    assert digest(text) == expected


@pytest.mark.slow
def test_training_ends_at_once_if_the_run_is_finished(tmp_path: Path) -> None:
    """Without leaves. The last line has the SHA-256 of the parameters."""
    result = tmp_path / "result.npz"
    job = ("--folder", tmp_path / "run", "--result", result, "--epochs", 1, "--save-every", 50)
    first, again = (output((*FLRUN, 2), PROGRAM, *job) for _ in range(2))
    last = first.splitlines(keepends=True)[-1]
    assert first == f"Starting\nSaved step 50\nDone after step 50\n{last}"
    assert again == f"Going on from step 50\nDone after step 50\n{last}"
    with np.load(result) as saved:
        assert len(saved.files) == 4
