"""Functions that start examples: in one process, with flrun, with mpirun."""

import re
import sys
from pathlib import Path

from tests.launch.launcher import run

EXAMPLES = Path(__file__).parents[2] / "examples"
ALONE = (sys.executable, "-W", "error")
FLRUN = (sys.executable, "-m", "flashlight_py.launch", "-n")
DEADLINE = 100.0


def output(start: tuple[object, ...], program: str | Path, *options: object) -> str:
    """Return the output of an example without flrun's rank numbers; the example must succeed."""
    done = run([*start, EXAMPLES / program, *options], code=0, timeout=DEADLINE)
    return re.sub(r"^\[\d+\] ", "", done.stdout, flags=re.MULTILINE)
