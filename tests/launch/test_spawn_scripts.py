"""``spawn`` from scripts and interactive sessions, and from scripts that are killed."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from flashlight_py.launch.spawning import ENDING_SECONDS
from tests.distributed import processes
from tests.launch.launcher import run, write
from tests.launch.test_spawn import NEEDS_CLOUDPICKLE

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


def test_spawn_sends_functions_and_classes_of_a_script(tmp_path: Path) -> None:
    done = run([sys.executable, write(tmp_path, SCRIPT), "--option"])
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(done.stdout.splitlines()) == [
        "[Point(x=4.0), Point(x=5.0)] ['--option']",
        "imported as __main__",
        "imported as __mp_main__",
        "imported as __mp_main__",
    ]


@pytest.mark.slow
def test_spawn_works_in_a_module_run_with_dash_m(tmp_path: Path) -> None:
    write(tmp_path, SCRIPT, "module.py")
    done = run([sys.executable, "-m", "module"], cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "[Point(x=4.0), Point(x=5.0)]" in done.stdout


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
