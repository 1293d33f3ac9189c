"""Layers next to torch's layers, forward and backward, on one thread.

    python benchmarks/layers.py --json layers.json

Both libraries start from the same parameters, inputs and gradients of results. Their results and
gradients are compared, so both compute the same. The time is the processor time of the process.
torch
has two layouts of images; the faster layout counts.
"""

import argparse

import numpy as np

from harness.conductor import Case, Conductor, Contender
from harness.launchers import Library
from harness.options import common_arguments, installed, ours, plan_of
from harness.report import conclude, duration, markdown
from harness.roles.layer_works import WORKS
from harness.statistics import Measurement, median
from harness.verdicts import Verdict, at_least

OURS, PEER = "flashlight_py", "torch"
LAST = "torch, channels last"
EVERY_ROW, MEDIAN = 0.8, 1.0


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
            if not np.allclose(a, b, rtol=1e-3, atol=1e-3 * np.abs(b).max()):
                raise RuntimeError(f"{OURS} and {title} compute different layers: {a}, {b}")


def rounds_beside_torch(measurement: Measurement) -> list[float]:
    """Return the ratio of the time of torch's faster layout to our time in each round."""
    candidates = [measurement.ratios(title, OURS) for title in (PEER, LAST)]
    return min((ratios for ratios in candidates if ratios), key=median, default=[])


def table(measurements: list[Measurement]) -> str:
    """Return medians, and the ratio to torch's faster layout."""
    rows = []
    for measurement in measurements:
        rounds = rounds_beside_torch(measurement)
        times = [measurement.seconds.get(title) for title in (OURS, PEER, LAST)]
        cells = [duration(median(seconds)) if seconds else "-" for seconds in times]
        rows.append([measurement.task, *cells, f"{median(rounds):.3g}x" if rounds else "-"])
    return markdown(["processor time, forward and backward", OURS, PEER, LAST, "ratio"], rows)


def verdicts(measurements: list[Measurement], absent: dict[str, str]) -> list[Verdict]:
    """Judge each row, and the median row."""
    missing = "torch is absent" if PEER in absent else ""
    rows = {
        measurement.task: rounds
        for measurement in measurements
        if (rounds := rounds_beside_torch(measurement))
    }
    medians = [median(rounds) for rounds in rows.values()]
    return [
        at_least("every layer, to torch's faster layout", EVERY_ROW, rows, missing),
        at_least(
            "the median layer, to torch's faster layout",
            MEDIAN,
            {f"{len(rows)} rows": medians} if rows else {},
            missing,
        ),
    ]


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = common_arguments("Time layers.", [1], PEER)
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS), help="which")
    return parser.parse_args()


def main() -> None:
    """Measure, check, print, write."""
    options = read_options()
    measurements = []
    with Conductor(plan_of(options)) as conductor:
        both = [Contender(OURS, ours("flashlight_layer"), 1), *peers(options, conductor.absent)]
        for name in options.works:
            work = WORKS[name]
            has_layouts = len(work.shape) == 4
            entrants = [entrant for entrant in both if has_layouts or entrant.title != LAST]
            measurement = Measurement(work.title, "float32", 4 * int(np.prod(work.shape)), 1)
            measurements.append(conductor.measure(Case(measurement, {"work": name}), entrants))
            check_that_all_compute_the_same(conductor.details)
    print(f"\n{table(measurements)}")
    conclude(options, conductor, measurements, verdicts(measurements, conductor.absent))


if __name__ == "__main__":
    main()
