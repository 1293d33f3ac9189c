"""Time of a checkpoint next to dd on the same disk in the same run.

    python benchmarks/checkpoint.py --json checkpoint.json

In each round dd writes as many zeros as the checkpoint has bytes (conv=fsync: dd ends when they are
on the disk). `fl.save` writes a module of one array (digest, fsync of files and folder, rename),
and
`fl.load` reads it from the page cache. --folder must be on a real disk, because fsync on a file
system in memory costs nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import flashlight_py as fl
from harness.facts import machine_facts
from harness.report import conclude, ratio_table, size_name, time_table
from harness.statistics import Measurement
from harness.verdicts import at_least

DD, SAVE, LOAD = "dd, conv=fsync", "fl.save", "fl.load"
MEGABYTE = 1 << 20
BUILD = Path(__file__).parent.parent / "build"


def main() -> None:
    """Measure, print, write."""
    options = read_options()
    options.folder.mkdir(parents=True, exist_ok=True)
    results = [measure(size, options.rounds, options.folder) for size in options.megabytes]
    largest = max(results, key=lambda result: result.nbytes)
    ratios = {label(largest): largest.ratios(DD, SAVE)}
    verdicts = [at_least("a large checkpoint's speed, of dd's", 0.5, ratios)]
    print(f"{time_table(results, 'bytes', label)}\n")
    print(f"{ratio_table(results, 'speed of fl.save, to', label, SAVE)}\n")
    conclude(options, None, results, verdicts)


def measure(megabytes: int, rounds: int, parent: Path) -> Measurement:
    """Return the seconds of every round."""
    result = Measurement("checkpoint", "float32", megabytes * MEGABYTE, 1)
    module = OneArray(megabytes * MEGABYTE // 4)
    for _ in range(rounds):
        folder = Path(tempfile.mkdtemp(dir=parent))
        try:
            for title, seconds in one_round(module, megabytes, folder).items():
                result.seconds.setdefault(title, []).append(seconds)
        finally:
            shutil.rmtree(folder)
    return result


def one_round(module: OneArray, megabytes: int, folder: Path) -> dict[str, float]:
    """Return the seconds of each contender in one round."""
    return {
        DD: dd(folder / "dd", megabytes),
        SAVE: seconds_of(lambda: fl.save(folder / "run", module=module, step=1)),
        LOAD: seconds_of(lambda: fl.load(folder / "run", module=module)),
    }


class OneArray(fl.nn.Module):
    """A module of one parameter with arbitrary values."""

    def __init__(self, size: int) -> None:
        self.weight = fl.param(np.arange(size, dtype=np.float32))

    def forward(self, *inputs: fl.Variable) -> fl.Variable:
        """Return the parameter."""
        return self.weight


def dd(file: Path, megabytes: int) -> float:
    """Write ``file`` with dd, remove it, and return the seconds that dd reports."""
    arguments = ["if=/dev/zero", f"of={file}", "bs=1M", f"count={megabytes}", "conv=fsync"]
    english = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(
        ["dd", *arguments], capture_output=True, text=True, check=True, env=english
    )
    file.unlink()
    match = re.search(r", ([\d.e+-]+) s,", done.stderr)
    if match is None:
        raise RuntimeError(f"dd does not say how long it took: {done.stderr}")
    return float(match[1])


def seconds_of(work: Callable[[], object]) -> float:
    """Return the seconds of one call of ``work``."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def label(measurement: Measurement) -> str:
    """Return the label of a row."""
    return size_name(measurement.nbytes)


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.set_defaults(machine=machine_facts())
    add = parser.add_argument
    add("--megabytes", type=int, nargs="+", help="sizes, default 1, 64 and 1024")
    add("--rounds", type=int, help="default 7")
    add("--folder", type=Path, default=BUILD, help="where to write, default build/")
    add("--quick", action="store_true", help="small, and few rounds: to see that it works")
    add("--json", type=Path, metavar="FILE", help="also write everything measured to this file")
    options = parser.parse_args()
    options.megabytes = options.megabytes or ([1, 4] if options.quick else [1, 64, 1024])
    options.rounds = options.rounds or (2 if options.quick else 7)
    return options


if __name__ == "__main__":
    main()
