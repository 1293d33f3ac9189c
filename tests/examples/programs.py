"""How examples are started: alone, by flrun, by mpirun."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
ALONE = (sys.executable, "-W", "error")
FLRUN = (sys.executable, "-m", "flashlight_py.launch", "-n")
DEADLINE = 100.0


def output(start: tuple[object, ...], program: str | Path, *options: object) -> str:
    """Return what an example prints, without flrun's numbers of the ranks; it must end well."""
    command = [str(part) for part in (*start, EXAMPLES / program, *options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return re.sub(r"^\[\d+\] ", "", done.stdout, flags=re.MULTILINE)
