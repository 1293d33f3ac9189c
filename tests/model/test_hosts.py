"""The model of the comparison between hosts, in all its states; and that it can see faults."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

MODEL = Path(__file__).parent / "hosts.pml"

pytestmark = [
    pytest.mark.skipif(
        not (shutil.which("spin") and shutil.which("gcc")), reason="needs spin, gcc"
    ),
    pytest.mark.timeout(1800),
]

NAMES = "victim==me"
# Each part of the protocol without which it is wrong; where that shows, and in which property.
MUTANTS = {
    "NO_NESTING": (21, NAMES),  # hosts wait for each other as long as ranks of one host do
    "NEVER_AHEAD": (31, NAMES),  # nobody heeds runs_ahead
    "PATIENT_LEADER": (21, NAMES),  # who has the answer waits for its peers as they wait for it
    "NOT_PASSED_ON": (31, NAMES),  # a rank that ends does not end the other parts
    "NO_REASONS": (31, NAMES),  # whoever gave up is lost, whatever it said
    "LATE_ANYWAY": (31, NAMES),  # also at the limit
    "NO_FOR_OTHERS": (21, NAMES),  # who was given up passes on that it has lost the other
    "NO_ZERO_INSIDE": (31, "odd==call"),  # a host hears of its own ranks' calls alone
    "NO_TIMEOUT": (31, "ended"),  # no wait has a limit
    "NO_NEIGHBOURS": (31, NAMES),  # who gives up tells those alone with whom it is connected
    "IN_ORDER_OF_RANKS": (
        31,
        NAMES,
    ),  # of several that gave up, the first in this order has the reason
}
QUICK = ("NO_REASONS", "NO_ZERO_INSIDE")


def run(folder: Path, shape: int, *flags: str, level: str = "-O2") -> str:
    """Return what the search of all states says."""
    shutil.copy(MODEL, folder)
    generate = ["spin", f"-DSHAPE={shape}", *flags, "-a", MODEL.name]
    subprocess.run(generate, cwd=folder, check=True, timeout=60)
    build = ["gcc", level, "-w", "-DSAFETY", "-DCOLLAPSE", "-o", "pan", "pan.c"]
    subprocess.run(build, cwd=folder, check=True, timeout=300)
    # -E: where a process stands at the end the model itself tells.
    search = ["./pan", "-m100000", "-E"]
    found = subprocess.run(search, cwd=folder, check=True, text=True, capture_output=True)
    text = found.stdout
    counts = re.findall(r"(\d+) states, stored|elapsed time (\S+)", text)
    print(shape, *flags, *(states or f"{seconds} s" for states, seconds in counts))
    assert "max search depth too small" not in text, text
    return text


@pytest.mark.parametrize(
    ("shape", "calls"),
    [(31, 1), *(pytest.param(s, 2, marks=pytest.mark.slow) for s in (31, 21, 22))],
)
def test_every_state_is_right(tmp_path: Path, shape: int, calls: int) -> None:
    text = run(tmp_path, shape, f"-DCALLS={calls}", level="-O0" if calls == 1 else "-O2")
    assert "errors: 0" in text, text


@pytest.mark.parametrize(
    "mutant", [pytest.param(m, marks=() if m in QUICK else pytest.mark.slow) for m in MUTANTS]
)
def test_a_mutant_is_refuted(tmp_path: Path, mutant: str) -> None:
    shape, condition = MUTANTS[mutant]
    text = run(tmp_path, shape, "-DCALLS=2", f"-DMUTANT={mutant}", level="-O0")
    assert "errors: 1" in text, text
    violated = next(line for line in text.splitlines() if "assertion violated" in line)
    assert condition in violated, violated
