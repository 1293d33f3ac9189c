"""Cost of writing data that another core reads, through the caches and past them.

The script compiles native/stores.cc and runs it several times, because the result depends on the
two cores
that the scheduler and the hypervisor choose. It prints a Markdown table with the range of the
rounds. csrc/common/choice.h measures the same at run time.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
from pathlib import Path

from harness.facts import machine_facts

SOURCE = Path(__file__).parent / "native" / "stores.cc"
SIZES = (16 << 10, 64 << 10, 256 << 10)
WAYS = ("ordinary", "streamed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the times there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "stores"
        command = ["g++", "-std=c++17", "-O3", "-pthread", str(SOURCE), "-o", str(program)]
        subprocess.run(command, check=True)
        rounds = 1 if options.quick else options.rounds
        results = [measure(program) for _ in range(rounds)]
    print("| bytes | stores | fill, us | read and add, us |")
    print("| ---: | --- | ---: | ---: |")
    for case in results[0]:
        fill, add = zip(*(result[case] for result in results), strict=True)
        print(f"| {case[0]} | {case[1]} | {spread(fill)} | {spread(add)} |")
    machine = machine_facts()
    print("\n- " + ", ".join(f"{name} {value}" for name, value in machine.items()))
    if options.json:
        cases = [{"bytes": size, "stores": stores} for size, stores in results[0]]
        times = [[result[case] for result in results] for case in results[0]]
        reported = [
            {**case, "us": microseconds} for case, microseconds in zip(cases, times, strict=True)
        ]
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(
            json.dumps({"machine": machine, "rounds": reported}, indent=1) + "\n"
        )


def measure(program: Path) -> dict[tuple[int, str], tuple[float, float]]:
    """Return microseconds for filling and for adding, by size and kind of store."""
    times = {}
    for size in SIZES:
        for stores in WAYS:
            command = [str(program), str(size), stores]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            fill, add = map(float, done.stdout.split())
            times[size, stores] = (fill, add)
    return times


def spread(values: tuple[float, ...]) -> str:
    """Return the median and the range as text."""
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


if __name__ == "__main__":
    main()
