"""Number of cores that a process may use, their division among ranks, and BLAS threads."""

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from flashlight_py import blas, cores
from flashlight_py.cores import fair_share, thread_variables, usable_cores
from flashlight_py.launch.ranks import Slot, rank_numbers
from tests.distributed.processes import finish, start

pytestmark = pytest.mark.usefixtures("leaves_nothing")


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
    monkeypatch.setattr(cores, "_within_quota", lambda count, root: count)
    assert [fair_share(rank, affinities) for rank in range(len(affinities))] == shares


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
