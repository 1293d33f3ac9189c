"""Bytes, time and loss of the communication hooks.

    python benchmarks/compression.py --json compression.json

Two problems run with all hooks in turn. The first is a perceptron of 3 million parameters (width
1024, batch
64, SGD with momentum, one BLAS thread per rank). Its step is timed in shared memory, which shows
the
computation of a hook, and through Gloo over loopback TCP. The second is the problem of
examples/DistributedTraining.py. It is trained for some epochs with each hook from the same start
with the same samples; the result is the mean loss of the last epoch.

"Pays below" is the speed of a network between 2 ranks at which the saved bytes take as long as the
computation of the hook in shared memory: (bytes saved) / (seconds added). On a faster network the
hook makes steps slower.
"""

import argparse
import itertools
from dataclasses import dataclass, replace
from typing import Any

from harness.conductor import Case, Conductor, Contender, Plan
from harness.facts import machine_facts
from harness.options import common_arguments, ours, plan_of
from harness.report import duration, facts_text, markdown, write_json
from harness.statistics import Measurement, median

WIDTH, QUICK_WIDTH, BATCH = 1024, 64, 64
EPOCHS, SAMPLES = 5, 10_000  # of the example
ARRAYS = 6  # of the size of the parameters: parameters, gradients, momentum, temporaries, residuals
LONG = Plan(rounds=9, batch_seconds=0.5, case_seconds=120.0)
BRIEF = Plan(rounds=3, batch_seconds=1e-4, case_seconds=1.0)
NONE = "no hook"
HOOKS: dict[str, list[Any] | None] = {
    NONE: None,
    "Float16": ["Float16Compression", {}],
    "Bfloat16": ["Bfloat16Compression", {}],
    "PowerSGD, rank 2": ["PowerSGDCompression", {"rank": 2}],
    "PowerSGD, rank 4": ["PowerSGDCompression", {"rank": 4}],
}
MOMENTA = (0.9, 0.0)
BACKENDS = {"auto": "shared memory", "gloo": "Gloo"}


@dataclass(frozen=True)
class Reported:
    """Numbers that the ranks report for one hook: bytes of a step, and the last loss."""

    nbytes: int
    loss: float = float("nan")


def contenders(backend: str, ranks: int) -> list[Contender]:
    """Return every hook on the same ranks."""
    library = ours("flashlight_compression", f"flashlight_py, {BACKENDS[backend]}", BACKEND=backend)
    return [Contender(title, library, ranks, {"hook": hook}) for title, hook in HOOKS.items()]


