"""Processes whose threads and sockets gevent or eventlet has replaced by cooperative ones."""

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.launch.launcher import LAUNCH, run, write

PATCH = """
import sys, warnings
warnings.simplefilter("ignore")  # of eventlet: it is deprecated

def patch():
    if "gevent" in sys.argv:
        import gevent.monkey
        gevent.monkey.patch_all()
    else:
        import eventlet
        eventlet.monkey_patch()
"""
PROGRAM = (
    PATCH
    + """
if "before" in sys.argv:
    patch()
import numpy as np
import flashlight_py as fl
if "after" in sys.argv:
    patch()
try:
    fl.distributed_init(params={"TIMEOUT": 50})
except fl.errors.BackendUnavailableError as error:
    sys.exit(str(error))
if "started" in sys.argv:
    patch()
sys.stdout.write(f"{fl.all_reduce(np.ones(1))[0]:g}\\n")
"""
)


def end_of(tmp_path: Path, program: str, *words: str, launcher: Sequence[object] = ()) -> Any:
    """Run ``program`` with ``words``, of which the first is the library, and return its end."""
    if find_spec(words[0]) is None:  # an import here would patch os.fork of this process
        pytest.skip(f"needs {words[0]}")
    return run([*(launcher or [sys.executable]), write(tmp_path, program), *words], timeout=50)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("library", ["gevent", "eventlet"])
def test_patched_ranks_are_refused_and_one_process_works(
    tmp_path: Path, library: str, when: str
) -> None:
    assert end_of(tmp_path, PROGRAM, library, when).stdout == "1\n"
    several = end_of(tmp_path, PROGRAM, library, when, launcher=[*LAUNCH, "-n", 2])
    assert several.returncode == 1
    assert f"{library} has replaced threads and sockets of this process" in several.stderr


@pytest.mark.parametrize("library", ["gevent", "eventlet"])
def test_ranks_end_without_an_error_if_patched_after_the_start(
    tmp_path: Path, library: str
) -> None:
    several = end_of(tmp_path, PROGRAM, library, "started", launcher=[*LAUNCH, "-n", 2])
    assert sorted((several.stdout + several.stderr).splitlines()) == ["[0] 2", "[1] 2"]


SPAWN = (
    PATCH
    + """
import numpy as np

def total(rank, x):
    import flashlight_py as fl
    return float(fl.all_reduce(np.full(1, x))[0])

if __name__ == "__main__":
    patch()
    import flashlight_py as fl

    def start():
        print(fl.spawn(total, args=(1.5,), nprocs=2))
        model = fl.DataParallel(fl.nn.Linear(2, 1), nprocs=2)
        print(model(fl.Variable(np.ones((4, 2)))).shape)
        model.close()

    if "greenlet" in sys.argv:
        from concurrent.futures import ThreadPoolExecutor
        ThreadPoolExecutor(1).submit(start).result()
    else:
        start()
"""
)


@pytest.mark.parametrize("place", ["main", "greenlet"])
@pytest.mark.parametrize("library", ["gevent", "eventlet"])
def test_a_patched_process_starts_processes_that_are_not(
    tmp_path: Path, library: str, place: str
) -> None:
    ended = end_of(tmp_path, SPAWN, library, place)
    assert ended.stdout == "[3.0, 3.0]\n(4, 1)\n", ended.stderr
