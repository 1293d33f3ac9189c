"""Training steps: captured and eager, next to hand-written NumPy, JAX, torch and torch DDP.

    python benchmarks/training_step.py --json training_step.json --plot training_step.png

harness/roles/perceptron.py defines a step and its start values; harness/step_cases.py lists the
cases. The first losses of each contender are compared with the hand-written step, so all compute
the
same. Then the contenders take turns in rounds, each library in its own processes; medians of the
rounds
count. Each process has one thread. ``--parts`` selects:

steps: small networks next to all peers, and the time of the first calls of a new step.
functions: elementwise operations and reductions, such as layer norm, next to NumPy.
grid: three layers of each width (--layers) with each batch, next to NumPy.
training: the example from start to end, with its own script on 2 ranks.
"""

import argparse
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from harness.conductor import Conductor
from harness.options import common_arguments, plan_of
from harness.plot import plot_grid
from harness.report import conclude, duration, markdown
from harness.statistics import Measurement, median
from harness.step_cases import (
    WORKS,
    Pythons,
    Work,
    case_of,
    contenders,
    grid_work,
    measure_functions,
    pythons_of,
)
from harness.step_targets import CAPTURED, EAGER, HAND_WRITTEN, RECORDS, TRAINING, TWENTY, verdicts
from harness.whole_training import train

PARTS = ("steps", "functions", "grid", "training")
WIDTHS, BATCHES = (1, 4, 16, 64, 256, 1024, 4096), (1, 8, 64, 256, 1024)
QUICK_WIDTHS, QUICK_BATCHES = (1, 64), (1, 64)
SHAPES, QUICK_SHAPES = [(8, 16), (64, 64), (64, 512), (512, 2048)], [(8, 16)]  # shapes of functions
EPOCHS, TURNS = 100, 3  # of the whole training
MOST_OPERATIONS = 1e11  # operations of a step in the grid: one or two seconds of a core

Cell = tuple[int, int]


def measure(
    conductor: Conductor, work: Work, ranks: list[int], pythons: Pythons
) -> tuple[Measurement, Mapping[str, Any]]:
    """Return the times of a step and the reports of the contenders, after a check of their
    losses."""
    steps = conductor.measure(case_of(work, max(ranks)), contenders(work, ranks, pythons))
    check_that_all_compute_the_same(work.title, conductor.details)
    return steps, conductor.details


def check_that_all_compute_the_same(work: str, details: Mapping[str, Any]) -> None:
    """Compare the first losses of the ranks of all contenders with the reference.

    Raises:
        RuntimeError: If a contender computes other losses.
    """
    reference = details[HAND_WRITTEN][0]["losses"] if details else []
    for title, of_ranks in details.items():
        for answer in of_ranks:
            if not np.allclose(answer["losses"], reference, rtol=1e-3, atol=1e-6):
                raise RuntimeError(f"{work}: {title} has other losses than hand-written NumPy")


def measure_grid(conductor: Conductor, options: argparse.Namespace) -> dict[Cell, Measurement]:
    """Return the times of each cell; cells with too many operations are left out."""
    measurements = {}
    for width, batch in itertools.product(options.widths, options.batches):
        work = grid_work(width, batch, options.layers)
        if work.recipe.operations > options.most_operations:
            left_out = case_of(work, 1).measurement
            left_out.left_out["all"] = f"more than {options.most_operations:g} operations a step"
            measurements[width, batch] = left_out
        else:
            measurements[width, batch], _ = measure(conductor, work, [1], {})
    return measurements


def first_calls(details: Mapping[str, Any]) -> Measurement:
    """Return the times of the first calls of new steps."""
    measurement = Measurement(f"{TWENTY}, first calls", "float32", 0, 1)
    for title, answers in details.items():
        for call, seconds in zip(RECORDS, zip(*answers[0]["calls"], strict=True), strict=True):
            measurement.seconds[f"{title}, {call}"] = list(seconds)
    return measurement


def measure_training(epochs: int, turns: int) -> Measurement:
    """Return the times of the example: captured and eager, in turn.

    Raises:
        RuntimeError: If it fails, or the captured run and the eager run end with different losses.
    """
    measurement = Measurement(TRAINING.replace("100", f"{epochs}", 1), "float32", 0, 2)
    for _ in range(turns):
        losses = []
        for title in (CAPTURED, EAGER):
            done = train(2, epochs, title == CAPTURED)
            measurement.seconds.setdefault(title, []).append(done.seconds)
            measurement.seconds.setdefault(f"{title}, epochs alone", []).append(done.epochs)
            losses.append(done.loss)
        if not np.allclose(losses, losses[0], rtol=1e-3):
            raise RuntimeError(f"the example ends with {losses[0]} captured, else {losses[1]}")
    return measurement


