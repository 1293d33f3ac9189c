"""Optimizer steps next to NumPy and torch, on one thread.

    python benchmarks/optimizers.py --json optimizers.json

All contenders start from the same parameters and gradients. The results of the first step are
compared, so all
compute the same. The time is the processor time of the process. "NumPy" is this package without
csrc/optim. torch has two kinds of steps on a CPU: "fused", one pass over memory, and "foreach",
lists
of tensors.
"""

import argparse

import numpy as np

from harness.conductor import Case, Conductor, Contender
from harness.launchers import Library
from harness.options import common_arguments, installed, ours, plan_of
from harness.report import conclude, duration, markdown
from harness.roles.optimizer_works import RULES, WORKS
from harness.statistics import Measurement, median
from harness.verdicts import Verdict, at_least

OURS, NUMPY = "flashlight_py", "NumPy"
TORCH = {"torch, fused": "fused", "torch, foreach": "foreach"}
FUSED = next(iter(TORCH))


def contenders(options: argparse.Namespace, absent: dict[str, str]) -> list[Contender]:
    """Return the contenders; add torch to ``absent`` with the reason if it is not installed."""
    entrants = [
        Contender(OURS, ours("flashlight_optimizer"), 1),
        Contender(NUMPY, ours("flashlight_optimizer_in_numpy", NUMPY), 1),
    ]
    python = installed("torch", options, absent)
    if python is None:
        return entrants
    library = Library("torch", "torch_optimizer", python)
    return entrants + [
        Contender(title, library, 1, {"kind": kind}) for title, kind in TORCH.items()
    ]


def check_that_all_compute_the_same(results: dict[str, list[list[float]]]) -> None:
    """Compare the first elements of the parameters after the first step.

    Raises:
        RuntimeError: If they differ.
    """
    ours = np.array(results[OURS][0])
    for title, (result,) in results.items():
        if not np.allclose(ours, result, rtol=1e-5, atol=1e-6):
            raise RuntimeError(f"{OURS} and {title} compute different steps: {ours}, {result}")


def table(measurements: list[Measurement]) -> str:
    """Return medians, and the ratios of the peers' times to ours."""
    titles = [OURS, NUMPY, *TORCH]
    rows = []
    for measurement in measurements:
        cells = [measurement.task]
        for title in titles:
            seconds, ratios = measurement.seconds.get(title), measurement.ratios(title, OURS)
            ratio = f" ({median(ratios):.3g}x)" if ratios and title != OURS else ""
            cells.append(f"{duration(median(seconds))}{ratio}" if seconds else "-")
        rows.append(cells)
    return markdown(["processor time of a step", *titles], rows)


def verdicts(measurements: list[Measurement], absent: dict[str, str]) -> list[Verdict]:
    """Judge each row by torch's fused step if it exists, and by NumPy."""
    missing = "torch is absent" if "torch" in absent else ""
    torch = {measurement.task: measurement.ratios(FUSED, OURS) for measurement in measurements}
    numpy = {measurement.task: measurement.ratios(NUMPY, OURS) for measurement in measurements}
    return [
        at_least("a step, against torch's fused", 1.0, torch, missing),
        at_least("a step, against NumPy", 2.0, numpy),
    ]


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = common_arguments("Time steps of optimizers.", [1], "torch")
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS), help="which")
    parser.add_argument("--rules", nargs="+", choices=RULES, default=list(RULES), help="which")
    return parser.parse_args()


def main() -> None:
    """Measure, check, print, write."""
    options = read_options()
    measurements = []
    with Conductor(plan_of(options)) as conductor:
        entrants = contenders(options, conductor.absent)
        for work in options.works:
            size = sum(4 * int(np.prod(shape)) for shape in WORKS[work].shapes)
            for rule in options.rules:
                task = f"{rule}, {WORKS[work].title}"
                measurement = Measurement(task, "float32", size, 1)
                case = Case(measurement, {"work": work, "rule": rule})
                measurements.append(conductor.measure(case, entrants))
                check_that_all_compute_the_same(
                    {title: conductor.details[title] for title in measurement.seconds}
                )
    print(f"\n{table(measurements)}")
    conclude(options, conductor, measurements, verdicts(measurements, conductor.absent))


if __name__ == "__main__":
    main()
