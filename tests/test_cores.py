"""Which cores a process may use, and how ranks share them."""

from __future__ import annotations

import os

import pytest

from flashlight_py import cores
from flashlight_py.cores import cores_of_quota, fair_share, thread_variables, usable_cores


def test_usable_cores_are_at_most_those_of_the_affinity() -> None:
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("cpu_max", "cores"),
    [("max 100000\n", None), ("400000 100000\n", 4), ("150000 100000\n", 2), ("5000 100000\n", 1)],
)
def test_a_containers_quota_in_cores(cpu_max: str, cores: int | None) -> None:
    assert cores_of_quota(cpu_max) == cores


NAMES = {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"}


@pytest.mark.parametrize(("processes", "share"), [(1, "8"), (3, "2"), (8, "1"), (20, "1")])
def test_processes_share_the_cores(processes: int, share: str) -> None:
    assert thread_variables({}, processes, 8) == dict.fromkeys(NAMES, share)


def test_what_the_user_set_stands() -> None:
    assert set(thread_variables({"MKL_NUM_THREADS": "3"}, 2, 8)) == NAMES - {"MKL_NUM_THREADS"}
    assert thread_variables({"OMP_NUM_THREADS": "3"}, 2, 8) == {}  # the others follow it


@pytest.mark.parametrize(
    ("affinities", "shares"),
    [
        ([{0, 1, 2, 3}] * 2, [2, 2]),
        ([{0, 1, 2, 3}] * 6, [1] * 6),
        ([{0, 1}, {2, 3}], [2, 2]),  # bound by the launcher
        ([{0}, {1, 2, 3}], [1, 2]),
    ],
)
def test_ranks_share_what_their_launcher_lets_them_use(
    affinities: list[set[int]], shares: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "_within_quota", lambda count: count)
    assert [fair_share(rank, affinities) for rank in range(len(affinities))] == shares
