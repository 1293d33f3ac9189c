"""Restarts of a job with all ranks or with the remaining ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashlight_py.launch.job import may_restart
from flashlight_py.launch.ranks import Slot, remaining_counts, slots_of
from tests.launch.launcher import launch, write


def test_slots_of_counts_ranks_host_by_host() -> None:
    assert slots_of([2, 0, 1]) == [Slot(0, 0, 2, 0), Slot(1, 1, 2, 0), Slot(2, 0, 1, 2)]


@given(st.lists(st.integers(0, 4), min_size=1, max_size=4), st.data())
def test_remaining_counts_excludes_lost_ranks(counts: list[int], data: st.DataObject) -> None:
    lost = data.draw(st.sets(st.sampled_from(range(sum(counts))))) if sum(counts) else set()
    remaining = remaining_counts(counts, lost)
    assert sum(remaining) == sum(counts) - len(lost)
    assert all(0 <= after <= before for before, after in zip(counts, remaining, strict=True))


@pytest.mark.parametrize(
    ("restarts", "most", "remaining", "least", "may"),
    [
        (0, None, 4, None, False),
        (0, 1, 4, None, True),
        (1, 1, 4, None, False),
        (5, None, 3, 3, True),
        (0, None, 2, 3, False),
        (1, 1, 3, 3, False),
        (0, 0, 3, 1, False),
    ],
)
def test_may_restart_respects_limits(
    restarts: int, most: int | None, remaining: int, least: int | None, may: bool
) -> None:
    assert may_restart(restarts, most, remaining, least) == may


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
    program = write(tmp_path, FAILING)
    done = launch("-n", 2, "--max-restarts", 1, program, 1, code=0)
    assert "[1] restart 1, 1 of 2, meets at 1" in done.stdout
    assert done.stderr.count("flrun: starting again with 2 rank(s)") == 1
    done = launch("-n", 2, "--max-restarts", 1, program, 2, code=137)
    assert done.stderr.count("was killed by SIGKILL") == 2


def test_min_n_restarts_with_remaining_ranks_down_to_the_minimum(tmp_path: Path) -> None:
    program = write(tmp_path, FAILING)
    done = launch("-n", 4, "--min-n", 2, program, 9, code=137)
    for restarts, size in enumerate((4, 3, 2)):
        assert f"[1] restart {restarts}, 1 of {size}, meets at {restarts}" in done.stdout
    assert "of 1" not in done.stdout
    assert "flrun: starting again with 3 rank(s), for the 1st time" in done.stderr
    assert "flrun: starting again with 2 rank(s), for the 2nd time" in done.stderr
