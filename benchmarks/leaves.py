"""Cost of the same bits on any number of ranks, and a check of the bits.

    python benchmarks/leaves.py --json leaves.json

A step of 4 x Linear(width) with a global batch and Adam runs leaf by leaf (``leaves=8``). Its peer
is
plain data-parallel training on the same number of ranks, in turns. On one rank the peer uses the
undivided
batch. There is one BLAS thread per rank. Then a small network with dropout is trained for 1,000
steps on 1 to 8
ranks over shared memory, over Gloo and on two simulated hosts, with SGD and Adam. All runs with one
optimizer must end with the same SHA-256 of the parameters.
"""

import argparse

from harness.conductor import Case, Conductor, Contender
from harness.options import common_arguments, ours, plan_of
from harness.report import conclude, duration, markdown
from harness.statistics import Measurement, median
from harness.step_targets import ranks_text
from harness.verdicts import Verdict, at_most

ROLE = "flashlight_leaves"
KINDS = {"plain": "data parallel", "leaves": "leaves=8"}
LAYERS = 4
ARRAYS = 9  # maximum, of the size of the parameters: moments, temporaries, rows of gradients
BITS = {"kind": "bits", "widths": [12, 32, 3], "batch": 37}
WORLDS = {
    "shared memory": {"BACKEND": "shm"},
    "Gloo": {"BACKEND": "gloo"},
    "2 hosts": {"hosts": "2"},
}


def title(ranks: int, kind: str) -> str:
    """Return the title of a contender."""
    return f"{ranks_text(ranks)}, {KINDS[kind]}"


def contenders(ranks: list[int]) -> list[Contender]:
    """Return both kinds of steps for each number of ranks."""
    return [
        Contender(title(count, kind), ours(ROLE), count, {"kind": kind})
        for count in ranks
        for kind in KINDS
    ]


def trained(options: argparse.Namespace, optimizer: str) -> tuple[Case, list[Contender]]:
    """Return the contenders that train for some steps in each kind of world."""
    results = []
    for world, params in WORLDS.items():
        for ranks in (4,) if world == "2 hosts" else options.bits_ranks:
            library = ours(ROLE, f"flashlight_py, {world}", **params) if ranks > 1 else ours(ROLE)
            name = f"{world}, {ranks_text(ranks)}"
            if ranks > 1 or world == "shared memory":
                results.append(Contender(name, library, ranks))
    measurement = Measurement(f"bits, {optimizer}", "float32", 0, max(options.bits_ranks))
    return Case(measurement, {**BITS, "optimizer": optimizer, "steps": options.steps}), results


def table(steps: Measurement, ranks: list[int]) -> str:
    """Return the medians of a step, and the cost of leaves."""
    rows = []
    for count in ranks:
        plain, leaves = (title(count, kind) for kind in KINDS)
        if {plain, leaves} <= steps.seconds.keys():
            cost = f"{median(steps.ratios(leaves, plain)):.3g}"
            times = [duration(median(steps.seconds[series])) for series in (plain, leaves)]
            rows.append([ranks_text(count), *times, cost])
    return markdown(["", *KINDS.values(), "leaves / data parallel"], rows)


def bits_text(digests: dict[str, dict[str, str]], steps: int) -> tuple[str, Verdict]:
    """Return the SHA-256 values of each optimizer's runs, and whether they are equal."""
    lines = []
    for optimizer, of_worlds in digests.items():
        different = sorted(set(of_worlds.values()))
        lines.append(
            f"{optimizer}: {len(of_worlds)} runs, {len(different)} SHA-256 value(s): "
            f"{', '.join(value[:16] for value in different)}"
        )
    one = all(len(set(by_ranks.values())) == 1 for by_ranks in digests.values())
    runs = sum(map(len, digests.values()))
    target = f"one SHA-256 for each optimizer after {steps} steps"
    return "\n".join(lines), Verdict(target, "1 value", f"{runs} runs", one if runs else None)


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = common_arguments("Time training steps leaf by leaf.", [1, 8], "")
    add = parser.add_argument
    add("--width", type=int, default=1024, help="of the layers")
    add("--batch", type=int, default=1024, help="samples of the global batch")
    add("--steps", type=int, default=1000, help="after which bits are compared")
    add("--bits-ranks", type=int, nargs="+", default=list(range(1, 9)), help="that train for bits")
    return parser.parse_args()


def main() -> None:
    """Measure, compare, print, write."""
    options = read_options()
    widths = [options.width] * (LAYERS + 1)
    parameters = 4 * LAYERS * options.width**2
    digests: dict[str, dict[str, str]] = {}
    with Conductor(plan_of(options)) as conductor:
        measurement = Measurement("training step", "float32", parameters, max(options.ranks))
        task = {"widths": widths, "batch": options.batch, "optimizer": "Adam"}
        case = Case(measurement, task, ARRAYS * parameters)
        steps = conductor.measure(case, contenders(options.ranks))
        measured = [steps]
        for optimizer in ("SGD", "Adam"):
            trains, worlds = trained(options, optimizer)
            measured.append(conductor.measure(trains, worlds))
            digests[optimizer] = {
                f"{name}, rank {rank}": digest
                for name, answers in conductor.details.items()
                for rank, digest in enumerate(answers)
            }
    text, same = bits_text(digests, options.steps)
    bounds = {count: 1.6 if count == 1 else 1.03 for count in options.ranks}
    judged = [
        at_most(
            f"leaves=8 against {'the uncut batch' if n == 1 else 'data parallel'}, {ranks_text(n)}",
            bound,
            {"a step": steps.ratios(title(n, "leaves"), title(n, "plain"))},
        )
        for n, bound in bounds.items()
        if n in (1, 8)
    ]
    print(f"\n{LAYERS} x Linear({options.width}), batch {options.batch}, Adam\n")
    print(f"{table(steps, options.ranks)}\n\n{text}")
    conclude(options, conductor, measured, [*judged, same])


if __name__ == "__main__":
    main()
