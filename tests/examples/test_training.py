"""DistributedTraining.py in one process, with MPI and a shared file, and ResumableTraining.py.

With --leaves 8, ResumableTraining.py has the same bits after random kills, on any number of ranks.
The environment variable KILLS sets the number of rounds.
"""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flashlight_py.doctor import mpirun_command
from tests.distributed.processes import finish_all
from tests.examples.programs import ALONE, DEADLINE, EXAMPLES, FLRUN, output
from tests.launch.launcher import LAUNCH

PYTHON = [*ALONE, str(EXAMPLES / "DistributedTraining.py")]


def start(command: list[str], *options: object, **more: object) -> subprocess.Popen[str]:
    return subprocess.Popen(  # type: ignore[call-overload,no-any-return]
        [*command, *(str(option) for option in options)],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **more},
    )


def printed(*processes: subprocess.Popen[str]) -> list[str]:
    """Return the stdout of each process after all succeeded; kill the others after a failure."""
    codes, outputs, errors = zip(*finish_all(processes, DEADLINE), strict=True)
    assert set(codes) == {0}, errors
    return list(outputs)


def losses(output: str) -> list[float]:
    """Check the lines that the program prints, and return the loss of each epoch."""
    first, *epochs, last, took = output.splitlines()
    assert first == "[Multi-layer Perceptron] Started..."
    assert last == "[Multi-layer Perceptron] Done!"
    assert re.fullmatch(rf"{len(epochs)} epochs in \d+\.\d s", took)
    results = [re.fullmatch(r"Epoch: (\d+) Mean Squared Error: (\S+)", line) for line in epochs]
    assert all(results), output
    assert [int(match[1]) for match in results if match] == list(range(1, len(epochs) + 1))
    texts = [match[2] for match in results if match]
    assert all(f"{float(text):g}" == text for text in texts), "six significant digits"
    return [float(text) for text in texts]


def by_file(tmp_path: Path, size: int, *options: object) -> list[subprocess.Popen[str]]:
    world = ["--init", "file", "--file", tmp_path / "meet", "--world-size", size]
    return [start(PYTHON, *world, "--rank", rank, *options) for rank in range(size)]


def parameters(file: Path) -> dict[str, np.ndarray]:
    with np.load(file) as saved:
        return dict(saved)


@pytest.mark.slow
def test_example_reduces_the_loss_with_a_shared_file_and_without_mpi(tmp_path: Path) -> None:
    first, second = printed(*by_file(tmp_path, 2, "--epochs", 2, "--samples", 3000))
    result = losses(first)
    assert result[1] < 0.75 * result[0]
    assert second == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_example_has_equal_losses_for_any_number_of_processes(size: int, tmp_path: Path) -> None:
    """The global batches are equal, so the parameters differ by float32 rounding only. Only rank 0
    prints."""
    job = ["--epochs", 2, "--samples", 400, "--batch-size"]
    alone, together = tmp_path / "alone.npz", tmp_path / "together.npz"
    (one,) = printed(start(PYTHON, *job, 4, "--save", alone))
    (many,) = printed(start([*mpirun_command(size), *PYTHON], *job, 4 // size, "--save", together))
    np.testing.assert_allclose(losses(many), losses(one), rtol=1e-3)
    assert losses(one)[1] < losses(one)[0]
    ours, others = parameters(together), parameters(alone)
    assert ours.keys() == others.keys()
    for name, value in others.items():
        np.testing.assert_allclose(ours[name], value, rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.slow
def test_example_exits_with_an_error_if_a_rank_has_no_sample(tmp_path: Path) -> None:
    for process in by_file(tmp_path, 2, "--samples", 1):
        output, error = process.communicate(timeout=DEADLINE)
        assert (process.returncode, output) == (1, "")
        assert "--samples: expected at least 2, one for each process, got 1" in error


@pytest.mark.slow
def test_example_writes_parameters_and_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    job = ["--epochs", 2, "--samples", 50, "--save", tmp_path / "p.npz"]
    printed(start(PYTHON, *job, "--plot", tmp_path / "loss.png"))
    shapes = sorted(value.shape for value in parameters(tmp_path / "p.npz").values())
    assert shapes == sorted([(100, 10), (100,), (1, 100), (1,)])
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_example_has_equal_losses_for_equal_seeds_only() -> None:
    job = ["--epochs", 1, "--samples", 50, "--seed"]
    outputs = printed(*(start(PYTHON, *job, seed) for seed in (1, 1, 2)))
    first, again, other = map(losses, outputs)  # the outputs also contain times
    assert first == again != other


@pytest.mark.slow
def test_example_shows_a_progress_bar_on_terminals_only() -> None:
    pytest.importorskip("tqdm")
    job = ["--epochs", 2, "--samples", 50]
    ours, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", 24, 80, 0, 0))
    # Both ends of the terminal stay open, because closing one discards the output.
    with os.fdopen(ours, "rb", buffering=0) as screen, os.fdopen(terminal, "wb"):
        (output,) = printed(start(PYTHON, *job, stderr=terminal))
        assert select.select([screen], [], [], DEADLINE)[0], "nothing was shown"
        assert b"epoch" in screen.read(4096)
    assert len(losses(output)) == 2
    piped = start(PYTHON, *job)
    assert piped.communicate(timeout=DEADLINE)[1] == ""


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
