"""Ranks of one host divide its cores between their BLAS threads, unless the user chose a number."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from flashlight_py import blas
from flashlight_py.cores import usable_cores
from flashlight_py.launch.ranks import Slot, rank_numbers
from tests.distributed.jobs import finish, start

pytestmark = pytest.mark.usefixtures("leaves_nothing")

PROGRAM = """
import sys
import flashlight_py as fl
from flashlight_py import blas
((get_threads, set_threads, *_),) = blas._loaded()
if sys.argv[1:]:
    set_threads(int(sys.argv[1]))
print(get_threads())
fl.distributed_init()
print(get_threads())
print(fl.distributed.describe().splitlines()[2])
fl.distributed_shutdown()
print(get_threads())
assert "BLAS" not in fl.distributed.describe()
"""

HAS_OPENBLAS = "openblas" in str(np.show_config("dicts")).lower()
NEEDS_OPENBLAS = pytest.mark.skipif(not HAS_OPENBLAS, reason="NumPy's BLAS is no OpenBLAS here")


@pytest.fixture(autouse=True)
def _nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in blas._VARIABLES:
        monkeypatch.delenv(name, raising=False)


def threads(folder: Path, *arguments: str, **variables: str) -> tuple[int, int, str, int]:
    """Return the BLAS threads before, during and after a world of two ranks, and their
    description."""
    command = [sys.executable, "-W", "error", "-c", PROGRAM, *arguments]
    meeting = {"FLASHLIGHT_FILE": str(folder / "meet")}
    where = [{**rank_numbers(Slot(rank, rank, 2, 0), 2), **meeting} for rank in range(2)]
    first, second = map(
        finish,
        [start(command, {**variables_of_process, **variables}) for variables_of_process in where],
    )
    assert first == second
    code, output = first
    assert code == 0, output
    before, during, text, after = output.splitlines()
    return int(before), int(during), text.removeprefix("BLAS threads: "), int(after)


@NEEDS_OPENBLAS
def test_blas_limit_gives_each_rank_its_share_of_the_cores(tmp_path: Path) -> None:
    before, during, text, after = threads(tmp_path)
    assert during == max(1, min(before, usable_cores() // 2))
    assert text.startswith(f"{during}, ")
    assert ("the share of this rank" in text) == (during < before)
    assert after == before


@NEEDS_OPENBLAS
def test_blas_limit_keeps_the_number_that_the_user_chose(tmp_path: Path) -> None:
    many = str(os.cpu_count() or 1)
    before, during, text, _ = threads(tmp_path, OPENBLAS_NUM_THREADS=many)
    assert before == during
    assert text == f"set by OPENBLAS_NUM_THREADS={many}"
    more = (os.cpu_count() or 1) + 1
    assert threads(tmp_path, str(more)) == (more, more, f"{more}, unchanged", more)


def test_blas_limit_has_no_effect_without_openblas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas.libraries, "loaded_libraries", lambda name: [])
    blas.limit(1)
    try:
        assert blas.reason.startswith("not set: NumPy does not use OpenBLAS")
    finally:
        blas.restore()
