"""flrun with ranks that end in different ways: exit code, first cause, leftovers, restarts."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

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
    again = "flrun: starting again with 1 rank(s), for the 1st time"
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
    assert "flrun: starting again with 3 rank(s), for the 1st time" in done.stderr
    assert "flrun: starting again with 2 rank(s), for the 2nd time" in done.stderr
