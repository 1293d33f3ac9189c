"""Tracebacks show the user's lines, and state how many frames are hidden and how to show them."""

import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.tracebacks import folded
from tests.launch.launcher import run


def raised(fn: Callable[[], object]) -> BaseException:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever it raises
        fn()
    return caught.value


def mistake() -> object:
    return fl.all_reduce(np.zeros(3), op="total")


def test_traceback_shows_user_lines() -> None:
    error = raised(mistake)
    lines = folded(error).splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert '    return fl.all_reduce(np.zeros(3), op="total")' in lines
    hidden = [line for line in lines if "flashlight_py" in line]
    assert len(hidden) == 1
    assert re.match(
        r"  \[\d frames inside flashlight_py, to distributed/calls/arrays.py:", hidden[0]
    )
    assert hidden[0].endswith(" in parse_op; FLASHLIGHT_FULL_TRACEBACK=1 shows them]")
    assert lines[-1].startswith("ValueError: all_reduce: op must be one of")
    assert error.__traceback__ is not None  # not modified


def test_full_traceback_can_be_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHLIGHT_FULL_TRACEBACK", "1")
    assert "distributed/api/verb_call.py" in folded(raised(mistake))


def test_causes_are_folded_as_well() -> None:
    def handled() -> None:
        try:
            mistake()
        except ValueError as error:
            raise KeyError("cleaning up") from error

    text = folded(raised(handled))
    assert text.count("inside flashlight_py") == 1
    assert "reductions.py" not in text
    assert "The above exception was the direct cause of" in text


def test_user_frames_below_package_frames_are_shown() -> None:
    @contextlib.contextmanager
    def users() -> Iterator[None]:
        yield

    @fl.abort_on_exception()
    def called() -> None:
        with users():
            raise OSError("by the user")

    text = folded(raised(called))
    assert 'raise OSError("by the user")' in text
    assert "1 frame inside flashlight_py, to distributed/failures/abort.py" in text
    assert "contextlib.py" not in text


def test_errors_without_user_frames_are_shown_in_full() -> None:
    error = raised(mistake)
    while error.__traceback__ is not None and error.__traceback__.tb_next is not None:
        error = error.with_traceback(error.__traceback__.tb_next)
    assert "flashlight_py/distributed/calls/arrays.py" in folded(error)


PROGRAM = """
import numpy as np
import flashlight_py as fl
fl.distributed_init()
def train():
    fl.all_reduce(np.zeros(3), op="total")
train()
"""


@pytest.mark.parametrize("full", ["0", pytest.param("1", marks=pytest.mark.slow)])
def test_uncaught_exception_is_printed_folded(full: str) -> None:
    env = {"PATH": "", "FLASHLIGHT_ALONE": "1", "FLASHLIGHT_FULL_TRACEBACK": full}
    done = run([sys.executable, "-c", PROGRAM], env=env)
    assert done.returncode == 1
    assert ("distributed/api/verb_call.py" in done.stderr) == (full == "1")
    assert "in train" in done.stderr


CELL = """
import flashlight_py as fl
def train(rank):
    return 1 // (1 - rank)
fl.spawn(train, nprocs=2)
"""


@pytest.mark.slow
def test_failed_rank_prints_few_lines_in_a_notebook(tmp_path: Path) -> None:
    pytest.importorskip("IPython")
    pytest.importorskip("cloudpickle")
    command = [sys.executable, "-m", "IPython", "--colors=NoColor", "-c", CELL]
    done = run(command, env={**os.environ, "IPYTHONDIR": str(tmp_path)})
    lines = done.stdout.splitlines()
    assert "    fl.spawn(train, nprocs=2)" in lines[:4]
    assert lines[-1] == "ZeroDivisionError: integer division or modulo by zero"
    assert done.stdout.count("inside flashlight_py") == 2
    assert len(lines) <= 10