def table(measurements: list[Measurement]) -> str:
    """Return the medians, and the ratio of each peer's time to ours."""
    rows = []
    for steps in measurements:
        for title, seconds in steps.seconds.items():
            ratios = [steps.ratios(*pair) for pair in ((HAND_WRITTEN, title), (title, CAPTURED))]
            texts = [f"{median(rounds):.3g}x" if rounds else "-" for rounds in ratios]
            rows.append([steps.task, title, duration(median(seconds)), *texts])
    return markdown(["", "", "a step", "as fast as hand-written NumPy", "captured is faster"], rows)


def medians(grid: Mapping[Cell, Measurement], of: str, to: str) -> dict[Cell, float]:
    """Return the median ratio of each cell that was measured."""
    rounds = {cell: steps.ratios(of, to) for cell, steps in grid.items()}
    return {cell: median(ratios) for cell, ratios in rounds.items() if ratios}


def grid_text(grid: Mapping[Cell, Measurement]) -> str:
    """Return a table of ratios for each reference, with the smallest ratio and the median."""
    batches = sorted({batch for _, batch in grid})
    texts = []
    for reference in (HAND_WRITTEN, EAGER):
        ratios = medians(grid, reference, CAPTURED)
        rows = [
            [str(width), *(f"{ratios[width, b]:.3g}" if (width, b) in ratios else "-"
                           for b in batches)]
            for width in sorted({width for width, _ in grid})
        ]  # fmt: skip
        values = list(ratios.values()) or [float("nan")]
        texts.append(
            f"{reference}'s time to the captured step's: smallest {min(values):.3g}, "
            f"median {median(values):.3g}\n\n"
            + markdown(["width", *(f"batch {batch}" for batch in batches)], rows)
        )
    return "\n\n".join(texts)


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = common_arguments("Time training steps, captured and eager.", [2], "torch,jax")
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=PARTS)
    add("--widths", type=int, nargs="+", help="of the grid")
    add("--batches", type=int, nargs="+", help="of the grid")
    add("--layers", type=int, default=3, help="of the grid")
    add("--most-operations", type=float, default=MOST_OPERATIONS, help="of a step in the grid")
    add("--epochs", type=int, help="of the whole training")
    add("--plot", type=Path, metavar="FILE.png", help="draw the grid")
    options = parser.parse_args()
    unknown = set(filter(None, options.peers.split(","))) - {"torch", "jax"}
    if unknown:
        parser.error(f"--peers: only torch and jax train; got {', '.join(sorted(unknown))}")
    quick = options.quick
    options.widths = options.widths or (QUICK_WIDTHS if quick else WIDTHS)
    options.batches = options.batches or (QUICK_BATCHES if quick else BATCHES)
    options.epochs = options.epochs or (1 if quick else EPOCHS)
    return options


def main() -> None:
    """Measure, check, print, write."""
    options = read_options()
    works: dict[str, Measurement] = {}
    grid: dict[Cell, Measurement] = {}
    functions: list[Measurement] = []
    recording = training = None
    with Conductor(plan_of(options)) as conductor:
        if "steps" in options.parts:
            pythons = pythons_of(options, conductor.absent)
            for work in WORKS:
                works[work.title], details = measure(conductor, work, options.ranks, pythons)
                if work.title == TWENTY:
                    recording = first_calls(details)
        if "grid" in options.parts:
            grid = measure_grid(conductor, options)
    if "functions" in options.parts:
        with Conductor(plan_of(options)) as others:  # the same titles with another meaning
            functions = measure_functions(others, QUICK_SHAPES if options.quick else SHAPES)
    if "training" in options.parts:
        training = measure_training(options.epochs, 1 if options.quick else TURNS)
    judged = verdicts(works, [*functions, *grid.values()], recording, training, conductor.absent)
    single = [m for m in (*works.values(), *functions, recording, training) if m is not None]
    print(f"\n{table(single)}\n")
    print(f"{grid_text(grid)}\n" if grid else "")
    if options.plot and grid:
        title = f"{options.machine['CPU']}, {options.layers} layers"
        plot_grid(medians(grid, HAND_WRITTEN, CAPTURED), title, options.plot)
    conclude(options, conductor, [*single, *grid.values()], judged)


if __name__ == "__main__":
    main()
