"""A training step of TAGI networks next to pytagi, and on two ranks next to one rank.

    python benchmarks/tagi.py --json tagi.json

Both libraries start from the same parameters and learn from the same batch. The outputs of the
first
steps are compared, so both compute the same. Each library has one thread, and the time is the
processor
time of the process. pytagi does not run on several CPUs, so two ranks are compared by wall-clock
time
with one rank of this package. The ranks share a batch and add their updates
(``DDPSequential(average=False)``).
"""

import argparse

import numpy as np

from harness.conductor import Case, Conductor, Contender
from harness.environments import PEERS, libraries_of, python_of
from harness.launchers import Library
from harness.options import common_arguments, ours, plan_of
from harness.report import conclude, duration, markdown
from harness.roles.tagi_works import WORKS
from harness.statistics import Measurement, median
from harness.step_targets import on_ranks
from harness.verdicts import Verdict, at_least

OURS, PEER = "flashlight_py", "pytagi"
# Least ratio of pytagi's processor time to ours on one thread.
FASTER = {"mlp-16": 8.0, "mlp-64": 16.0, "cnn-16": 14.0, "resnet-4": 25.0}
SHARED, SPEEDUP = "mlp-256", 1.5  # two ranks against one rank, by wall-clock time


def peers(options: argparse.Namespace, absent: dict[str, str]) -> list[Contender]:
    """Return pytagi if it is selected and installed; otherwise add the reason to ``absent``."""
    if PEER not in options.peers.split(","):
        return []
    peer = PEERS[PEER]
    python = python_of(peer, options.environments)
    if isinstance(python, str):
        absent[peer.title] = python
        return []
    library = Library(PEER, "pytagi_step", python, libraries=libraries_of(peer, python))
    return [Contender(PEER, library, 1)]


def measure(options: argparse.Namespace, conductor: Conductor) -> dict[str, Measurement]:
    """Return the times of all contenders for each network."""
    package = ours("flashlight_tagi")
    alone = [*peers(options, conductor.absent), Contender(OURS, package, 1)]
    together = [Contender(on_ranks(OURS, n), package, n) for n in sorted({1, *options.ranks})]
    measurements = {}
    for name in options.works:
        shared = name == SHARED
        entrants = together if shared else alone
        ranks = max(entrant.ranks for entrant in entrants)
        task = {"work": name, "clock": "wall" if shared else "cpu"}
        measurement = Measurement(label(name), "float32", 0, ranks)
        measurements[name] = conductor.measure(Case(measurement, task), entrants)
        if not shared:
            check_that_both_compute_the_same(conductor.details)
    return measurements


def check_that_both_compute_the_same(outputs: dict[str, list[list[list[float]]]]) -> None:
    """Compare the outputs of the first steps.

    Raises:
        RuntimeError: If they differ.
    """
    if not {OURS, PEER} <= set(outputs):
        return
    ours, real = (np.array(outputs[title][0]) for title in (OURS, PEER))
    if not np.allclose(ours, real, rtol=1e-2, atol=1e-3 * np.abs(real).max()):
        raise RuntimeError(f"{OURS} and {PEER} compute different outputs: {ours}, {real}")


def label(name: str) -> str:
    """Return the name of a row."""
    work = WORKS[name]
    return f"{work.title}, batch {work.batch}"


def table(measurements: dict[str, Measurement]) -> str:
    """Return medians next to pytagi, and the ratios."""
    rows = []
    for name, measurement in measurements.items():
        if name != SHARED:
            ratios = measurement.ratios(PEER, OURS)
            times = [measurement.seconds.get(title) for title in (PEER, OURS)]
            cells = [duration(median(seconds)) if seconds else "-" for seconds in times]
            rows.append([label(name), *cells, f"{median(ratios):.3g}x" if ratios else "-"])
    return markdown(["processor time of a step", PEER, OURS, "ratio"], rows)


def table_of_ranks(measurement: Measurement) -> str:
    """Return medians of ranks that share a batch."""
    one = on_ranks(OURS, 1)
    rows = []
    for title, seconds in measurement.seconds.items():
        ratios = measurement.ratios(one, title)
        rows.append([title, duration(median(seconds)), f"{median(ratios):.3g}x" if ratios else "-"])
    return markdown([f"{label(SHARED)} in all", "a step", "against 1 rank"], rows)


def verdicts(measurements: dict[str, Measurement], absent: dict[str, str]) -> list[Verdict]:
    """Judge each network that was measured."""
    missing = f"{PEER} is absent" if PEER in absent else ""
    judged = []
    for name, measurement in measurements.items():
        if name == SHARED:
            rounds = measurement.ratios(on_ranks(OURS, 1), on_ranks(OURS, 2))
            target = f"{label(name)}, 2 ranks against 1"
            judged.append(at_least(target, SPEEDUP, {"a step": rounds}))
        else:
            rounds = measurement.ratios(PEER, OURS)
            target = f"{label(name)}, against {PEER} on one thread"
            judged.append(at_least(target, FASTER[name], {"a step": rounds}, missing))
    return judged


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = common_arguments("Time steps of TAGI networks.", [2], PEER)
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS), help="which")
    return parser.parse_args()


def main() -> None:
    """Measure, check, print, write."""
    options = read_options()
    with Conductor(plan_of(options)) as conductor:
        measurements = measure(options, conductor)
    print(f"\n{table(measurements)}")
    if SHARED in measurements:
        print(f"\n{table_of_ranks(measurements[SHARED])}")
    conclude(options, conductor, measurements.values(), verdicts(measurements, conductor.absent))


if __name__ == "__main__":
    main()
