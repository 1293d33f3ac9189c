"""fl.synchronize of a tree of many small arrays, next to one broadcast of the same number of bytes.

    python benchmarks/synchronize.py --json synchronize.json

The method is the method of all_reduce.py; the same ranks make all calls in turns. A tree is a dict
of 1,000 float32 arrays, and the broadcast's array has their total length. synchronize also
traverses the tree, compares its structure between ranks, packs the arrays on one rank and
unpacks them on the other ranks. The last column is a loop of broadcasts.
"""

import argparse

from harness.conductor import Case, Conductor, Contender
from harness.options import common_arguments, ours, plan_of
from harness.report import conclude, ratio_table, size_name, time_table
from harness.statistics import Measurement
from harness.verdicts import Verdict, at_most

ARRAYS = 1000
SIZES = [250 << 10, ARRAYS << 10, 16 * ARRAYS << 10]
ONE, TREE, EACH = "one broadcast", "synchronize", "a broadcast for each array"
KINDS = {ONE: "one", TREE: "tree", EACH: "each"}
MOST = 40.0  # times a broadcast, for 1,000 arrays of 1 KB on 2 ranks


def measure(options: argparse.Namespace, conductor: Conductor) -> list[Measurement]:
    """Return all cases, grouped by the number of ranks."""
    library = ours("flashlight_tree")
    results = []
    for ranks in options.ranks:
        entrants = [
            Contender(title, library, ranks, {"kind": kind}) for title, kind in KINDS.items()
        ]
        for nbytes in options.sizes:
            measurement = Measurement("synchronize", "float32", nbytes, ranks)
            task = {"nbytes": nbytes, "arrays": ARRAYS}
            results.append(conductor.measure(Case(measurement, task, 3 * nbytes), entrants))
    return results


def label(measurement: Measurement) -> str:
    """Return the name of a row."""
    return f"{ARRAYS} x {size_name(measurement.nbytes // ARRAYS)}"


def verdicts(measurements: list[Measurement]) -> list[Verdict]:
    """Judge the tree of 1 KB arrays on 2 ranks."""
    judged = [m for m in measurements if (m.ranks, m.nbytes) == (2, ARRAYS << 10)]
    rounds = {label(m): m.ratios(TREE, ONE) for m in judged}
    return [at_most("2 ranks, synchronize against one broadcast", MOST, rounds)]


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = common_arguments("Time synchronize beside a broadcast.", [2], "")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="bytes of the tree")
    return parser.parse_args()


def main() -> None:
    """Measure, print, write."""
    options = read_options()
    with Conductor(plan_of(options)) as conductor:
        measurements = measure(options, conductor)
    for ranks in options.ranks:
        some = [m for m in measurements if m.ranks == ranks]
        print(f"\n### A tree of {ARRAYS} arrays, {ranks} ranks\n")
        print(time_table(some, "arrays", label))
        print(f"\nTime divided by the time of {ONE}:\n")
        print(ratio_table(some, "arrays", label, ONE))
    judged = verdicts(measurements)
    conclude(options, conductor, measurements, judged, lambda m: f"{m.ranks} ranks {label(m)}")


if __name__ == "__main__":
    main()
