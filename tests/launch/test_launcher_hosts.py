"""Several hosts: one launcher over ssh, or one on each. All hosts are this one.

There is no ssh server here. A stand-in takes its place, which runs the remote command in a local
shell; what ssh itself does (keys, known hosts, the network) is not tested.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.launch.launcher import LAUNCH, launch, write

ALL_REDUCE = """
import os, sys
import numpy as np
import flashlight_py as fl
fl.distributed_init(fl.DistributedInit.ENV)
print(fl.get_world_rank(), int(fl.all_reduce(np.ones(1))[0]), os.environ.get("LOCAL_RANK"),
      sys.stdin.readline().strip())
"""


@pytest.fixture
def ssh(tmp_path: Path) -> str:
    """``ssh HOST COMMAND``; a host called "down" cannot be reached."""
    stand_in = write(tmp_path, '[ "$1" = down ] && exit 255\nexec sh -c "$2"\n', "ssh")
    return f"sh {stand_in}"


def test_ranks_on_two_hosts_meet_at_a_port_of_their_own(tmp_path: Path, ssh: str) -> None:
    program = write(tmp_path, ALL_REDUCE)
    done = launch("--hosts", "a:2,b", "--ssh", ssh, program, input="typed\n")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] 0 3 0 typed", "[1] 1 3 1 ", "[2] 2 3 0 "]


MEETING_TWICE = """
import glob, os, pathlib, socket
import numpy as np
import flashlight_py as fl

secret, port = os.environ["FLASHLIGHT_SECRET"], int(os.environ["FLASHLIGHT_PORT"].split(":")[0])
for file in glob.glob("/proc/[0-9]*/cmdline"):
    try:
        words = pathlib.Path(file).read_bytes()
    except OSError:  # it has ended
        continue
    assert secret.encode() not in words
try:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind((os.environ["MASTER_ADDR"], port))
        print("not kept")
except OSError:
    print("kept", len(secret), "FLASHLIGHT_LISTENER" in os.environ)
for _ in range(2):
    fl.distributed_init()
    print(int(fl.all_reduce(np.ones(1))[0]))
    fl.distributed_shutdown()
