"""flrun on one host and on several: exit code, first cause, leftovers, signals, restarts."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.launch.options import MOST_HOSTS
from tests.launch.launcher import WAITING, begin, launch, run, write

# Rank 1 does the action; the other ranks wait until they are ended.
PROGRAM = """
import os, signal, subprocess, sys, threading, time
def on_one(what):
    exec(what) if os.environ["RANK"] == "1" else signal.pause()
on_one(sys.argv[1])
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("program"), PROGRAM)


@pytest.mark.parametrize(
    ("action", "code", "reported"),
    [
        ("raise ValueError('a bad batch')", 1, "raised ValueError: a bad batch"),
        # A child that keeps our pipes open, and a child in a session of its own.
        (
            "subprocess.Popen(['sleep', '60']); "
            "subprocess.Popen(['sleep', '61'], start_new_session=True); sys.exit(5)",
            5,
            "exited with code 5",
        ),
    ],
)
def test_flrun_returns_code_of_cause(program: Path, action: str, code: int, reported: str) -> None:
    done = launch("-n", 2, program, action, code=code)
    host = os.uname().nodename
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"flrun: rank 1 of 2 on {host} {reported}")
    assert last.endswith("; the other ranks were ended")


def test_flrun_reports_the_cause_if_a_peer_lost_error_comes_first(tmp_path: Path) -> None:
    program = """
    import os, time
    class PeerLostError(Exception): pass
    if os.environ["RANK"] == "0":
        raise PeerLostError("rank 1 is gone")
    time.sleep(0.3)  # so long it takes to end
    os._exit(3)
    """
    done = launch("-n", 2, write(tmp_path, program), code=3)
    assert "flrun: rank 1 of 2" in done.stderr.splitlines()[-1]


def test_flrun_prefixes_lines_and_leaves_no_child_after_success(tmp_path: Path) -> None:
    program = """
    import os, subprocess, sys
    for number in range(200):
        print(f"line {number}", "x" * 50)
    print("no end", end="", file=sys.stderr)
    stubborn = "import signal as s; s.signal(15, s.SIG_IGN); s.pause()"
    kept = [subprocess.Popen(["sleep", "60"], start_new_session=True)]
    kept += [subprocess.Popen([sys.executable, "-S", "-c", stubborn])]
    os._exit(0)  # without a ResourceWarning for the children
    """
    done = launch("-n", 3, "--grace", 0.3, write(tmp_path, program), code=0)
    lines = sorted(done.stdout.splitlines())
    expected = [f"[{rank}] line {number} {'x' * 50}" for rank in range(3) for number in range(200)]
    assert lines == sorted(expected)
    assert sorted(done.stderr.splitlines()) == [f"[{rank}] no end" for rank in range(3)]


def test_flrun_kills_a_rank_that_ignores_sigterm(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    program = f"""
    import os, signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.environ["RANK"] == "0":
        open({str(ready)!r}, "w").close()
        while True: signal.pause()
    while not os.path.exists({str(ready)!r}): time.sleep(0.01)
    os._exit(7)
    """
    done = launch("-n", 2, "--grace", 0.3, write(tmp_path, program), timeout=10, code=7)
    assert "rank 1 of 2" in done.stderr


def start(program: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start the launcher and wait until every rank has printed that it is ready."""
    process = begin(*arguments, program)
    assert process.stdout
    for _ in range(2):
        assert "ready" in process.stdout.readline()
    return process


@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)]
)
def test_flrun_forwards_signals_to_ranks(tmp_path: Path, number: signal.Signals) -> None:
    process = start(write(tmp_path, WAITING), "-n", "2")
    process.send_signal(number)
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 128 + number
    assert errors.endswith(f"flrun: interrupted by {number.name}; all ranks were ended\n")
    assert ("KeyboardInterrupt" in errors) == (number == signal.SIGINT)


def test_signal_ends_the_job_while_ranks_start(tmp_path: Path) -> None:
    started = tmp_path / "started"
    command = f"echo $RANK >> {started}; [ $RANK = 0 ] && kill -TERM $PPID; exec sleep 60"
    done = launch("-n", 300, "--no-python", "sh", "-c", command)
    assert done.returncode == 128 + signal.SIGTERM
    assert "interrupted by SIGTERM; all ranks were ended" in done.stderr
    assert len(started.read_text().splitlines()) < 200


def test_harmless_signals_reach_ranks_and_the_job_continues(tmp_path: Path) -> None:
    program = """
    import os, signal, sys
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))
    print("ready")
    while True: signal.pause()
    """
    process = start(write(tmp_path, program), "-n", "2")
    process.send_signal(signal.SIGUSR1)
    _, errors = process.communicate(timeout=10)
    assert (process.returncode, errors) == (0, "")


# The launcher with shorter waits.
IMPATIENT = """
import sys
from flashlight_py.launch import supervisor
from flashlight_py.launch.command_line import main
supervisor.STAYING_SECONDS = 0.2
sys.exit(main())
"""

HANGING_AT_EXIT = """
import atexit, os, signal
if os.environ["RANK"] == "1":
    atexit.register(signal.pause)
