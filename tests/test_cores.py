"""Number of cores that a process may use, and their division among ranks."""

import os
from pathlib import Path

import pytest

from flashlight_py import cores
from flashlight_py.cores import fair_share, thread_variables, usable_cores


def test_usable_cores_respects_the_affinity() -> None:
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))


V1, V2 = "4:cpu,cpuacct:/jobs/7\n1:name=systemd:/jobs/7\n0::/\n", "0::/jobs/7\n"


@pytest.mark.parametrize(
    ("groups", "quotas", "expected"),
    [
        (V2, {"cpu.max": "max 100000\n"}, 8),
        (V2, {"cpu.max": "400000 100000\n"}, 4),
        (V2, {"cpu.max": "max 100000\n", "jobs/7/cpu.max": "150000 100000\n"}, 2),
        (V2, {"jobs/cpu.max": "5000 100000\n", "jobs/7/cpu.max": "300000 100000\n"}, 1),
        (V2, {"jobs/7/cpu.max": "nonsense"}, 8),
        (V1, {"cpu/jobs/7/cpu.cfs_quota_us": "-1\n", "cpu/jobs/7/cpu.cfs_period_us": "1\n"}, 8),
        (V1, {"cpu/jobs/cpu.cfs_quota_us": "250000", "cpu/jobs/cpu.cfs_period_us": "100000"}, 3),
        (V1, {"cpu,cpuacct/cpu.cfs_quota_us": "9", "cpu,cpuacct/cpu.cfs_period_us": "9"}, 1),
        ("", {"cpu.max": "100000 100000\n"}, 8),
    ],
)
def test_usable_cores_respects_the_lowest_quota(
    groups: str,
    quotas: dict[str, str],
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files = {f"sys/fs/cgroup/{name}": text for name, text in quotas.items()}
    for name, text in {"proc/self/cgroup": groups, **files}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(cores, "ROOT", tmp_path)
    assert fair_share(0, [set(range(8))]) == expected


NAMES = {"OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"}


@pytest.mark.parametrize(("processes", "share"), [(1, "8"), (3, "2"), (8, "1"), (20, "1")])
def test_thread_variables_divide_the_cores(processes: int, share: str) -> None:
    assert thread_variables({}, processes, 8) == dict.fromkeys(NAMES, share)


def test_thread_variables_keep_user_settings() -> None:
    assert set(thread_variables({"MKL_NUM_THREADS": "3"}, 2, 8)) == NAMES - {"MKL_NUM_THREADS"}
    assert thread_variables({"OMP_NUM_THREADS": "3"}, 2, 8) == {}  # the other variables follow


@pytest.mark.parametrize(
    ("affinities", "shares"),
    [
        ([{0, 1, 2, 3}] * 2, [2, 2]),
        ([{0, 1, 2, 3}] * 6, [1] * 6),
        ([{0, 1}, {2, 3}], [2, 2]),  # bound by the launcher
        ([{0}, {1, 2, 3}], [1, 2]),
    ],
)
def test_fair_share_divides_common_cores(
    affinities: list[set[int]], shares: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "_within_quota", lambda count: count)
    assert [fair_share(rank, affinities) for rank in range(len(affinities))] == shares
