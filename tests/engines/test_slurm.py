"""Ranks in a real Slurm: srun, concurrent steps, and submitit."""

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.hosts import Host
from tests.engines import slurm as cluster

PROGRAM = str(Path(__file__).with_name("program.py"))
PYTHON = [sys.executable, PROGRAM]
ROOT = str(Path(__file__).parents[2])


@pytest.fixture(scope="module")
def slurm() -> Iterator[Host]:
    with cluster.slurm() as login:
        yield login


def await_no_processes(slurm: Host, seconds: float = 20.0) -> None:
    """Wait for the end of all processes; steps end shortly after srun."""
    ends = time.monotonic() + seconds
    look = ["pgrep", "--full", "--list-full", "srun|slurmstepd|program.py"]
    while (left := slurm.run(look).stdout) and time.monotonic() < ends:
        time.sleep(0.1)  # polled: no event for processes of another namespace
    assert not left


def await_ranks(srun: subprocess.Popen[str], ranks: int) -> None:
    """Read until ``ranks`` ranks have connected."""
    assert srun.stdout is not None
    for _ in range(ranks):
        assert "sum" in srun.stdout.readline()


def sums(output: str) -> list[str]:
    return sorted(re.findall(r"\d+ of \d+ sum \d+", output))


def world(size: int) -> list[str]:
    total = size * (size - 1) // 2
    return sorted(f"{rank} of {size} sum {total}" for rank in range(size))


def test_srun_runs_ranks_on_nodes_with_unequal_tasks(slurm: Host) -> None:
    done = slurm.run(["srun", "-n", "4", "-N", "2", *PYTHON])
    assert done.returncode == 0, done.stderr
    assert sums(done.stdout) == world(4)
    await_no_processes(slurm)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "options"),
    [
        (3, ["-n", "3", "--export=NONE"]),
        (6, ["-N", "3", "--ntasks-per-node=2"]),
        (6, ["-n", "6", "-N", "3", "-m", "cyclic"]),
        (5, ["-n", "3", "-N", "2", *PYTHON, ":", "-n", "2"]),  # a heterogeneous step is one world
        (1, ["-n", "1"]),
    ],
    ids=str,
)
def test_srun_supports_task_layouts(slurm: Host, size: int, options: list[str]) -> None:
    done = slurm.run(["srun", *options, *PYTHON])
    assert done.returncode == 0, done.stderr
    assert sums(done.stdout) == world(size)


@pytest.mark.slow
def test_concurrent_steps_of_a_job_are_separate_worlds(slurm: Host) -> None:
    step = " ".join(["srun --overlap -n 2 -N 2", *PYTHON])
    script = f"{step} & {step} & srun --overlap -n 3 {' '.join(PYTHON)} & wait"
    done = slurm.run(["salloc", "-n", "6", "-N", "3", "bash", "-c", script])
    assert done.returncode == 0, done.stderr
    assert sums(done.stdout) == sorted([*world(2), *world(2), *world(3)])


@pytest.mark.slow
@pytest.mark.parametrize("failure", ["raise", "kill"])
def test_failed_rank_ends_the_step(slurm: Host, failure: str) -> None:
    """flashlight_py notifies the other ranks, even without srun's --kill-on-bad-exit."""
    done = slurm.run(["srun", "-n", "4", "-N", "2", *PYTHON, "2", failure])
    assert done.returncode != 0
    lost = done.stderr.count("PeerLostError: ")
    assert lost >= 3, done.stderr
    if failure == "raise":
        assert "ValueError: a bad batch" in done.stderr
    await_no_processes(slurm)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command", ["scancel --name ended", "pkill -INT -x srun; pkill -INT -x srun"]
)
def test_cancelled_job_leaves_nothing(slurm: Host, command: str) -> None:
    """Cancelled by Slurm, and by Ctrl-C, which srun needs twice."""
    srun = slurm.popen(
        ["srun", "--job-name", "ended", "-n", "4", "-N", "2", *PYTHON, "1", "wait"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        await_ranks(srun, 4)
        slurm.run(["bash", "-c", command])
        assert srun.wait(30) != 0
    finally:
        slurm.run(["pkill", "-KILL", "-x", "srun"])
        srun.communicate()
    await_no_processes(slurm)


@pytest.mark.slow
def test_submitit_runs_a_function_on_all_ranks(slurm: Host) -> None:
    """submitit calls srun in a batch script, whose shell is not a task."""
    pytest.importorskip("submitit", reason="needs pip install 'flashlight-py[slurm]'")
    script = slurm.shared / "submit.py"
    script.write_text(
        f"""
import submitit
from tests.engines.program import submitted

executor = submitit.AutoExecutor({str(slurm.shared / "log")!r}, cluster="slurm")
executor.update_parameters(nodes=2, tasks_per_node=2, timeout_min=5)
print(executor.submit(submitted, 10).results())
"""
    )
    done = slurm.run([sys.executable, script], timeout=100, env={"PYTHONPATH": ROOT})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str([(rank, 4, 46) for rank in range(4)])