"""


def test_rank_0_is_handed_a_port_that_nobody_else_can_take(tmp_path: Path, ssh: str) -> None:
    """With a secret that no command line shows; and it is theirs for a second start, too."""
    done = launch("--hosts", "a,b", "--ssh", ssh, write(tmp_path, MEETING_TWICE))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = sorted(done.stdout.splitlines())
    expected = [("[0] kept 64 True", "[0] 2", "[0] 2"), ("[1] kept 64 False", "[1] 2", "[1] 2")]
    assert lines == sorted(line for rank in expected for line in rank)


def test_input_of_any_size_reaches_rank_0_of_another_host(tmp_path: Path, ssh: str) -> None:
    program = write(tmp_path, "import sys; print(len(sys.stdin.buffer.read()))")
    large = tmp_path / "large"
    large.write_bytes(os.urandom(300_000))
    with large.open("rb") as file:
        done = launch("--hosts", "a,b", "--ssh", ssh, program, stdin=file)
    assert sorted(done.stdout.splitlines()) == ["[0] 300000", "[1] 0"]


PRINTING_AND_READING = """
import sys, threading
printing = threading.Thread(target=lambda: [print("x" * 1000) for _ in range(2000)])
printing.start()
read = len(sys.stdin.buffer.read())
printing.join()
print(read)
"""


def test_input_and_output_at_once_do_not_wait_for_each_other(tmp_path: Path, ssh: str) -> None:
    """More of both than all pipes in between can hold."""
    program = write(tmp_path, PRINTING_AND_READING)
    large = tmp_path / "large"
    large.write_bytes(os.urandom(3_000_000))
    with large.open("rb") as file:
        done = launch("--hosts", "a", "--ssh", ssh, program, stdin=file, timeout=15)
    assert done.returncode == 0, done.stderr
    *printed, read = done.stdout.splitlines()
    assert (len(printed), read) == (2000, "[0] 3000000")


FAILING = """
import os, signal, subprocess, sys
if os.environ["RANK"] == "1":
    raise ValueError("a bad batch")
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
signal.pause()
"""


def test_a_failure_on_another_host(tmp_path: Path, ssh: str) -> None:
    done = launch("--hosts", "a,b,c", "--ssh", ssh, write(tmp_path, FAILING))
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("flrun: rank 1 of 3 on b raised ValueError: a bad batch")


def test_a_host_that_cannot_be_reached(tmp_path: Path, ssh: str) -> None:
    program = write(tmp_path, "import os; print('of', os.environ['WORLD_SIZE'])")
    done = launch("--hosts", "a,down", "--ssh", ssh, program)
    assert done.returncode == 1
    assert "rank 1 of 2 on down is lost: ssh to down exited with code 255" in done.stderr
    done = launch("--hosts", "a,down:3,b", "--ssh", ssh, "--min-n", 2, program)
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == ["[0] of 2", "[1] of 2"]
    assert done.stderr.count("flrun: starting again") == 1  # all its ranks are lost at once


@pytest.mark.slow
def test_agents_stay_for_a_further_start(tmp_path: Path) -> None:
    """Each start has a port and a secret of its own."""
    log = tmp_path / "log"
    stand_in = write(tmp_path, f'echo "$1" >> {log}\nexec sh -c "$2"\n', "ssh")
    program = """
    import os, sys
    import flashlight_py as fl
    fl.distributed_init()
    fl.barrier()
    print(os.environ["FLASHLIGHT_SECRET"])
    fl.barrier()
    sys.exit(int(os.environ["FLASHLIGHT_RESTART_COUNT"] == "0"))
    """
    ssh = ("--ssh", f"sh {stand_in}")
    done = launch("--hosts", "a,b", *ssh, "--max-restarts", 1, write(tmp_path, program))
    assert done.returncode == 0, done.stderr
    secrets = [line.partition("] ")[2] for line in done.stdout.splitlines()]
    assert secrets[0] == secrets[1] != secrets[2] == secrets[3]
    assert sorted(log.read_text().split()) == ["a", "b"]


WAITING = """
import subprocess, signal
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
print("ready")
signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_signals_reach_other_hosts(tmp_path: Path, ssh: str, number: signal.Signals) -> None:
    """The fixture of this folder looks for processes that are left, also after a SIGKILL."""
    command = [*LAUNCH, "--hosts", "a,b", "--ssh", ssh, str(write(tmp_path, WAITING))]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        for _ in range(2):
            assert "ready" in process.stdout.readline()
        process.send_signal(number)
        _, errors = process.communicate(timeout=10)
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert "KeyboardInterrupt" in errors


def start_node(
    node: int, rdzv: Path | str, *arguments: object, nodes: int = 2, stdout: Any = subprocess.PIPE
) -> Any:
    """Start the launcher of one node, which has a rank more than its number."""
    return subprocess.Popen(
        [*LAUNCH, f"-n{node + 1}", f"--nnodes={nodes}", f"--node-rank={node}", f"--rdzv={rdzv}"]
        + [str(argument) for argument in arguments],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
    )


def on_each_node(rdzv: Path | str, *arguments: object) -> list[Any]:
    """Run one launcher for each of two nodes."""
    launchers = [start_node(node, rdzv, *arguments) for node in range(2)]
    outputs = [launcher.communicate(timeout=30) for launcher in launchers]
    return [
        subprocess.CompletedProcess(launcher.args, launcher.returncode, *output)
        for launcher, output in zip(launchers, outputs, strict=True)
    ]


def test_a_launcher_on_each_host(tmp_path: Path) -> None:
    program = write(tmp_path, ALL_REDUCE)
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    first, second = on_each_node(meeting / "run", program)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert first.stdout == "[0] 0 3 0 \n"
    assert sorted(second.stdout.splitlines()) == ["[1] 1 3 0 ", "[2] 2 3 1 "]
    assert list(meeting.iterdir()) == []


def test_a_failure_ends_all_launchers_with_its_code(tmp_path: Path) -> None:
    program = write(tmp_path, FAILING)
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    for done in on_each_node(meeting, "--max-restarts", 1, program):
        assert done.returncode == 1
        assert done.stderr.count("rank 1 of 3") == 2
        assert "raised ValueError: a bad batch" in done.stderr.splitlines()[-1]
    assert list(meeting.iterdir()) == []


def test_launchers_go_on_together_with_the_ranks_that_remain(tmp_path: Path) -> None:
    program = write(tmp_path, FAILING)
    for done in on_each_node(tmp_path / "run", "--min-n", 2, program):
        assert done.returncode == 1
        reported = [line for line in done.stderr.splitlines() if line.startswith("flrun: ")]
        assert reported[0].startswith("flrun: rank 1 of 3")
        assert reported[1] == "flrun: starting again with 2 rank(s), for the 1st time"
        assert reported[2].startswith("flrun: rank 1 of 2")


