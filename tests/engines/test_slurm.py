"""Ranks that a real Slurm starts: by srun, several steps at a time, and by submitit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.slurm import Slurm

PROGRAM = str(Path(__file__).with_name("program.py"))
PYTHON = [sys.executable, PROGRAM]
ROOT = str(Path(__file__).parents[2])


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with Slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def await_no_processes(slurm: Slurm, seconds: float = 20.0) -> None:
    """Steps end a little after srun has."""
    ends = time.monotonic() + seconds
    while (left := slurm.processes()) and time.monotonic() < ends:
        time.sleep(0.1)  # no event when a process of another namespace goes
    assert not left


def await_ranks(srun: subprocess.Popen[str], ranks: int) -> None:
    """Read until so many ranks have met."""
    assert srun.stdout is not None
    for _ in range(ranks):
        assert "sum" in srun.stdout.readline()


def sums(output: str) -> list[str]:
    return sorted(re.findall(r"\d+ of \d+ sum \d+", output))


def world(size: int) -> list[str]:
    total = size * (size - 1) // 2
    return sorted(f"{rank} of {size} sum {total}" for rank in range(size))


def test_srun(slurm: Slurm) -> None:
    """Two nodes with unequal numbers of tasks, which meet at the first."""
    done = slurm.run(["srun", "-n", "4", "-N", "2", *PYTHON])
    assert done.returncode == 0, done.stderr
    assert sums(done.stdout) == world(4)
    await_no_processes(slurm)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ["-n", "3", "--export=NONE"],
        ["-N", "3", "--ntasks-per-node=2"],
        ["-n", "6", "-N", "3", "-m", "cyclic"],
        ["-n", "1"],
    ],
    ids=" ".join,
)
def test_layouts_of_a_step(slurm: Slurm, options: list[str]) -> None:
    size = int(options[1]) * (2 if options[0] == "-N" else 1)
    done = slurm.run(["srun", *options, *PYTHON])
    assert done.returncode == 0, done.stderr
    assert sums(done.stdout) == world(size)


@pytest.mark.slow
def test_a_heterogeneous_step_is_one_world(slurm: Slurm) -> None:
    done = slurm.run(["srun", "-n", "3", "-N", "2", *PYTHON, ":", "-n", "2", *PYTHON])
    assert done.returncode == 0, done.stderr
    assert sums(done.stdout) == world(5)


@pytest.mark.slow
def test_steps_of_one_job_at_the_same_time(slurm: Slurm) -> None:
    """Each step is a world of its own, with a port of its own; its size is not the job's."""
    step = " ".join(["srun --overlap -n 2 -N 2", *PYTHON])
    script = f"{step} & {step} & srun --overlap -n 3 {' '.join(PYTHON)} & wait"
    done = slurm.run(["salloc", "-n", "6", "-N", "3", "bash", "-c", script])
    assert done.returncode == 0, done.stderr
    assert sums(done.stdout) == sorted([*world(2), *world(2), *world(3)])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise", "kill"])
def test_a_rank_that_fails_ends_the_step(slurm: Slurm, how: str) -> None:
    """The others are told by us, also without srun's --kill-on-bad-exit."""
    done = slurm.run(["srun", "-n", "4", "-N", "2", *PYTHON, "2", how])
    assert done.returncode != 0
    lost = done.stderr.count("PeerLostError: ")
    assert lost >= 3, done.stderr
    if how == "raise":
        assert "ValueError: a bad batch" in done.stderr
    await_no_processes(slurm)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["scancel --name ended", "pkill -INT -x srun; pkill -INT -x srun"])
def test_a_job_that_is_ended_leaves_nothing(slurm: Slurm, way: str) -> None:
    """By Slurm, and by Ctrl-C, twice, as srun wants it."""
    srun = slurm.popen(
        ["srun", "--job-name", "ended", "-n", "4", "-N", "2", *PYTHON, "1", "wait"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        await_ranks(srun, 4)
        slurm.run(["bash", "-c", way])
        assert srun.wait(30) != 0
    finally:
        slurm.run(["pkill", "-KILL", "-x", "srun"])
        srun.communicate()
    await_no_processes(slurm)


@pytest.mark.slow
def test_submitit(slurm: Slurm, tmp_path: Path) -> None:
    """Its tasks are those of an srun in a batch script, in whose shell there is no task."""
    pytest.importorskip("submitit", reason="needs pip install 'flashlight-py[slurm]'")
    script = tmp_path / "submit.py"
    script.write_text(
        f"""
import submitit
from tests.engines.program import submitted

executor = submitit.AutoExecutor({str(tmp_path / "log")!r}, cluster="slurm")
executor.update_parameters(nodes=2, tasks_per_node=2, timeout_min=5)
print(executor.submit(submitted, 10).results())
"""
    )
    done = slurm.run([sys.executable, str(script)], {"PYTHONPATH": ROOT}, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str([(rank, 4, 46) for rank in range(4)])


@pytest.mark.slow
def test_nothing_outlives_the_process_of_the_tests(tmp_path: Path) -> None:
    """Killed by SIGKILL, it closes the pipe that the namespaces live by."""
    program = f"""
import os, sys
from pathlib import Path
from tests.engines.slurm import Slurm
slurm = Slurm(Path({str(tmp_path)!r}))
slurm.popen(["srun", "sleep", "600"])
print(slurm._init.pid, flush=True)
os.kill(os.getpid(), 9)
"""
    environ = {**os.environ, "PYTHONPATH": ROOT}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environ, stdout=subprocess.PIPE, text=True, timeout=60, check=False,
    )  # fmt: skip
    if done.returncode != -9:
        pytest.skip("needs the cluster of the other tests")
    unshare = int(done.stdout)
    ends = time.monotonic() + 20
    while Path(f"/proc/{unshare}").exists() and time.monotonic() < ends:
        time.sleep(0.05)  # it is nobody's child here
    assert not Path(f"/proc/{unshare}").exists()
