"""Start time of flrun next to plain processes, and import time next to NumPy's.

    python benchmarks/launch.py --json launch.json

Each round times each contender once, from the start of its process to its end. The targets judge
the
medians of the ratios of the rounds. ``flrun -n 4`` runs an empty script; its peer is four processes
``python -c "import numpy"`` that start together. The import rows use one process. ``flashlight_py``
imports its parts at their first use, so the report also shows the import of all public names.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from harness.facts import machine_facts
from harness.report import conclude, ratio_table, time_table
from harness.statistics import Measurement
from harness.verdicts import Verdict, at_most

RANKS = 4
FLRUN, BARE, EMPTY = f"flrun -n {RANKS}", f"{RANKS} x import numpy", f"{RANKS} x nothing"
IMPORT, NUMPY, EVERY = "import flashlight_py", "import numpy", "every public name"
MOST = 1.5  # times the plain processes, and times NumPy's import


def together(*command: str) -> None:
    """Start the command once for each rank, and wait for all processes."""
    processes = [subprocess.Popen(command) for _ in range(RANKS)]
    codes = [process.wait() for process in processes]
    if any(codes):
        raise RuntimeError(f"{command} failed")


def one(*command: str) -> None:
    """Run the command."""
    subprocess.run(command, check=True)


def contenders(empty: Path) -> dict[str, dict[str, Callable[[], None]]]:
    """Return the commands that are timed, by task and title."""
    python = sys.executable
    return {
        "start": {
            FLRUN: lambda: one(python, "-m", "flashlight_py.launch", "-n", str(RANKS), str(empty)),
            BARE: lambda: together(python, "-c", "import numpy"),
            EMPTY: lambda: together(python, str(empty)),
        },
        "import": {
            IMPORT: lambda: one(python, "-c", "import flashlight_py"),
            NUMPY: lambda: one(python, "-c", "import numpy"),
            EVERY: lambda: one(python, "-c", "from flashlight_py import *"),
        },
    }


def measure(rounds: int) -> list[Measurement]:
    """Time each contender once in each round, after a round that does not count."""
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder) / "empty.py"
        empty.touch()
        measurements = []
        for task, calls in contenders(empty).items():
            measurement = Measurement(task, "", 0, RANKS if task == "start" else 1)
            for title, call in calls.items():
                call()
                measurement.seconds[title] = []
            for _ in range(rounds):
                for title, call in calls.items():
                    measurement.seconds[title].append(duration_of(call))
            measurements.append(measurement)
    return measurements


def duration_of(call: Callable[[], None]) -> float:
    """Return the seconds of ``call``."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def verdicts(start: Measurement, imports: Measurement) -> list[Verdict]:
    """Judge the launcher and the import."""
    return [
        at_most(f"{FLRUN} of an empty script", MOST, {BARE: start.ratios(FLRUN, BARE)}),
        at_most(IMPORT, MOST, {NUMPY: imports.ratios(IMPORT, NUMPY)}),
    ]


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.set_defaults(machine=machine_facts())
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--quick", action="store_true", help="three rounds")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def main() -> None:
    """Measure, print, write."""
    options = read_options()
    measurements = measure(3 if options.quick else options.rounds)
    for measurement, ours in zip(measurements, (FLRUN, IMPORT), strict=True):
        print(f"\n### {measurement.task}\n")
        print(time_table([measurement], "from start to end", lambda m: m.task))
        print(f"\nTime divided by the time of {ours}:\n")
        print(ratio_table([measurement], "", lambda m: m.task, ours))
    judged = verdicts(*measurements)
    conclude(options, None, measurements, judged)


if __name__ == "__main__":
    main()
