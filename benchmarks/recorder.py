"""Cost of recording a call in the flight record: in the native all_reduce, and in the Python path.

The native part compiles native/recorder.c. The Python part times a verb that does nothing, with and
without its record. Both times are processor times of one process without other work.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
import timeit
from pathlib import Path

import numpy as np

from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.calls.journal import Journal
from flashlight_py.distributed.verbs import BROADCAST
from flashlight_py.distributed.work import Done, Work
from harness.facts import machine_facts

SOURCE = Path(__file__).parent / "native" / "recorder.c"
CALLS = 20_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--json", type=Path, help="also write the results there")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    results = {"native all_reduce": native(rounds), "through Python": through_python(rounds)}
    print("| way | a record, ns |\n| --- | ---: |")
    for title, values in results.items():
        median = statistics.median(values)
        print(f"| {title} | {median:.0f} ({min(values):.0f} to {max(values):.0f}) |")
    print("\n- " + ", ".join(f"{name} {value}" for name, value in machine_facts().items()))
    if options.json:
        options.json.write_text(json.dumps({"nanoseconds": results, "machine": machine_facts()}))


def native(rounds: int) -> list[float]:
    """Return nanoseconds for each round."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "recorder"
        command = ["gcc", "-std=gnu11", "-O3", str(SOURCE), "-o", str(program)]
        subprocess.run(command, check=True)
        return [float(subprocess.check_output([str(program)])) for _ in range(rounds)]


def through_python(rounds: int) -> list[float]:
    """Return nanoseconds for each round: time of a recorded call minus time of the same call."""
    journal, array = Journal("benchmark", (0,), ""), np.zeros(1, np.float32)
    done = Done(array)

    def start() -> Work:
        return done

    def bare() -> None:
        Call(BROADCAST, array)
        start().wait()

    def recorded() -> None:
        journal.run([Call(BROADCAST, array)], "broadcast", start)

    times = [(timeit.timeit(recorded, number=CALLS), timeit.timeit(bare, number=CALLS))
             for _ in range(rounds)]  # fmt: skip
    return [(with_record - without) / CALLS * 1e9 for with_record, without in times]


if __name__ == "__main__":
    main()