"""


def test_flrun_reports_a_rank_that_hangs_at_exit_and_ctrl_c_ends_it(tmp_path: Path) -> None:
    launcher = write(tmp_path, IMPATIENT, "flrun.py")
    command = [sys.executable, launcher, "-n", "3", write(tmp_path, HANGING_AT_EXIT)]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr
        assert process.stderr.readline() == (
            "flrun: rank 1 still runs, 0.2 s after the last other rank exited with code 0. "
            "Press Ctrl-C to end the job\n"
        )
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=10)
    assert process.returncode == 130
    assert errors.endswith("flrun: interrupted by SIGINT; all ranks were ended\n")


@pytest.mark.parametrize("which", ["copy", pytest.param("front", marks=pytest.mark.slow)])
def test_killed_launcher_leaves_no_processes(tmp_path: Path, which: str) -> None:
    process = start(write(tmp_path, WAITING), "-n", "2", "--grace", "1")
    (copy,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(process.pid if which == "front" else int(copy), signal.SIGKILL)
    _, errors = process.communicate(timeout=10)
    if which == "copy":
        assert process.returncode == 137
        assert "flrun: the launcher was killed by SIGKILL" in errors
    else:
        assert "interrupted by SIGTERM; all ranks were ended" in errors


def test_flrun_ends_the_job_if_its_output_pipe_closes(tmp_path: Path) -> None:
    process = start(write(tmp_path, "while True: print('ready')"), "-n", "2")
    assert process.stdout
    assert process.stderr
    process.stdout.close()
    assert process.wait(timeout=10) == 141
    process.stderr.close()


def test_flrun_ends_the_job_with_grace_if_the_disk_is_full(tmp_path: Path) -> None:
    ended = tmp_path / "ended"
    program = f"""
    import pathlib, signal, sys, time
    def end(*_):
        time.sleep(0.2)  # so long it takes to be in order
        pathlib.Path({str(ended)!r}).write_text("in order")
        sys.exit(0)
    signal.signal(signal.SIGTERM, end)
    print("hi")
    signal.pause()
    """
    with (
        open("/dev/full", "w") as full,
        begin("-n", 1, write(tmp_path, program), stdout=full) as job,
    ):
        _, errors = job.communicate(timeout=20)
    assert job.returncode == 141
    assert ended.read_text() == "in order"
    assert errors.splitlines() == [
        "flrun: standard output cannot be written: No space left on device",
        "flrun: the output of the ranks is lost; all ranks were ended",
    ]


def test_flrun_shows_an_unfinished_last_line() -> None:
    words = "-n", 1, "--no-python", "printf", "hi"
    with open("/dev/full", "w") as full, begin(*words, stdout=full) as job:
        job.communicate(timeout=20)
    assert job.returncode == 141


COPY = """
import sys
from flashlight_py.launch.front import run_in_copy
def work():
    sys.stdout = open("/dev/full", "w")
    print("kept until it is flushed")
    return 3
