"""examples/ResumableTraining.py: killed at any moment and started again, it ends the same.

KILLS=50 in the environment kills more often than the few times of an ordinary test run.
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tests.distributed.jobs import free_port
from tests.examples.programs import ALONE, DEADLINE, EXAMPLES

RANKS = 2
KILLS = int(os.environ.get("KILLS", "3"))


@contextmanager
def started(*options: object) -> Iterator[list[subprocess.Popen[str]]]:
    """Start the ranks of a world of their own; kill -9 whoever is still there at the end."""
    world = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    command = [*ALONE, str(EXAMPLES / "ResumableTraining.py"), *map(str, options)]
    processes = []
    for rank in range(RANKS):
        env = {**os.environ, **world, "RANK": str(rank)}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen(command, env=env, **pipes))  # type: ignore[call-overload]
    try:
        yield processes
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
        for process in processes:
            process.communicate()


def trained(folder: Path, *options: object) -> tuple[str, dict[str, np.ndarray]]:
    """Train to the end; return what rank 0 printed and the parameters."""
    result = folder.with_suffix(".npz")
    with started("--folder", folder, "--result", result, *options) as processes:
        outputs = [process.communicate(timeout=DEADLINE) for process in processes]
        assert [process.returncode for process in processes] == [0] * RANKS, outputs
    with np.load(result) as saved:
        return outputs[0][0], dict(saved)


@pytest.mark.slow
def test_killed_at_any_moment_the_parameters_end_the_same(tmp_path: Path) -> None:
    job = ("--epochs", 6, "--save-every", 3)
    _, expected = trained(tmp_path / "undisturbed", *job)
    random = np.random.default_rng(3)
    folder = tmp_path / "killed"
    for _ in range(KILLS):
        with started("--folder", folder, *job) as processes:
            # All kills together leave something to do: 100 lines are printed, 90 read at most.
            for _ in range(random.integers(1, max(2, 90 // KILLS))):
                processes[0].stdout.readline()
            time.sleep(random.uniform(0, 0.003))  # the moment is what is tried here
    output, found = trained(folder, *job)
    assert 0 < int(output.partition("\n")[0].removeprefix("Going on from step ")) < 300
    assert "Done after step 300\n" in output
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert array.tobytes() == found[name].tobytes(), name
    assert len(list(folder.iterdir())) == 3


def last_line(output: str) -> str:
    return output.splitlines(keepends=True)[-1]


@pytest.mark.slow
def test_a_finished_run_has_nothing_to_do(tmp_path: Path) -> None:
    first, expected = trained(tmp_path / "run", "--epochs", 1, "--save-every", 50)
    assert first == "Starting\nSaved step 50\nDone after step 50\n" + last_line(first)
    again, found = trained(tmp_path / "run", "--epochs", 1, "--save-every", 50)
    assert again == "Going on from step 50\nDone after step 50\n" + last_line(first)
    assert all((found[name] == expected[name]).all() for name in expected)