def wait_for(folder: Path, pattern: str, seconds: float = 20.0) -> Path:
    """Return the file below ``folder`` that has come."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        if found := list(folder.rglob(pattern)):
            return found[0]
        time.sleep(0.01)
    raise AssertionError(f"no {pattern} in {list(folder.rglob('*'))}")


def wait_for_connection(port: int) -> None:
    """Wait until somebody has connected to the loopback at ``port``."""
    ends = time.monotonic() + 20
    while f" 0100007F:{port:04X} 0100007F:" not in Path("/proc/net/tcp").read_text():
        assert time.monotonic() < ends, f"nobody has connected to port {port}"
        time.sleep(0.01)


def test_a_signal_before_all_launchers_are_there(tmp_path: Path) -> None:
    """The third node never arrives. Who waits is named, and nothing is left in the folder."""
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    nodes = [start_node(node, meeting, "program.py", nodes=3) for node in range(2)]
    wait_for(meeting, "job-*")
    announced = json.loads(wait_for(meeting, "*.run-*").read_text())
    wait_for_connection(announced["addresses"][0][1])
    nodes[0].send_signal(signal.SIGINT)
    errors = [node.communicate(timeout=20)[1] for node in nodes]
    assert [node.returncode for node in nodes] == [130, 1]
    assert errors[0] == "flrun: interrupted by SIGINT; no rank was started\n"
    assert "aborted: interrupted by SIGINT" in errors[1]
    assert list(meeting.iterdir()) == []


FIRST_ENDS = """
import os, pathlib, signal, sys
pathlib.Path(sys.argv[1], f"pid-{os.environ['RANK']}").write_text(f"{os.getpid()}\\n")
if os.environ["RANK"] != "0":
    signal.pause()
"""


def wait_until_rank_0_has_ended(folder: Path) -> None:
    """And the others run: each has written its number to ``folder``."""
    for rank in range(3):
        wait_for(folder, f"pid-{rank}")
    ends = time.monotonic() + 20
    while Path(f"/proc/{(folder / 'pid-0').read_text().strip() or os.getpid()}").exists():
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_a_signal_to_a_launcher_whose_ranks_have_ended(tmp_path: Path) -> None:
    meeting, program = tmp_path / "meeting", write(tmp_path, FIRST_ENDS)
    meeting.mkdir()
    nodes = [start_node(node, meeting, program, tmp_path) for node in range(2)]
    wait_until_rank_0_has_ended(tmp_path)
    nodes[0].send_signal(signal.SIGINT)
    for node in nodes:
        assert node.communicate(timeout=20)[1].endswith(
            "flrun: interrupted by SIGINT; all ranks were ended\n"
        )
        assert node.returncode == 130
    assert list(meeting.iterdir()) == []


def test_a_launcher_that_is_dead_is_not_waited_for(tmp_path: Path) -> None:
    meeting, program = tmp_path / "meeting", write(tmp_path, FIRST_ENDS)
    meeting.mkdir()
    first, second = (
        start_node(node, meeting, "--min-n", 1, program, tmp_path) for node in range(2)
    )
    wait_until_rank_0_has_ended(tmp_path)
    children = Path(f"/proc/{second.pid}/task/{second.pid}/children").read_text()
    os.kill(int(children), signal.SIGKILL)
    second.communicate(timeout=20)
    _, errors = first.communicate(timeout=20)
    assert first.returncode == 0
    lost, again = errors.splitlines()
    assert lost.startswith("flrun: rank 1 of 3 ")
    assert "is lost: the connection to its launcher (node 1) has ended" in lost
    assert again == "flrun: starting again with 1 rank(s), for the 1st time"
    assert list(meeting.iterdir()) == []


def test_slurms_variables_are_enough(tmp_path: Path) -> None:
    """What ``srun -n 2 python program.py`` sets, for both tasks."""
    program = write(tmp_path, ALL_REDUCE)
    common = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NODEID": "0",
    }
    tasks = [
        subprocess.Popen(
            [sys.executable, program],
            env={**os.environ, **common, "SLURM_PROCID": f"{i}", "SLURM_LOCALID": f"{i}"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    assert [task.communicate(timeout=30)[0] for task in tasks] == [
        "0 2 None \n",
        "1 2 None \n",
    ]
