"""Hosts of which nothing is heard any more. All hosts are this one, as in the tests beside."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.launch.launcher import LAUNCH, launch, write

STAND_IN = 'exec sh -c "$2"\n'
STOPPING = """
import os, signal
if os.environ["FLASHLIGHT_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "1":
        os.kill(os.getppid(), signal.SIGSTOP)
    signal.pause()
print("of", os.environ["WORLD_SIZE"])
"""


@pytest.mark.slow
def test_an_agent_that_is_silent_is_lost_with_its_ranks(tmp_path: Path) -> None:
    """Stopped as a machine that hangs; the connection stands."""
    ssh = f"sh {write(tmp_path, STAND_IN, 'ssh')}"
    program = write(tmp_path, STOPPING)
    options = ("--hosts", "a,b:2", "--ssh", ssh, "--lost-after", 2, "--min-n", 1)
    done = launch(*options, program)
    assert done.stdout == "[0] of 1\n", done.stderr
    lost, again = done.stderr.splitlines()
    assert lost.startswith("flrun: rank 1 of 3 on b is lost: nothing has come from host b since ")
    assert lost.endswith(" (2 s); the other ranks were ended")
    assert again == "flrun: starting again with 1 rank(s), for the 1st time"


@pytest.mark.slow
def test_whoever_waits_for_a_reader_is_not_silent(tmp_path: Path) -> None:
    """As behind a pager: the launcher is stuck in a system call for longer than hosts may be."""
    ssh = f"sh {write(tmp_path, STAND_IN, 'ssh')}"
    program = write(tmp_path, "for _ in range(3000): print('x' * 1000)\n")
    command = [*LAUNCH, "--hosts", "a,b", "--ssh", ssh, "--lost-after", "2", str(program)]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=6)
    output, errors = process.communicate(timeout=30)
    assert (process.returncode, errors) == (0, b"")
    assert output.count(b"\n") == 6000


@pytest.mark.slow
def test_an_agent_that_is_cut_off_says_so_and_ends_its_ranks(tmp_path: Path) -> None:
    """Its launcher, the copy that has the connection, is stopped; the agent runs on."""
    ssh = f"sh {write(tmp_path, STAND_IN, 'ssh')}"
    hold = ("--no-python", "sh", "-c", "echo $$ >&2; sleep 60")
    command = [*LAUNCH, "--hosts", "a", "--ssh", ssh, "--lost-after", "2", *hold]
    launcher = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    assert launcher.stderr
    rank = int(launcher.stderr.readline().split()[-1])
    copy = int(Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text())
    os.kill(copy, signal.SIGSTOP)
    line = launcher.stderr.readline()
    expected = f"flrun: agent on {os.uname().nodename}: nothing has come from the launcher since "
    assert line.startswith(expected)
    assert line.endswith(" (2 s); its ranks here were ended\n")
    assert not Path(f"/proc/{rank}").exists()
    os.kill(copy, signal.SIGCONT)
    _, errors = launcher.communicate(timeout=30)
    assert launcher.returncode == 1
    assert "flrun: rank 0 of 1 on a is lost: ssh to a exited with code 1" in errors
