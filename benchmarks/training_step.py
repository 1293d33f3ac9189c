"""One training step of the example: by hand, with this package, torch, torch DDP and JAX.

    python benchmarks/training_step.py --json training_step.json

What a step is, and that all start from the same numbers, stands in harness/roles/perceptron.py.
Everybody's first losses are compared with those of the step that is written by hand, so that
nobody wins by computing something else. Then all take turns, round by round, each in processes of
its own; medians of the rounds count. One thread per process. An epoch of N samples takes N steps on
one rank, and N / 2 on each of two.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from harness.conductor import Case, Conductor, Contender
from harness.environments import PEERS, python_of
from harness.facts import machine_facts
from harness.launchers import Library
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
from harness.step_targets import DDP, EXAMPLE, HAND_WRITTEN, OURS, on_ranks, verdicts

SAMPLES = 10_000  # of the example's epoch
PLAIN, DISTRIBUTED = {"kind": "plain"}, {"kind": "distributed"}


def contenders(options: argparse.Namespace, absent: dict[str, str]) -> list[Contender]:
    """Return who is measured, the reference first."""
    by_hand = Library(HAND_WRITTEN, "numpy_step", Path(sys.executable))
    package = ours("flashlight_step")
    found = [Contender(HAND_WRITTEN, by_hand, 1, PLAIN), Contender(OURS, package, 1, PLAIN)]
    found += [
        Contender(on_ranks(EXAMPLE, ranks), package, ranks, DISTRIBUTED)
        for ranks in sorted({1, *options.ranks})
    ]
    for name in filter(None, options.peers.split(",")):
        python = python_of(PEERS[name], options.environments)
        if isinstance(python, str):
            absent[PEERS[name].title] = python
        else:
            found += _peer(name, python, options.ranks)
    return found


def _peer(name: str, python: Path, ranks: list[int]) -> list[Contender]:
    if name == "jax":
        return [Contender("JAX, jit", Library("JAX", "jax_step", python), 1, PLAIN)]
    torch = Library("torch", "torch_step", python)
    several = [Contender(on_ranks(DDP, n), torch, n, DISTRIBUTED) for n in ranks]
    return [Contender("torch, eager", torch, 1, PLAIN), *several]


def check_that_all_compute_the_same(losses: dict[str, list[list[float]]]) -> None:
    """Compare the first losses of every contender's ranks with the reference's.

    Raises:
        RuntimeError: a contender computes something else.
    """
    reference = losses[HAND_WRITTEN][0]
    for title, of_ranks in losses.items():
        if not all(np.allclose(values, reference, rtol=1e-3, atol=1e-6) for values in of_ranks):
            raise RuntimeError(f"{title} computes other losses than hand-written NumPy")


def table(steps: Measurement, ranks: dict[str, int]) -> str:
    """Return the medians of a step and an epoch, and the ratio to the reference."""
    rows = []
    for title, seconds in steps.seconds.items():
        epoch = median(seconds) * SAMPLES / ranks[title]
        ratio = median(steps.ratios(title, HAND_WRITTEN) or [float("nan")])
        rows.append([title, duration(median(seconds)), duration(epoch), f"{ratio:.3g}"])
    return markdown(["batch 1", "a step", "an epoch", "a step / hand-written"], rows)


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = common_arguments("Time one training step of the example.", [2], "torch,jax")
    options = parser.parse_args()
    unknown = set(filter(None, options.peers.split(","))) - {"torch", "jax"}
    if unknown:
        parser.error(f"--peers: only torch and jax train; got {', '.join(sorted(unknown))}")
    return options


def main() -> None:
    """Measure, check, print, write."""
    options = read_options()
    machine = machine_facts()
    with Conductor(plan_of(options)) as conductor:
        entrants = contenders(options, conductor.absent)
        case = Case(Measurement("training step", "float32", 0, max(options.ranks)), {})
        steps = conductor.measure(case, entrants)
        check_that_all_compute_the_same(conductor.details)
    judged = verdicts(steps, conductor.absent)
    print("\n" + table(steps, {entrant.title: entrant.ranks for entrant in entrants}))
    print(f"\n{verdict_table(judged)}\n\n{facts_text(machine, conductor)}")
    print(left_out_text([steps], lambda m: m.task))
    if options.json:
        write_json(options.json, machine, conductor, [steps], judged)
    conductor.require(OURS)


if __name__ == "__main__":
    main()
