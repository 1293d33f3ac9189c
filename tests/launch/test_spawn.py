"""``spawn`` with real processes, from tests, scripts and sessions: results, output and failures."""

import atexit
import builtins
import errno
import importlib.util
import io
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.launch import calls, spawning, supervisor
from flashlight_py.launch.spawning import ENDING_SECONDS
from tests.distributed import processes
from tests.distributed.conformance import slow
from tests.launch.launcher import run, write

HAS_CLOUDPICKLE = importlib.util.find_spec("cloudpickle") is not None
NEEDS_CLOUDPICKLE = pytest.mark.skipif(
    not HAS_CLOUDPICKLE, reason="needs cloudpickle: pip install 'flashlight-py[notebook]'"
)


def state(rank: int, array: Any, *args: Any) -> dict[str, Any]:
    return {
        "numbers": (rank, fl.get_world_rank(), fl.get_world_size(), fl.get_local_rank()),
        "array": array * rank,
        "args": args,
        "world": fl.distributed.describe(),
        "environment": dict(os.environ),
    }


def test_spawn_returns_results_of_all_ranks_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The array exceeds the capacity of a pipe. The number of ranks is the number of cores."""
    monkeypatch.setattr(calls, "usable_cores", lambda: 2)
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MKL_NUM_THREADS", "7")
    share = str(max(1, len(os.sched_getaffinity(0)) // 2))
    threads = {"OMP_NUM_THREADS": share, "OPENBLAS_NUM_THREADS": share, "MKL_NUM_THREADS": "7"}
    sent = np.arange(1_000_000.0)
    results = fl.spawn(state, (sent, "a", {"b": 1}), params={"BACKEND": "gloo"})
    assert [result["numbers"] for result in results] == [(rank, rank, 2, rank) for rank in (0, 1)]
    for rank, result in enumerate(results):
        np.testing.assert_array_equal(result["array"], sent * rank)
        assert result["args"] == ("a", {"b": 1})
        assert "Gloo" in result["world"]
        assert threads.items() <= result["environment"].items()
    assert "OMP_NUM_THREADS" not in os.environ


@pytest.mark.slow
def test_spawned_ranks_print_complete_lines_to_inherited_output(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", sys.__stdout__)  # replaced by pytest
    monkeypatch.setattr(sys, "stderr", sys.__stderr__)
    print("before")
    fl.spawn(chatter, nprocs=2)
    output, errors = capfd.readouterr()
    assert output.startswith("before\n")
    assert sorted(output.splitlines()[1:]) == [f"rank {rank}" for rank in (0, 1) for _ in range(20)]
    assert sorted(errors.splitlines()) == ["error of 0", "error of 1"]


def test_spawn_prefixes_lines_in_a_replaced_stdout() -> None:
    with redirect_stdout(io.StringIO()) as output, redirect_stderr(io.StringIO()) as errors:
        fl.spawn(flood, nprocs=2)
    lines = [line for line in output.getvalue().splitlines() if "late" not in line]
    assert sorted(lines) == [f"[{rank}] {'x' * 999}" for rank in (0, 1) for _ in range(200)]
    assert sorted(output.getvalue().splitlines())[0] == "[0] late"
    assert sorted(errors.getvalue().splitlines()) == ["[0] no end", "[1] no end"]


def flood(rank: int) -> None:
    """Print more than a pipe holds, also after the result."""
    for _ in range(100):
        print("x" * 999)
    atexit.register(print, "no end", end="", file=sys.stderr)
    atexit.register(print, "\n".join(["x" * 999] * 100 + ["late"]))


def chatter(rank: int) -> None:
    for _ in range(20):
        print("rank", rank)
    print(f"error of {rank}", file=sys.stderr)


def test_spawned_ranks_may_initialise_again_and_leave_operations_unfinished() -> None:
    """Also use a queue: the manager requires multiprocessing's key, which each rank receives."""
    with multiprocessing.Manager() as manager:
        queue = manager.Queue()
        assert fl.spawn(leave_early, (queue,), nprocs=2) == [2, 2]
        assert sorted([queue.get(), queue.get()]) == [0, 1]


