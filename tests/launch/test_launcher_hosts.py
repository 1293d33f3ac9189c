"""flrun on several hosts, with one agent per host over ssh.

All hosts are this machine. A stand-in for ssh runs the remote command in a local shell.
"""

import os
import re
import signal
import socket
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.launch.options import MOST_HOSTS
from tests.launch.launcher import WAITING, begin, launch, write

MEETING_TWICE = """
import glob, os, pathlib, socket, sys
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
    print(int(fl.all_reduce(np.ones(1))[0]), os.environ.get("LOCAL_RANK"))
    fl.distributed_shutdown()
print(sys.stdin.readline().strip())
"""


def test_ranks_on_two_hosts_connect_at_the_port_of_rank_0(tmp_path: Path, ssh: str) -> None:
    """Rank 0 inherits a listening socket and the secret; it also has the standard input."""
    program = write(tmp_path, MEETING_TWICE)
    done = launch("--hosts", "a:2,b", "--ssh", ssh, program, input="typed\n", code=0)
    assert done.stderr == ""
    ranks = [(True, 0, "typed"), (False, 1, ""), (False, 0, "")]
    for rank, (listens, local, typed) in enumerate(ranks):
        expected = [f"kept 64 {listens}", f"3 {local}", f"3 {local}", typed]
        lines = [line for line in done.stdout.splitlines() if line.startswith(f"[{rank}] ")]
        assert lines == [f"[{rank}] {text}" for text in expected]


PRINTING_AND_READING = """
import sys, threading
printing = threading.Thread(target=lambda: [print("x" * 1000) for _ in range(2000)])
printing.start()
read = len(sys.stdin.buffer.read())
printing.join()
print(read)
"""


@pytest.mark.slow
def test_concurrent_input_and_output_do_not_deadlock(tmp_path: Path, ssh: str) -> None:
    """Input and output exceed the capacity of all pipes between them. Only rank 0 has input."""
    program = write(tmp_path, PRINTING_AND_READING)
    large = tmp_path / "large"
    large.write_bytes(os.urandom(3_000_000))
    with large.open("rb") as file:
        done = launch("--hosts", "a,b", "--ssh", ssh, program, stdin=file, timeout=15, code=0)
    lines = [line for line in done.stdout.splitlines() if "x" not in line]
    assert sorted(lines) == ["[0] 3000000", "[1] 0"]
    assert done.stdout.count("\n") == 4002


FAILING = """
import os, signal, subprocess, sys
if os.environ["RANK"] == "1":
    raise ValueError("a bad batch")
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
signal.pause()
"""


def test_flrun_names_a_failed_host_and_a_missing_program(tmp_path: Path, ssh: str) -> None:
    done = launch("--hosts", "a,b", "--ssh", ssh, write(tmp_path, FAILING), code=1)
    last = done.stderr.splitlines()[-1]
    assert last.startswith("flrun: rank 1 of 2 on b raised ValueError: a bad batch")
    done = launch("--hosts", "a,b", "--ssh", ssh, "--no-python", "/no/such/program", code=127)
    assert done.stderr.startswith("flrun: cannot run /no/such/program: ")


def test_flrun_reports_a_host_that_ssh_cannot_reach(tmp_path: Path, ssh: str) -> None:
    program = write(tmp_path, "import os; print('of', os.environ['WORLD_SIZE'])")
    done = launch("--hosts", "a,down:3,b", "--ssh", ssh, "--min-n", 2, program, code=0)
    assert sorted(done.stdout.splitlines()) == ["[0] of 2", "[1] of 2"]
    assert "rank 1 of 5 on down is lost: ssh to down exited with code 255" in done.stderr
    assert done.stderr.count("flrun: starting again") == 1  # all ranks of the host are lost at once


@pytest.mark.slow
def test_agents_are_reused_for_a_restart(tmp_path: Path, ssh: str) -> None:
    program = """
    import os, sys
    import flashlight_py as fl
    fl.distributed_init()
    fl.barrier()
    print(os.environ["FLASHLIGHT_SECRET"])
    fl.barrier()
    sys.exit(int(os.environ["FLASHLIGHT_RESTART_COUNT"] == "0"))
    """
    options = ("--hosts", "a,b", "--ssh", ssh, "--max-restarts", 1)
    done = launch(*options, write(tmp_path, program), code=0)
    secrets = [line.partition("] ")[2] for line in done.stdout.splitlines()]
    assert secrets[0] == secrets[1] != secrets[2] == secrets[3]
    assert [len((tmp_path / f"pid-{host}").read_text().split()) for host in "ab"] == [1, 1]


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_signals_reach_remote_ranks(tmp_path: Path, ssh: str, number: signal.Signals) -> None:
    with begin("--hosts", "a,b", "--ssh", ssh, write(tmp_path, WAITING)) as process:
        assert process.stdout
        for _ in range(2):
            assert "ready" in process.stdout.readline()
        process.send_signal(number)
        _, errors = process.communicate(timeout=10)
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert "KeyboardInterrupt" in errors