def large_case(width: int, ranks: int, backend: str) -> Case:
    """Return the step that is timed, with 3 * width**2 weights."""
    widths = [width // 2, width, width, width, width // 2]
    weights = sum(a * b for a, b in itertools.pairwise(widths))
    measurement = Measurement(f"step, {BACKENDS[backend]}", "float32", 4 * weights, ranks)
    task = {"problem": "large", "widths": widths, "batch": BATCH}
    return Case(measurement, task, ARRAYS * len(HOOKS) * 4 * weights // ranks)


def example_case(options: argparse.Namespace, ranks: int, momentum: float) -> Case:
    """Return one more epoch of the example. Its time is not used."""
    task = {"problem": "example", "samples": options.samples, "momentum": momentum}
    return Case(Measurement(f"the example, momentum {momentum:g}", "float32", 0, ranks), task)


def train_example(options: argparse.Namespace, ranks: int) -> dict[float, dict[str, Reported]]:
    """Return the numbers that the ranks reported after the last epoch, by momentum."""
    reported = {}
    with Conductor(BRIEF) as conductor:
        for momentum in MOMENTA:
            for _ in range(options.epochs):
                case = example_case(options, ranks, momentum)
                _, reported[momentum] = measure(conductor, case, "auto", ranks)
    return reported


def measure(
    conductor: Conductor, case: Case, backend: str, ranks: int
) -> tuple[Measurement, dict[str, Reported]]:
    """Time every hook, and return the numbers that the ranks reported.

    Raises:
        RuntimeError: If a hook failed, or the ranks of a hook reported different numbers.
    """
    result = conductor.measure(case, contenders(backend, ranks))
    if set(HOOKS) - set(result.seconds):
        raise RuntimeError(f"{result.task}: {result.left_out or conductor.absent}")
    reported = {}
    for title, details in conductor.details.items():
        if any(detail != details[0] for detail in details):
            raise RuntimeError(f"{title}: the ranks' bytes or losses differ: {details}")
        reported[title] = Reported(details[0]["bytes"], details[0].get("loss", float("nan")))
    return result, reported


def step_table(steps: dict[str, Measurement], reported: dict[str, Reported]) -> str:
    """Return bytes and times of the large problem, one row for each hook."""
    names = [BACKENDS[backend] for backend in steps]
    heads = [f"{column}, {name}" for name in names for column in ("a step", "to no hook")]
    rows = []
    for title, of_hook in reported.items():
        sizes = [f"{of_hook.nbytes / 1e3:,.0f}", f"{of_hook.nbytes / reported[NONE].nbytes:.2%}"]
        times = [cell for m in steps.values() for cell in _times(m, title)]
        rows.append([title, *sizes, *times, _pays_below(steps["auto"], title, reported)])
    return markdown(["hook", "kB a step", "of no hook", *heads, "pays below"], rows)


def _times(steps: Measurement, title: str) -> list[str]:
    ratio = median(steps.ratios(title, NONE))
    return [duration(median(steps.seconds[title])), f"{ratio:.2f}x"]


def _pays_below(steps: Measurement, title: str, reported: dict[str, Reported]) -> str:
    """Return the network speed at which the hook neither wins nor loses."""
    if title == NONE:
        return "-"
    saved = reported[NONE].nbytes - reported[title].nbytes
    added = (median(steps.ratios(title, NONE)) - 1) * median(steps.seconds[NONE])
    return f"{8 * saved / added / 1e9:.2g} Gbit/s" if added > 0 else "any speed"


def loss_table(reported: dict[float, dict[str, Reported]]) -> str:
    """Return bytes and the last loss of the example, one row for each hook."""
    heads = [f"{column}, momentum {m:g}" for m in reported for column in ("loss", "to no hook")]
    rows = []
    for title, of in next(iter(reported.values())).items():
        cells = []
        for by_hook in reported.values():
            loss, exact = by_hook[title].loss, by_hook[NONE].loss
            cells += [f"{loss:.4g}", f"{loss / exact:.3f}x"]
        rows.append([title, str(of.nbytes), *cells])
    return markdown(["the example", "bytes a step", *heads], rows)


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = common_arguments("Measure the communication hooks.", [2], "")
    parser.add_argument("--width", type=int, help=f"of the hidden layers, default {WIDTH}")
    parser.add_argument("--samples", type=int, help=f"of the example, default {SAMPLES}")
    parser.add_argument("--epochs", type=int, help=f"of the example, default {EPOCHS}")
    options = parser.parse_args()
    if len(options.ranks) > 1:
        parser.error(
            "--ranks: expected one number; run the script again for another number of ranks"
        )
    defaults = (QUICK_WIDTH, 200, 1) if options.quick else (WIDTH, SAMPLES, EPOCHS)
    for name, default in zip(("width", "samples", "epochs"), defaults, strict=True):
        setattr(options, name, getattr(options, name) or default)
    return options


def main() -> None:
    """Measure, print, write."""
    options = read_options()
    ranks, machine = options.ranks[0], machine_facts()
    plan = plan_of(options) if options.quick else replace(LONG, rounds=options.rounds or 9)
    steps = {}
    with Conductor(plan) as conductor:
        for backend in BACKENDS:
            case = large_case(options.width, ranks, backend)
            steps[backend], of_step = measure(conductor, case, backend, ranks)
    of_examples = train_example(options, ranks)
    print(f"\n{ranks} ranks, {steps['auto'].nbytes / 4e6:.3g} million parameters, batch {BATCH}\n")
    print(f"{step_table(steps, of_step)}\n")
    print(f"{options.epochs} epochs of the example, {options.samples} samples\n")
    print(f"{loss_table(of_examples)}\n\n{facts_text(machine, conductor)}")
    if options.json:
        write_json(options.json, machine, conductor, list(steps.values()), [])


if __name__ == "__main__":
    main()