sys.exit(run_in_copy(work, lambda: None))
"""


def test_run_in_copy_exits_if_the_copy_cannot_flush(tmp_path: Path) -> None:
    done = run([sys.executable, write(tmp_path, COPY)], timeout=20)
    assert (done.returncode, done.stderr) == (3, "")


def test_flrun_sets_rank_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = """
    import os, sys
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MKL_NUM_THREADS",
             "FLASHLIGHT_RESTART_COUNT", "MASTER_ADDR", "OMP_NUM_THREADS", "FLASHLIGHT_TIMEOUT"]
    print(*[os.environ.get(name) for name in names], *sys.argv[1:])
    """
    monkeypatch.setenv("MASTER_ADDR", "of an outer launch")
    monkeypatch.setenv("MKL_NUM_THREADS", "5")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    done = launch("-n", 2, "--timeout", 7, write(tmp_path, program), "-n", "3", "--x", cwd=tmp_path)
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert sorted(done.stdout.splitlines()) == [
        f"[{rank}] {rank} 2 {rank} 2 5 0 127.0.0.1 {share} 7 -n 3 --x" for rank in range(2)
    ]
    done = launch("-n", 1, "-m", "program", "y", cwd=tmp_path)
    assert done.stdout.endswith(" y\n")
    done = launch("-n", 1, "--no-python", "sh", "-c", "echo $RANK; cat")
    assert done.stdout == "[0] 0\n"


def test_flrun_rejects_an_output_folder_that_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    program = write(tmp_path, "print('started')")
    done = launch("-n", 2, "--output-dir", "file/logs", program, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("flrun: error: --output-dir: expected a writable folder, got file/logs")
    assert "Traceback" not in done.stderr


def test_output_dir_appends_output_of_each_rank_to_files(tmp_path: Path) -> None:
    program = write(tmp_path, "import os; print('out'); raise OSError(os.environ['RANK'])")
    done = launch("-n", 1, "--max-restarts", 1, "--output-dir", tmp_path / "logs", program)
    assert (tmp_path / "logs" / "rank-0.out").read_text() == "out\nout\n"
    errors = tmp_path / "logs" / "rank-0.err"
    assert errors.read_text().count("OSError: 0") == 2
    assert done.stdout == ""
    reported = f"flrun: rank 0 of 1 on {os.uname().nodename} raised OSError: 0 (see {errors})"
    again = "flrun: starting again with 1 rank(s): restart 1"
    assert done.stderr.splitlines() == [reported, again, reported]


def test_flrun_returns_127_if_the_program_cannot_run() -> None:
    done = launch("-n", 2, "--no-python", "/no/such/program", code=127)
    assert "flrun: cannot run /no/such/program: " in done.stderr


# All ranks wait until rank 1 is killed, before the restart with the number of the argument.
FAILING = """
import os, signal, sys
restarts, rank, size = (int(os.environ[name]) for name in
    ("FLASHLIGHT_RESTART_COUNT", "RANK", "WORLD_SIZE"))
print(f"restart {restarts}, {rank} of {size}, meets at {os.environ['FLASHLIGHT_FILE'][-1]}")
if rank == 1 and restarts < int(sys.argv[1]):
    os.kill(os.getpid(), signal.SIGKILL)
if restarts < int(sys.argv[1]):
    signal.pause()
"""


def test_max_restarts_limits_restarts_and_returns_the_last_exit_code(tmp_path: Path) -> None:
    done = launch("-n", 2, "--max-restarts", 1, write(tmp_path, FAILING), 2, code=137)
    assert "[1] restart 1, 1 of 2, meets at 1" in done.stdout
    assert done.stderr.count("flrun: starting again with 2 rank(s)") == 1
    assert done.stderr.count("was killed by SIGKILL") == 2


def test_min_n_restarts_with_remaining_ranks_down_to_the_minimum(tmp_path: Path) -> None:
    done = launch("-n", 4, "--min-n", 2, write(tmp_path, FAILING), 9, code=137)
    for restarts, size in enumerate((4, 3, 2)):
        assert f"[1] restart {restarts}, 1 of {size}, meets at {restarts}" in done.stdout
    assert "of 1" not in done.stdout
    assert "flrun: starting again with 3 rank(s): restart 1" in done.stderr
    assert "flrun: starting again with 2 rank(s): restart 2" in done.stderr


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


RAISING = """
import os, signal, subprocess, sys
if os.environ["RANK"] == "1":
    raise ValueError("a bad batch")
child = subprocess.Popen(["sleep", "60"], start_new_session=True)
signal.pause()
"""


def test_flrun_names_a_failed_host_and_a_missing_program(tmp_path: Path, ssh: str) -> None:
    done = launch("--hosts", "a,b", "--ssh", ssh, write(tmp_path, RAISING), code=1)
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
    assert errors == f"flrun: starting again with {left} rank(s): restart 1\n"
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