def leave_early(rank: int, queue: Any) -> int:
    queue.put(rank)
    fl.distributed_shutdown()
    fl.distributed_init()
    size = int(fl.all_reduce(np.array(1)))
    fl.all_reduce(np.ones(100_000), async_op=True)
    if rank == 1:
        np.linalg.svd(np.random.default_rng(0).random((200, 200)))
    return size


def total(rank: int, number: int) -> int:
    return int(fl.all_reduce(np.array([number]))[0])


@pytest.mark.slow
def test_spawn_works_in_a_spawned_rank() -> None:
    assert fl.spawn(nest, nprocs=np.int64(1)) == [(True, [2, 2])]  # type: ignore[arg-type]
    assert not fl.is_distributed_init()


def nest(rank: int) -> tuple[bool, Any]:
    return fl.is_distributed_init(), fl.spawn(total, (1,), nprocs=2)


@NEEDS_CLOUDPICKLE
def test_spawn_sends_and_returns_closures_by_cloudpickle() -> None:
    factor = 3
    (adder,) = fl.spawn(lambda rank: lambda x: x + factor, nprocs=1)
    assert adder(2) == 5


@pytest.fixture
def _no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(spawning.SpawnedWorld, "start", fail)


@pytest.mark.usefixtures("_no_process")
def test_spawn_raises_type_error_if_fn_is_not_picklable(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = multiprocessing.Lock()
    with pytest.raises(TypeError, match="spawn of total: the function or its arguments cannot be"):
        fl.spawn(total, (lock,), nprocs=2)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(TypeError, match=r"lambda.*cannot be pickled.*flashlight-py\[notebook\]"):
        fl.spawn(lambda rank: lock, nprocs=2)


@pytest.mark.usefixtures("_no_process")
@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"fn": 3}, TypeError, "must be a function"),
        ({"args": "text"}, TypeError, "args must be a tuple, got str"),
        ({"nprocs": 0}, ValueError, "from 1 to 131072, got 0"),
        ({"nprocs": True}, ValueError, "from 1 to 131072, got True"),
        ({"nprocs": 2.0}, ValueError, r"got 2\.0"),
        ({"timeout": 0}, ValueError, "positive number of seconds"),
        ({"timeout": 1e7}, ValueError, "at most 1000000"),
        ({"max_restarts": -1}, ValueError, "max_restarts must be .* at least 0, got -1"),
        ({"max_restarts": None}, ValueError, "max_restarts must be .* at least 0, got None"),
        ({"params": {"FILE_PATH": "/x"}}, ValueError, "must not contain FILE_PATH"),
        ({"nprocs": 100_000}, ValueError, r"spawn: nprocs.* got 100000"),  # limits of this host
    ],
)
def test_spawn_rejects_invalid_arguments_before_a_start(
    arguments: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        fl.spawn(**{"fn": state, **arguments})


def test_spawn_imports_multiprocessing_at_first_use() -> None:
    program = "import sys, flashlight_py; print('multiprocessing' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == b"False\n"


def fail_on_one(rank: int, failure: str) -> Any:
    if rank == 1:
        FAILURES[failure][0]()
    return fl.all_reduce(np.ones(3))


def raise_error() -> None:
    raise ValueError("a bad batch\nof two lines")


def raise_after_leaving() -> None:
    """Raise after the other ranks have detected the loss."""
    fl.distributed.start.world.current_world().group.close()
    time.sleep(0.3)  # time for a long cleanup
    raise KeyError("late")


def raise_while_handling() -> None:
    try:
        raise_error()
    except ValueError as error:
        raise RuntimeError("while handling") from error


def wait_with_a_child() -> None:
    """Die and leave a child that has inherited all descriptors."""
    if os.fork() == 0:
        signal.pause()
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore SIGINT
    signal.raise_signal(signal.SIGINT)


# What rank 1 does, the reported exit code, and parts of the message.
FAILURES: dict[str, tuple[Callable[[], object], int | None, list[str]]] = {
    "raise while handling": (
        raise_while_handling, None,
        ["raised RuntimeError: while handling", "in raise_error", "a bad batch", "of two lines"],
    ),
    "a child is left": (
        wait_with_a_child, -9, ["killed by SIGKILL (out of memory?", "before it had returned"]),
    "interrupt": (interrupt, None, ["raised KeyboardInterrupt"]),
    "raise after leaving": (raise_after_leaving, None, ["KeyError: 'late'", "in raise_after"]),
    "sys.exit with a text": (
        lambda: sys.exit("no more data"), 1, ["exited with code 1", "SystemExit: no more data"]),
    "sys.exit of nothing": (sys.exit, 0, ["exited with code 0"]),
    "os._exit": (lambda: os._exit(4), 4, ["exited with code 4 before it had returned"]),
}  # fmt: skip
FAST = "raise while handling", "a child is left"


@pytest.mark.parametrize(
    "failure",
    [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in FAILURES],
)
def test_spawn_raises_the_first_cause(monkeypatch: pytest.MonkeyPatch, failure: str) -> None:
    _, code, reported = FAILURES[failure]
    monkeypatch.setattr(supervisor, "CAUSE_SECONDS", 30.0)  # even on a busy machine
    with pytest.raises(fl.errors.RankFailedError) as caught:
        fl.spawn(fail_on_one, (failure,), nprocs=3)
    message = str(caught.value)
    assert message.startswith("spawn of fail_on_one: rank 1 of 3 ")
    assert "; the other ranks were ended" in message
    assert [text for text in reported if text not in message] == []
    assert "PeerLostError" not in message
    assert (caught.value.rank, caught.value.exit_code) == (1, code)


def mismatch(rank: int) -> None:
    fl.all_reduce(np.ones(rank + 1))


def leave_the_others(rank: int) -> Any:
    if rank == 1:
        fl.distributed.start.world.current_world().group.close()
        return None
    return fl.all_reduce(np.ones(3))


class Killer:
    """Kills rank 1 before it maps the named memory of rank 0."""

    def __reduce__(self) -> Any:
        return arm, ()


def arm() -> None:
    from flashlight_py.distributed.memory import memory_file

    if os.environ["RANK"] == "1":
        memory_file._attempt = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


class Trap:
    def __reduce__(self) -> Any:
        return int, ("no number",)


def make_trap(rank: int) -> Trap:
    return Trap()


def make_generator(rank: int) -> Any:
    return (letter for letter in "abc")


@pytest.mark.parametrize(
    ("function", "args", "nprocs", "match"),
    [
        (mismatch, (), 2, r"rank [01] of 2 raised .*MismatchError: "),
        (make_generator, (), 1, "rank 0 of 1 raised TypeError: the result, of type generator, can"),
        *slow(
            (leave_the_others, (), 2, "rank 0 of 2 raised .*PeerLostError"),
            (fail_on_one, (Killer(),), 2, "rank 1 of 2 was killed by SIGKILL"),
            (make_trap, (), 1, "rank 0 of 1 cannot be unpickled"),
        ),
    ],
)
def test_spawn_names_the_first_rank_that_fails(
    function: Any, args: tuple[Any, ...], nprocs: int, match: str
) -> None:
    with pytest.raises(fl.errors.RankFailedError, match=match):
        fl.spawn(function, args, nprocs, params={"BACKEND": "shm"})


def test_spawn_restarts_all_ranks(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    assert fl.spawn(killed_before, (1, str(tmp_path)), 2, max_restarts=2) == ["1", "1"]
    (record,) = caplog.records
    assert record.message.startswith("spawn of killed_before: rank 1 of 2 was killed by SIGKILL")
    assert record.message.endswith("starting again: 1 of 2")
    assert not [pid.name for pid in tmp_path.iterdir() if Path("/proc", pid.name).exists()]


@pytest.mark.slow
def test_spawn_raises_the_first_cause_of_the_last_attempt(tmp_path: Path) -> None:
    with pytest.raises(fl.errors.RankFailedError, match="rank 1 of 2 exited with code 1"):
        fl.spawn(killed_before, (2, str(tmp_path)), 2, max_restarts=1)


def killed_before(rank: int, restarts: int, folder: str) -> str:
    """Rank 1 is killed in the first attempt and exits in the second, while rank 0 waits."""
    Path(folder, str(os.getpid())).touch()
    fl.barrier()
    count = os.environ["FLASHLIGHT_RESTART_COUNT"]
    if rank == 1 and int(count) < restarts:
        if count == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        sys.exit("no more data")
    fl.barrier()
    return count


@pytest.mark.slow
def test_spawn_timeout_ends_ranks_that_do_not_return() -> None:
    with pytest.raises(TimeoutError, match=r"spawn of wait: rank\(s\) 0, 1 of 2 did not return"):
        fl.spawn(wait, nprocs=2, timeout=1.0)


def wait(rank: int) -> None:
    while True:
        signal.pause()


class Full(io.StringIO):
    """A replacement of sys.stdout that cannot be written."""

    def write(self, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.slow
def test_spawn_ends_ranks_if_a_replaced_stdout_cannot_be_written() -> None:
    match = "spawn of print_and_wait: standard output cannot be written: No space left on device"
    with redirect_stdout(Full()), pytest.raises(OSError, match=match):
        fl.spawn(print_and_wait, nprocs=2)


def print_and_wait(rank: int) -> None:
    print("hi")
    wait(rank)


@pytest.mark.slow
def test_spawn_warns_if_a_rank_fails_after_its_result() -> None:
    with pytest.warns(
        RuntimeWarning, match=r"rank 1 of 2 exited with code 5 after it had ret"
    ) as w:
        assert fl.spawn(fail_at_exit, nprocs=2) == [0, 1]
    assert w[0].filename == __file__


def fail_at_exit(rank: int) -> int:
    if rank == 1:
        atexit.register(os._exit, 5)
    return rank


def leave_late(rank: int) -> None:
    """Raise, and receive SIGTERM while exit handlers run."""
    atexit.register(os.kill, os.getpid(), signal.SIGTERM)
    raise ValueError("bad")


def leave_after_lines(rank: int) -> None:
    """Receive SIGTERM also at each of the last lines of the rank's program."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_globals.get("_is_exiting", True):
            os.kill(os.getpid(), signal.SIGTERM)
        return trace

    frame.f_trace = trace
    sys.settrace(lambda *_: None)
    leave_late(rank)


def test_rank_main_prints_nothing_if_sigterm_arrives_at_exit(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(fl.errors.RankFailedError, match="bad"):
        fl.spawn(leave_after_lines, nprocs=1)
    assert capfd.readouterr().err == ""


class ToldToEnd:
    def __del__(self, pid: int = os.getpid(), kill: Any = os.kill) -> None:
        kill(pid, signal.SIGTERM)


def be_told_at_the_end(rank: int) -> None:
    """Receive SIGTERM after Python has restored the signal handlers."""
    builtins.told = ToldToEnd()  # type: ignore[attr-defined]


@pytest.mark.slow
def test_rank_main_ignores_sigterm_after_handlers_are_restored() -> None:
    assert fl.spawn(be_told_at_the_end, nprocs=1) == [None]


def test_spawn_reports_a_deleted_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(FileNotFoundError, match=r"the current folder was deleted"):
        fl.spawn(raise_error, nprocs=1)


SCRIPT = """
from dataclasses import dataclass
import sys
import numpy as np
import flashlight_py as fl

print("imported as", __name__)

@dataclass
class Point:
    x: float

def shift(rank, point):
    return Point(float(fl.all_reduce(np.array([point.x]))[0]) + rank)

if __name__ == "__main__":
    print(fl.spawn(shift, (Point(2.0),), nprocs=2), sys.argv[1:])
"""


@pytest.mark.parametrize("program", [["program.py"], *slow(["-m", "program"])])
def test_spawn_sends_functions_and_classes_of_a_script(tmp_path: Path, program: list[str]) -> None:
    write(tmp_path, SCRIPT)
    done = run([sys.executable, *program, "--option"], cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [
        "[Point(x=4.0), Point(x=5.0)] ['--option']",
        "imported as __main__",
        "imported as __mp_main__",
        "imported as __mp_main__",
    ]


def test_spawn_raises_runtime_error_without_the_main_guard(tmp_path: Path) -> None:
    program = "import flashlight_py as fl\ndef f(rank): pass\nfl.spawn(f, nprocs=2)\n"
    done = run([sys.executable, write(tmp_path, program)])
    assert done.returncode == 1
    assert re.search("rank [01] of 2 raised RuntimeError: spawn of f: called while", done.stderr)
    assert "Put the call under if __name__ == '__main__':" in done.stderr


SESSION = """
import flashlight_py as fl

class Square:
    def __init__(self, number):
        self.number = number ** 2

def square(rank):
    return Square(rank + 2)

print([(each.number, type(each) is Square) for each in fl.spawn(square, nprocs=2)])
"""


@NEEDS_CLOUDPICKLE
def test_spawn_sends_functions_of_an_interactive_session() -> None:
    """As in a notebook: the ranks cannot import its definitions."""
    done = run([sys.executable, "-"], input=SESSION)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[(4, True), (9, True)]\n", "")


def test_spawn_in_a_session_without_cloudpickle_names_the_package() -> None:
    program = f"import importlib.util\nimportlib.util.find_spec = lambda _: None\n{SESSION}"
    done = run([sys.executable, "-"], input=program)
    assert done.returncode == 1
    assert "TypeError: spawn of square: the function or its arguments cannot be" in done.stderr
    assert "square is defined in __main__, which no other process can import" in done.stderr
    assert "pip install 'flashlight-py[notebook]'" in done.stderr


WAITING = """
import os, signal, time
import numpy as np
import flashlight_py as fl

def wait(rank):
    try:
        fl.barrier()
        print(os.getpid())
        if rank == 0:
            fl.all_reduce(np.ones(3))
        while True:
            time.sleep(0.05)  # a signal that comes just before a pause() would not end it
    except KeyboardInterrupt:
        print(f"rank {rank} was interrupted")
        raise

if __name__ == "__main__":
    # As on a terminal; a shell has what it starts in the background ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    fl.spawn(wait, nprocs=2)
"""


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Return a script with a rank that waits in a collective and a rank that computes.

    After the test, check that both ranks have ended.
    """
    command = [sys.executable, str(write(tmp_path, WAITING))]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as script:
        assert script.stdout is not None
        ranks = {int(script.stdout.readline()) for _ in range(2)}
        yield script
    processes.wait_for_end(ranks, 5.0)
    assert not [rank for rank in ranks if processes.is_alive(rank)]


def test_ctrl_c_ends_spawned_ranks_after_cleanup(waiting: subprocess.Popen[str]) -> None:
    begin = time.monotonic()
    waiting.send_signal(signal.SIGINT)
    output, errors = waiting.communicate(timeout=20)
    assert time.monotonic() - begin < ENDING_SECONDS  # before the ranks would be killed
    assert waiting.returncode == -signal.SIGINT
    assert sorted(output.splitlines()) == ["rank 0 was interrupted", "rank 1 was interrupted"]
    assert errors.splitlines()[-1] == "KeyboardInterrupt"
    assert errors.count("Traceback") == 1


def test_spawned_ranks_end_if_the_script_is_killed(waiting: subprocess.Popen[str]) -> None:
    waiting.kill()
    assert waiting.wait(20) == -signal.SIGKILL
