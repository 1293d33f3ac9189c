"""An MPI job in which something goes wrong ends, on every rank, soon, and says why."""

import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from tests.distributed import mpi_ranks
from tests.distributed.harness import mpirun_command, run_outcomes
from tests.distributed.jobs import ended, start

pytest.importorskip("mpi4py")

WORLD: dict[str, Any] = {"init": "mpi", "params": {"BACKEND": "mpi"}}

PREAMBLE = """
import os, signal, sys, threading
import numpy as np
import flashlight_py as fl

fl.distributed_init(fl.DistributedInit.MPI, params={"BACKEND": "mpi"})
rank = fl.get_world_rank()
fl.barrier()
if rank == 0:
    sys.stdout.write("joined\\n")
    sys.stdout.flush()
fl.barrier()  # what ranks print later is not mixed with it
"""


def start_job(size: int, script: str) -> subprocess.Popen[str]:
    return start([*mpirun_command(size), sys.executable, "-c", PREAMBLE + script])


def run(size: int, script: str) -> tuple[int, str]:
    return ended(start_job(size, script))


@pytest.mark.parametrize(
    "others",
    [
        "fl.all_reduce(np.zeros(3))",
        pytest.param("threading.Event().wait()", marks=pytest.mark.slow),  # they compute
    ],
)
def test_an_uncaught_exception_is_printed_and_ends_the_job(others: str) -> None:
    script = f"""
if rank == 1:
    raise ValueError("no such file")
{others}
"""
    code, output = run(3, script)
    assert code != 0
    assert "Traceback" in output
    assert "ValueError: no such file" in output


@pytest.mark.parametrize(
    "call",
    [
        pytest.param("Ibarrier()", marks=pytest.mark.slow),
        "Iallreduce(np.ones(4), np.empty(4))",
    ],
)
def test_a_rank_that_raises_takes_no_part_in_calls_of_the_program(call: str) -> None:
    """Nor would its last words be taken for a part: they have a communicator of their own."""
    script = f"""
from mpi4py import MPI
if rank == 1:
    raise ValueError("no such file")
MPI.COMM_WORLD.{call}.Wait()
print("all are here", flush=True)
"""
    code, output = run(2, script)
    assert code != 0
    assert "all are here" not in output


@pytest.mark.slow
@pytest.mark.parametrize(
    "abandon", ["group.barrier(timeout=0.2)", "group.all_reduce(np.full(9, 7.0), async_op=True)"]
)
def test_what_was_abandoned_does_not_reach_the_groups_of_a_new_world(abandon: str) -> None:
    script = f"""
for _ in range(2):
    group = fl.new_group([0, 1, 2])
    try:
        if rank == 0:
            {abandon}
    except fl.errors.MismatchError:  # the others are in the world's shutdown meanwhile
        pass
    fl.distributed_shutdown()
    fl.distributed_init(fl.DistributedInit.MPI, params={{"BACKEND": "mpi"}})
    some, all = fl.new_group([1, 2]), fl.new_group([2, 1, 0])
    for i in range(5):
        if some.is_member:
            assert some.all_reduce(np.full(4, rank + i)).tolist() == [3 + 2 * i] * 4
            assert some.all_gather_object(rank * i) == [i, 2 * i]
        assert all.all_gather(np.full(2, rank)).tolist() == [2, 2, 1, 1, 0, 0]
"""
    code, output = run(3, script)
    assert (code, output.strip()) == (0, "joined")


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("sys.exit(3)", "lost rank 1 (it ended normally or closed this group after "),
        ("os.kill(os.getpid(), signal.SIGKILL)", ""),
    ],
)
def test_a_rank_that_exits_or_is_killed_ends_the_job(end: str, told: str) -> None:
    script = f"""
if rank == 1:
    {end}
fl.all_reduce(np.zeros(3))
"""
    code, output = run(3, script)
    assert code != 0
    assert told in output


def test_a_job_that_ends_well_exits_with_0() -> None:
    script = """
x = np.ones(3)
fl.all_reduce(x)
assert np.all(x == 2)
work = fl.all_reduce(x, async_op=True)
work.wait()
if rank == 0:
    fl.distributed_shutdown()
else:
    fl.barrier()  # the other's shutdown is a barrier too, and exit does the rest
"""
    code, output = run(2, script)
    assert (code, output.strip()) == (0, "joined")


@pytest.mark.slow
def test_a_forked_child_that_raises_does_not_end_the_job() -> None:
    script = """
child = os.fork()
if child == 0:
    try:
        raise ValueError("of the child")
    except ValueError:
        sys.excepthook(*sys.exc_info())
    os._exit(5)
_, status = os.waitpid(child, 0)
x = np.ones(1)
fl.all_reduce(x)
assert os.waitstatus_to_exitcode(status) == 5 and x == 2
"""
    code, output = run(2, script)
    assert code == 0, output
    assert output.count("of the child") == 2


@pytest.mark.parametrize("whom", ["job", pytest.param("rank", marks=pytest.mark.slow)])
def test_ctrl_c_ends_the_job(whom: str) -> None:
    script = """
if rank == 1:
    fl.recv(np.zeros(3), 0)
fl.barrier()
"""
    if whom == "rank":
        script = "if rank == 0: threading.Timer(0.3, os.kill, (os.getpid(), 2)).start()\n" + script
    process = start_job(2, script)
    assert process.stdout.readline() == "joined\n"
    if whom == "job":
        time.sleep(0.2)  # so that the ranks wait
        os.killpg(process.pid, signal.SIGINT)
    code, output = ended(process)
    assert code != 0
    assert whom == "job" or "KeyboardInterrupt" in output


@pytest.mark.slow
@pytest.mark.parametrize("case", ["recv", "send"])
def test_a_message_that_never_comes_names_both_tags(case: str) -> None:
    params = {"BACKEND": "mpi", "TIMEOUT": 1}
    outcomes = run_outcomes(mpi_ranks.wait_alone, 2, case, init="mpi", params=params)
    texts = [outcome.value for outcome in outcomes]
    assert any(text.startswith("CollectiveTimeoutError") for text in texts)
    for text in texts:
        assert "did not join within 1 seconds" in text or "gave up waiting for this rank" in text
        assert "with tag 5" in text
        assert "with tag 7" in text


def test_a_rank_that_leaves_is_lost_at_once() -> None:
    outcomes = run_outcomes(mpi_ranks.leave_early, 3, **WORLD)
    for rank in (0, 2):
        assert "lost rank 1 (it ended normally or closed this group" in outcomes[rank].value
