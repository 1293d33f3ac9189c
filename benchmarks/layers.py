"""Layers next to torch's layers, forward and backward, on one thread.

    python benchmarks/layers.py --json layers.json
    python benchmarks/layers.py --works --kinds convolution norm --seed 7

The rows are fixed layers, and 60 layers and functions whose shapes are drawn by ``--seed``. Both
libraries start from the same parameters, inputs and gradients of results. Their results and
gradients are compared, so both compute the same. The time is the processor time of the process.
torch has two layouts of images; the faster layout counts.
"""

import argparse
from dataclasses import asdict

import numpy as np

from harness.conductor import Case, Conductor, Contender
from harness.launchers import Library
from harness.options import common_arguments, installed, ours, plan_of
from harness.report import conclude, duration, markdown
from harness.roles.layer_works import FIXED, KINDS, Work, drawn
from harness.statistics import Measurement, median
from harness.verdicts import Verdict, at_least

OURS, PEER = "flashlight_py", "torch"
LAST = "torch, channels last"
MEDIAN, MEDIAN_OF_DRAWN = 1.0, 1.2


def peers(options: argparse.Namespace, absent: dict[str, str]) -> list[Contender]:
    """Return torch in its layouts if it is selected and installed; otherwise add it to
    ``absent``."""
    python = installed(PEER, options, absent)
    if python is None:
        return []
    library = Library(PEER, "torch_layer", python)
    layouts = {PEER: "contiguous", LAST: "channels_last"}
    return [Contender(title, library, 1, {"layout": layout}) for title, layout in layouts.items()]


def check_that_all_compute_the_same(samples: dict[str, list[list[list[float]]]]) -> None:
    """Compare the first elements of results and gradients.

    Raises:
        RuntimeError: If they differ.
    """
    if OURS not in samples:
        return
    ours = samples[OURS][0]
    for title, (other,) in samples.items():
        for a, b in zip(ours, other, strict=True):
            # A norm of few elements has gradients near 0, which are rounding errors.
            if not np.allclose(a, b, rtol=1e-3, atol=1e-3 * max(0.1, np.abs(b).max())):
                raise RuntimeError(f"{OURS} and {title} compute different layers: {a}, {b}")


def rounds_beside_torch(measurement: Measurement) -> list[float]:
    """Return the ratio of the time of torch's faster layout to our time in each round."""
    candidates = [measurement.ratios(title, OURS) for title in (PEER, LAST)]
    return min((ratios for ratios in candidates if ratios), key=median, default=[])


def table(measurements: list[Measurement], seed: int) -> str:
    """Return medians, and the ratio to torch's faster layout."""
    rows = []
    for measurement in measurements:
        rounds = rounds_beside_torch(measurement)
        times = [measurement.seconds.get(title) for title in (OURS, PEER, LAST)]
        cells = [duration(median(seconds)) if seconds else "-" for seconds in times]
        rows.append([measurement.task, *cells, f"{median(rounds):.3g}x" if rounds else "-"])
    return markdown([f"processor time, seed {seed}", OURS, PEER, LAST, "ratio"], rows)


def verdicts(
    measured: list[tuple[Work, Measurement]], count_of_fixed: int, absent: dict[str, str]
) -> list[Verdict]:
    """Judge each row by its goal, and the median rows of fixed and of drawn shapes."""
    missing = "torch is absent" if PEER in absent else ""
    rows = [
        (work, rounds)
        for work, measurement in measured
        if (rounds := rounds_beside_torch(measurement))
    ]
    judged = []
    for goal in sorted({work.goal for work, _ in measured}):
        group = {work.title: rounds for work, rounds in rows if work.goal == goal}
        title = f"every layer with goal {goal:g}, to torch's faster layout"
        judged.append(at_least(title, goal, group, missing))
    fixed = {work.title for work, _ in measured[:count_of_fixed]}
    for title, goal, is_fixed in (("fixed", MEDIAN, True), ("drawn", MEDIAN_OF_DRAWN, False)):
        medians = [median(rounds) for work, rounds in rows if (work.title in fixed) == is_fixed]
        label = f"the median layer of {title} shapes, to torch's faster layout"
        group = {f"{len(medians)} rows": medians} if medians else {}
        if count_of_fixed if is_fixed else len(measured) > count_of_fixed:
            judged.append(at_least(label, goal, group, missing))
    return judged


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = common_arguments("Time layers.", [1], PEER)
    add = parser.add_argument
    add("--works", nargs="*", choices=FIXED, default=list(FIXED), help="fixed layers, or none")
    add("--kinds", nargs="*", choices=KINDS, default=list(KINDS), help="drawn layers, or none")
    add("--seed", type=int, default=0, help="of the drawn shapes")
    return parser.parse_args()


def main() -> None:
    """Measure, check, print, write."""
    options = read_options()
    by_kind = drawn(options.seed)
    fixed = [FIXED[name] for name in options.works]
    works = [*fixed, *(work for kind in options.kinds for work in by_kind[kind])]
    measurements = []
    with Conductor(plan_of(options)) as conductor:
        both = [Contender(OURS, ours("flashlight_layer"), 1), *peers(options, conductor.absent)]
        for work in works:
            entrants = [entrant for entrant in both if work.has_images() or entrant.title != LAST]
            nbytes = 4 * sum(int(np.prod(shape)) for _, shape in work.inputs)
            measurement = Measurement(work.title, "float32", nbytes, 1)
            measurements.append(
                conductor.measure(Case(measurement, {"work": asdict(work)}), entrants)
            )
            check_that_all_compute_the_same(conductor.details)
    print(f"\n{table(measurements, options.seed)}")
    judged = verdicts([*zip(works, measurements, strict=True)], len(fixed), conductor.absent)
    conclude(options, conductor, measurements, judged)


if __name__ == "__main__":
    main()
