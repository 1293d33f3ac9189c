"""How examples are started: alone, by flrun, by mpirun."""

import re
import sys
from pathlib import Path

from tests.launch.launcher import run

EXAMPLES = Path(__file__).parents[2] / "examples"
ALONE = (sys.executable, "-W", "error")
FLRUN = (sys.executable, "-m", "flashlight_py.launch", "-n")
DEADLINE = 100.0


def output(start: tuple[object, ...], program: str | Path, *options: object) -> str:
    """Return what an example prints, without flrun's numbers of the ranks; it must end well."""
    done = run([*start, EXAMPLES / program, *options], code=0, timeout=DEADLINE)
    return re.sub(r"^\[\d+\] ", "", done.stdout, flags=re.MULTILINE)
