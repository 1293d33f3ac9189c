"""Savings and costs of host_array, recompute, shard_linear and set_epoch.

    python benchmarks/sharding_parts.py --json sharding_parts.json

The method is the method of all_reduce.py: contenders take turns, with one BLAS thread per rank.

host_array: 8 ranks each load a data set, or share one by host_array. The results are the sum of the
ranks' proportional memory (PSS) and the time to copy a batch of 256 rows. recompute: a deep network
keeps the results of its blocks or computes them again. The results are the peak of NumPy's
allocations in a step beyond parameters and gradients, the time of a step, and a comparison of the
gradients' bits. shard_linear: four linear layers with one sample, on one rank and split between
two ranks. The result is the time until the output exists. set_epoch: the order of an epoch of 8
million
rows, next to NumPy's Generator.permutation of as many rows in the same process.
"""

import argparse
from typing import Any

from harness.conductor import Case, Conductor, Contender
from harness.options import common_arguments, ours, plan_of
from harness.report import conclude, duration, markdown, size_name
from harness.statistics import Measurement, median
from harness.verdicts import Verdict, at_least, at_most

LIBRARY = "flashlight_parts"
EACH, HOST = "every rank loads its own", "host_array"
PLAIN, AGAIN = "results are kept", "recompute"
WHOLE, CUT = "1 rank", "shard_linear, 2 ranks"
EPOCH, PERMUTATION = "set_epoch", "Generator.permutation"
DEEP = {"width": 256, "depth": 16, "batch": 2048}
QUICK = {"width": 64, "depth": 4, "batch": 64}
ROW_BYTES = 4096


def data_set(options: argparse.Namespace, conductor: Conductor) -> tuple[Measurement, list[Any]]:
    """Measure the data set, and return the rows of its table."""
    nbytes, ranks = options.nbytes // ROW_BYTES * ROW_BYTES, max(options.ranks)
    result = Measurement("data set", "float32", nbytes, ranks)
    library, task = ours(LIBRARY), {"work": "data", "nbytes": nbytes}
    kinds = {EACH: "each", HOST: "host"}
    entrants = [Contender(title, library, ranks, {"kind": kind}) for title, kind in kinds.items()]
    conductor.measure(Case(result, task, nbytes), entrants)
    taken = {title: sum(shares) for title, shares in conductor.details.items()}
    return result, [
        [title, f"{taken[title] / nbytes:.3f}", duration(median(seconds))]
        for title, seconds in result.seconds.items()
    ]


def deep_network(
    options: argparse.Namespace, conductor: Conductor
) -> tuple[Measurement, list[Any]]:
    """Measure a step, and return the rows of its table.

    Raises:
        SystemExit: If the gradients have other bits.
    """
    sizes = QUICK if options.quick else DEEP
    result = Measurement("step of a deep network", "float32", 4 * sizes["width"] ** 2, 1)
    library, task = ours(LIBRARY), {"work": "deep", **sizes}
    kinds = {PLAIN: "plain", AGAIN: "again"}
    entrants = [Contender(title, library, 1, {"kind": kind}) for title, kind in kinds.items()]
    conductor.measure(Case(result, task), entrants)
    details = {title: detail[0] for title, detail in conductor.details.items()}
    if len({bits for _, bits in details.values()}) > 1:
        raise SystemExit("FAILED: recompute has changed the gradients")
    return result, [
        [title, size_name(details[title][0] >> 10 << 10), duration(median(seconds))]
        for title, seconds in result.seconds.items()
    ]


def layers(options: argparse.Namespace, conductor: Conductor) -> Measurement:
    """Measure one sample through four linear layers."""
    width = 128 if options.quick else options.width
    result = Measurement(f"4 x Linear({width}), one sample", "float32", 4 * 4 * width * width, 2)
    library, task = ours(LIBRARY), {"work": "layers", "width": width}
    entrants = [
        Contender(WHOLE, library, 1, {"kind": "whole"}),
        Contender(CUT, library, 2, {"kind": "cut"}),
    ]
    return conductor.measure(Case(result, task, 8 * width * width * 4), entrants)


def epoch(options: argparse.Namespace, conductor: Conductor) -> Measurement:
    """Measure the order of an epoch."""
    rows = 10_000 if options.quick else options.rows
    result = Measurement(f"order of {rows:,} rows", "int64", 8 * rows, 1)
    kinds = {EPOCH: "sampler", PERMUTATION: "numpy"}
    entrants = [Contender(title, ours(LIBRARY), 1, {"kind": kind}) for title, kind in kinds.items()]
    return conductor.measure(Case(result, {"work": "epoch", "rows": rows}, 32 * rows), entrants)


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = common_arguments("Measure functions for large data sets and models.", [8], "")
    parser.add_argument("--rows", type=int, default=8_000_000, help="of an epoch")
    parser.add_argument("--nbytes", type=int, default=64 << 20, help="of the data set")
    parser.add_argument("--width", type=int, default=4096, help="of the linear layers")
    return parser.parse_args()


def main() -> None:
    """Measure, print, write."""
    options = read_options()
    with Conductor(plan_of(options)) as conductor:
        data, data_rows = data_set(options, conductor)
        deep, deep_rows = deep_network(options, conductor)
        latency = layers(options, conductor)
        order = epoch(options, conductor)
    memory = {title: float(taken) for title, taken, _ in data_rows}
    judged: list[Verdict] = [
        at_most(
            f"memory of a data set on {data.ranks} ranks, of its size, by host_array",
            1.05,
            {size_name(data.nbytes): [memory[HOST]]} if HOST in memory else {},
        ),
        at_least(f"{latency.task}, 2 ranks against 1", 1.8, {CUT: latency.ratios(WHOLE, CUT)}),
        at_most(f"{order.task}, of NumPy's time", 1.2, {EPOCH: order.ratios(EPOCH, PERMUTATION)}),
    ]
    print(f"\n### A data set of {size_name(data.nbytes)}, {data.ranks} ranks\n")
    print(markdown(["", "memory of all ranks, in data sets", "a batch"], data_rows))
    print("\n### A step of a deep network\n")
    print(markdown(["", "results and temporaries, at most", "a step"], deep_rows))
    for work in (latency, order):
        times = [[title, duration(median(seconds))] for title, seconds in work.seconds.items()]
        print(f"\n### {work.task}\n\n{markdown(['', 'until the result'], times)}")
    conclude(options, conductor, [data, deep, latency, order], judged)


if __name__ == "__main__":
    main()
