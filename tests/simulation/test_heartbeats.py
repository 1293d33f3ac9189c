"""The heartbeats of many ranks in virtual time, for many seeds.

``make simulate-heartbeats SEED=7 RANKS=256`` repeats one simulation.
"""

import re
import shutil
from pathlib import Path

import pytest

from tests.launch.launcher import run

ROOT = Path(__file__).parents[2]
OUT = ROOT / "build" / "simulation"
WITHIN, MOST_CONNECTIONS = 5.0, 64 + 8  # seconds, and connections of a rank on a host of 8

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which("make") and shutil.which("g++")), reason="needs make and g++"
    ),
]


@pytest.fixture(scope="module")
def program() -> Path:
    run(["make", "-s", "-C", Path(__file__).parent, f"OUT={OUT}"], code=0, timeout=None)
    return OUT / "heartbeats"


def simulate(program: Path, *arguments: object) -> str:
    """Return the last line with the results; raise if the seed fails."""
    return str(run([program, *arguments], code=0, timeout=None).stdout)


@pytest.mark.parametrize(("ranks", "count"), [(64, 600), (250, 100)])
def test_heartbeats_report_any_faults(program: Path, ranks: int, count: int) -> None:
    """With 250 ranks, the last host has two ranks."""
    simulate(program, ranks, 1000, count)


@pytest.mark.parametrize("fault", ["host", "rack", "cut", "freeze", "death"])
def test_heartbeats_of_10_000_ranks_report_a_lost_host_soon(program: Path, fault: str) -> None:
    result = simulate(program, 10_000, 7, 1, fault)
    match = re.search(r"loss known ([\d.e-]+) s, connections (\d+),", result)
    assert match, result
    assert 0 < float(match[1]) < WITHIN
    assert int(match[2]) <= MOST_CONNECTIONS


def test_heartbeats_do_not_report_ranks_that_leave_or_are_slow(program: Path) -> None:
    for fault in ("leaving", "stop", "slow", "gap", "loss", "stranger"):
        assert "loss known 0 s" in simulate(program, 128, 7, 5, fault)
