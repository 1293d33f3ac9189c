"""How much of the communication of a large model can be seen in its training step.

    python benchmarks/overlap.py --json overlap.json

A perceptron of 50 million parameters (width 4096), batch 64, SGD with momentum. One BLAS thread
per rank, so that on a machine with as many cores as ranks each rank has one for itself. Measured
are, in turns: one rank; several ranks that do the same side by side and do not communicate, which
shows what sharing the machine's memory costs; several whose gradients travel while the backward
pass goes on; and several that reduce them when it is over.
"""

from __future__ import annotations

import argparse
import itertools
from dataclasses import replace

from harness.conductor import Case, Conductor, Contender, Plan
from harness.facts import machine_facts
from harness.options import common_arguments, ours, plan_of
from harness.report import (
    duration,
    facts_text,
    left_out_text,
    markdown,
    verdict_table,
    write_json,
)
from harness.statistics import Measurement, median
from harness.step_targets import overlap_verdict, ranks_text

WIDTH, QUICK_WIDTH, BATCH = 4096, 256, 64
ALONE = "1 rank"
KINDS = {"no communication": "alone", "overlapped": "overlap", "after the backward pass": "after"}
ARRAYS = 5  # of the size of the parameters: they, gradients, momentum, temporaries, buckets
LONG = Plan(rounds=7, batch_seconds=1.0, case_seconds=120.0)


def contenders(ranks: list[int]) -> list[Contender]:
    """Return one rank, and every kind of step on several."""
    library = ours("flashlight_mlp")
    found = [Contender(ALONE, library, 1, {"kind": "alone"})]
    for count in ranks:
        found += [
            Contender(f"{ranks_text(count)}, {title}", library, count, {"kind": kind})
            for title, kind in KINDS.items()
        ]
    return found


def case_of(width: int, ranks: list[int]) -> Case:
    """Return the step to measure: about 3 * width**2 parameters."""
    widths = [width // 2, width, width, width, width // 2]
    weights = sum(a * b for a, b in itertools.pairwise(widths))
    measurement = Measurement("training step", "float32", 4 * weights, max(ranks))
    task = {"widths": widths, "batch": BATCH}
    return Case(measurement, task, ARRAYS * 4 * weights)


def table(steps: Measurement, ranks: list[int]) -> str:
    """Return the medians, and how much longer a step is than one rank's and one without talk."""
    rows = []
    for title, seconds in steps.seconds.items():
        count = title.split(",")[0]
        cells = [_beyond(steps, title, ALONE), _beyond(steps, title, f"{count}, no communication")]
        rows.append([title, duration(median(seconds)), *cells])
    return markdown(["", "a step", "beyond 1 rank", "beyond no communication"], rows)


def _beyond(steps: Measurement, title: str, reference: str) -> str:
    rounds = steps.ratios(title, reference)
    return f"{100 * (median(rounds) - 1):+.1f} %" if rounds and title != reference else "-"


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = common_arguments("Time a large model's step with and without overlap.", [2], "")
    parser.add_argument("--width", type=int, help=f"of the hidden layers, default {WIDTH}")
    return parser.parse_args()


def main() -> None:
    """Measure, print, write."""
    options = read_options()
    width = options.width or (QUICK_WIDTH if options.quick else WIDTH)
    plan = plan_of(options) if options.quick else replace(LONG, rounds=options.rounds or 7)
    machine = machine_facts()
    with Conductor(plan) as conductor:
        steps = conductor.measure(case_of(width, options.ranks), contenders(options.ranks))
    judged = [overlap_verdict(steps, ALONE, f"{ranks_text(n)}, overlapped") for n in options.ranks]
    print(f"\n{steps.nbytes / 4e6:.3g} million parameters, batch {BATCH}, 1 BLAS thread per rank\n")
    print(f"{table(steps, options.ranks)}\n\n{verdict_table(judged)}\n")
    print(facts_text(machine, conductor))
    print(left_out_text([steps], lambda m: m.task))
    if options.json:
        write_json(options.json, machine, conductor, [steps], judged)
    conductor.require("flashlight_py")


if __name__ == "__main__":
    main()
