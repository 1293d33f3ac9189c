"""All states of the model of the comparison between hosts; mutants show that it detects errors."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

MODEL = Path(__file__).parent / "hosts.pml"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which("spin") and shutil.which("gcc")), reason="needs spin, gcc"
    ),
    pytest.mark.timeout(1800),
]

NAMES = "victim==me"
# Parts of the protocol whose removal causes an error, with the shape and property that show it.
MUTANTS = {
    "NO_NESTING": (21, NAMES),  # hosts wait for each other as long as ranks of one host do
    "NEVER_AHEAD": (31, NAMES),  # runs_ahead is ignored
    "PATIENT_LEADER": (21, NAMES),  # a rank with the answer waits for its peers as they wait for it
    "NOT_PASSED_ON": (31, NAMES),  # a rank that ends does not end the other parts
    "NO_REASONS": (31, NAMES),  # a rank that gave up counts as lost, whatever its reason
    "LATE_ANYWAY": (31, NAMES),  # also at the limit
    "NO_FOR_OTHERS": (21, NAMES),  # a rank that was given up reports that it has lost the other one
    "NO_ZERO_INSIDE": (31, "odd==call"),  # a host only learns the calls of its own ranks
    "NO_TIMEOUT": (31, "ended"),  # no wait has a limit
    "NO_NEIGHBOURS": (31, NAMES),  # a rank that gives up only informs connected ranks
    # Of several ranks that gave up, the first one in rank order has the reason.
    "IN_ORDER_OF_RANKS": (31, NAMES),
}


def run(folder: Path, shape: int, *flags: str, level: str = "-O2") -> str:
    """Return the output of the search of all states."""
    shutil.copy(MODEL, folder)
    generate = ["spin", f"-DSHAPE={shape}", *flags, "-a", MODEL.name]
    subprocess.run(generate, cwd=folder, check=True, timeout=60)
    build = ["gcc", level, "-w", "-DSAFETY", "-DCOLLAPSE", "-o", "pan", "pan.c"]
    subprocess.run(build, cwd=folder, check=True, timeout=300)
    # -E: the model itself checks the final positions of processes.
    search = ["./pan", "-m100000", "-E"]
    text = subprocess.run(search, cwd=folder, check=True, text=True, capture_output=True).stdout
    counts = re.findall(r"(\d+) states, stored|elapsed time (\S+)", text)
    print(shape, *flags, *(states or f"{seconds} s" for states, seconds in counts))
    assert "max search depth too small" not in text, text
    return text


@pytest.mark.parametrize("shape", [31, 21, 22])
def test_model_of_hosts_has_no_wrong_state(tmp_path: Path, shape: int) -> None:
    text = run(tmp_path, shape, "-DCALLS=2")
    assert "errors: 0" in text, text


@pytest.mark.parametrize("mutant", MUTANTS)
def test_model_checker_refutes_each_mutant(tmp_path: Path, mutant: str) -> None:
    shape, condition = MUTANTS[mutant]
    text = run(tmp_path, shape, "-DCALLS=2", f"-DMUTANT={mutant}", level="-O0")
    assert "errors: 1" in text, text
    violated = next(line for line in text.splitlines() if "assertion violated" in line)
    assert condition in violated, violated