FIRST_STAYS = """
import os, pathlib, signal, subprocess, sys
rank, folder = os.environ["RANK"], pathlib.Path(sys.argv[1])
if os.environ["FLASHLIGHT_RESTART_COUNT"] == "0":
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    print(f"ready {rank} {os.getpid()}")
    signal.pause()
print("again", rank, os.environ["WORLD_SIZE"])
"""


@pytest.mark.parametrize(
    ("victim", "again"),
    [
        ("agent", "--min-n"),
        pytest.param("agent", "--max-restarts", marks=pytest.mark.slow),
        pytest.param("rank", "--min-n", marks=pytest.mark.slow),
    ],
)
def test_flrun_names_a_killed_process(tmp_path: Path, ssh: str, victim: str, again: str) -> None:
    """With ``--max-restarts`` a lost host gets a new agent; with ``--min-n`` it is excluded."""
    options = ["--hosts", "a,b:2,c", "--ssh", ssh, again, "1"]
    with begin(*options, write(tmp_path, FIRST_STAYS), tmp_path) as process:
        assert process.stdout
        assert process.stderr
        ready = [process.stdout.readline().split()[1:] for _ in range(4)]
        assert {word for word, _, _ in ready} == {"ready"}
        front = (tmp_path / "pid-b").read_text().strip()
        copy = Path(f"/proc/{front}/task/{front}/children").read_text()
        pids = {int(rank): int(pid) for _, rank, pid in ready}
        os.kill(pids[2] if victim == "rank" else int(copy), signal.SIGKILL)
        began = time.monotonic()
        first = next(line for line in process.stderr if line.startswith("flrun: rank "))
        assert time.monotonic() < began + 5.0
        output, errors = process.communicate(timeout=30)
    reason = "was killed by SIGKILL" if victim == "rank" else "is lost: ssh to b exited with code "
    assert f"flrun: rank {2 if victim == 'rank' else 1} of 4 on b {reason}" in first
    left = 4 if again == "--max-restarts" else 3 if victim == "rank" else 2
    assert errors == f"flrun: starting again with {left} rank(s), for the 1st time\n"
    assert process.returncode == 0
    assert sorted(output.splitlines()) == [f"[{rank}] again {rank} {left}" for rank in range(left)]


@pytest.mark.slow
def test_flrun_starts_ranks_on_the_maximum_number_of_hosts(tmp_path: Path, ssh: str) -> None:
    hosts = ",".join(f"h{i}" for i in range(MOST_HOSTS))
    program = ("--no-python", "sh", "-c", "echo $RANK of $WORLD_SIZE")
    done = launch("--hosts", hosts, "--ssh", ssh, *program, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    expected = [f"[{rank:>2}] {rank} of {MOST_HOSTS}" for rank in range(MOST_HOSTS)]
    assert sorted(done.stdout.splitlines()) == expected


OTHER_LIBRARY = """
import os, socket, sys, time
import numpy as np
import flashlight_py as fl
host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
rank, restarts = int(os.environ["RANK"]), os.environ["FLASHLIGHT_RESTART_COUNT"]
any_port = [socket.create_server(("", 0)) for _ in range(20)]
assert port not in [each.getsockname()[1] for each in any_port]
if rank == 0:
    with socket.create_server(("", port)) as server:
        met = [server.accept()[0] for _ in range(1, int(os.environ["WORLD_SIZE"]))]
else:
    while (connection := socket.socket()).connect_ex((host, port)):
        connection.close()
        time.sleep(0.01)
fl.distributed_init()
fl.barrier()
print("met", port, flush=True)
fl.barrier()
sys.exit(int(rank > 0) if restarts == "0" else 0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("on_hosts", [False, True])
def test_master_port_is_free_for_other_libraries(tmp_path: Path, ssh: str, on_hosts: bool) -> None:
    ranks = ("--hosts", "a,b", "--ssh", ssh) if on_hosts else ("-n", 2)
    done = launch("--max-restarts", 1, *ranks, write(tmp_path, OTHER_LIBRARY), code=0)
    assert list(Counter(re.findall(r"met (\d+)", done.stdout)).values()) == [2, 2]


def other_library(rank: int) -> tuple[str, int]:
    """Return the rendezvous address of another library; nothing listens there yet."""
    port = int(os.environ["MASTER_PORT"])
    if rank == 0:
        socket.create_server(("", port)).close()
    assert fl.all_reduce(np.ones(1)) == 2
    return os.environ["MASTER_ADDR"], port


def test_spawned_ranks_have_a_free_master_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "1")
    first, second = fl.spawn(other_library, nprocs=2)
    assert first == second
    assert first[0] == "127.0.0.1"
    assert first[1] != 1
