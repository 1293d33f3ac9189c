"""Share of the communication of a large model that remains visible in its training step.

    python benchmarks/overlap.py --json overlap.json

The model is a perceptron of 50 million parameters (width 4096), batch 64, SGD with momentum. Each
rank has one
BLAS thread. Four contenders take turns: one rank; several ranks without communication, which shows
the
cost of shared memory bandwidth; several ranks that reduce gradients during the backward pass; and
several ranks that reduce gradients after it.

    python benchmarks/overlap.py --device cuda --trace trace.json.gz

uses CuPy arrays (width 2048, batch 16384), and writes a trace of rank 0's GPU in three overlapped
steps, recorded by torch's profiler.
"""

import argparse
import itertools
from dataclasses import replace
from pathlib import Path

from harness.conductor import Case, Conductor, Contender, Plan
from harness.gpu import require_all, require_gpu
from harness.options import common_arguments, ours, plan_of
from harness.report import duration, facts_text, left_out_text, markdown, verdict_table, write_json
from harness.statistics import Measurement, median
from harness.step_targets import overlap_verdict, ranks_text
from harness.verdicts import Verdict, at_most

# Width and batch. On a GPU, a product of the CPU's size ends before NCCL starts.
SIZES = {"cpu": (4096, 64), "cuda": (2048, 16384)}
QUICK_WIDTH = 256
OVERLAPPED, NO_TRACE = "overlapped", "No trace"
ALONE = "1 rank"
KINDS = {"no communication": "alone", OVERLAPPED: "overlap", "after the backward pass": "after"}
ARRAYS = 5  # of the size of the parameters: parameters, gradients, momentum, temporaries, buckets
LONG = Plan(rounds=7, batch_seconds=1.0, case_seconds=120.0)


def contenders(ranks: list[int]) -> list[Contender]:
    """Return one rank, and each kind of step on several ranks."""
    library = ours("flashlight_mlp")
    entrants = [Contender(ALONE, library, 1, {"kind": "alone"})]
    for count in ranks:
        entrants += [
            Contender(f"{ranks_text(count)}, {title}", library, count, {"kind": kind})
            for title, kind in KINDS.items()
        ]
    return entrants


def traced(case: Case, ranks: int, conductor: Conductor, file: Path) -> str:
    """Return the summary of a trace of overlapped steps on ``ranks`` ranks. It is not timed."""
    title = f"{ranks_text(ranks)}, traced"
    task = {"kind": "overlap", "trace": str(file)}
    measurement = Measurement("trace", "float32", case.measurement.nbytes, ranks)
    conductor.measure(
        Case(measurement, case.task, case.memory),
        [Contender(title, ours("flashlight_mlp"), ranks, task)],
    )
    details = conductor.details.get(title, [measurement.left_out.get(title, "the ranks are gone")])
    return trace_text(details[0])


def case_of(width: int, batch: int, ranks: list[int], device: str) -> Case:
    """Return the case: about 3 * width**2 parameters."""
    widths = [width // 2, width, width, width, width // 2]
    weights = sum(a * b for a, b in itertools.pairwise(widths))
    measurement = Measurement("training step", "float32", 4 * weights, max(ranks))
    task = {"widths": widths, "batch": batch, "device": device}
    return Case(measurement, task, ARRAYS * 4 * weights)


def table(steps: Measurement, ranks: list[int]) -> str:
    """Return the medians, and the ratios to one rank and to a step without communication."""
    rows = []
    for title, seconds in steps.seconds.items():
        count = title.split(",")[0]
        cells = [_beyond(steps, title, ALONE), _beyond(steps, title, f"{count}, no communication")]
        rows.append([title, duration(median(seconds)), *cells])
    return markdown(["", "a step", "beyond 1 rank", "beyond no communication"], rows)


def _beyond(steps: Measurement, title: str, reference: str) -> str:
    rounds = steps.ratios(title, reference)
    return f"{100 * (median(rounds) - 1):+.1f} %" if rounds and title != reference else "-"


def keep_whole_rounds(steps: Measurement) -> None:
    """Drop the round that an interrupt ended, because ratios are computed within rounds."""
    complete = min(map(len, steps.seconds.values()), default=0)
    steps.seconds = {
        title: rounds[:complete] for title, rounds in steps.seconds.items() if complete
    }


def trace_text(overlap: dict[str, float] | str) -> str:
    """Return the summary of a trace as a sentence."""
    if isinstance(overlap, str):
        return f"{NO_TRACE}: {overlap}."
    reducing, computing, both = overlap.values()
    if not computing:
        return f"{NO_TRACE}: the profiler has recorded no kernels."
    share = 100 * both / reducing if reducing else 0.0
    return (
        f"In a step rank 0's GPU reduces for {duration(reducing)} and computes for "
        f"{duration(computing)}; for {duration(both)} it does both, {share:.0f} % of the reduction."
    )


def verdicts(steps: Measurement, ranks: list[int], device: str) -> list[Verdict]:
    """Judge the steps: on the CPU against one rank, on a shared GPU against steps without
    overlap."""
    titles = {ranks_text(n): f"{ranks_text(n)}, {OVERLAPPED}" for n in ranks}
    if device == "cpu":
        return [overlap_verdict(steps, ALONE, title) for title in titles.values()]
    rounds = {
        count: steps.ratios(title, f"{count}, after the backward pass")
        for count, title in titles.items()
    }
    return [at_most("overlapped, against after the backward pass", 1.0, rounds)]


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = common_arguments("Time a large model's step with and without overlap.", [2], "")
    add = parser.add_argument
    add("--width", type=int, help="of the hidden layers; default: by the device")
    add("--batch", type=int, help="samples of a step on each rank; default: by the device")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: CuPy arrays, by NCCL")
    add("--trace", type=Path, metavar="FILE.json.gz", help="of the kernels, with --device cuda")
    options = parser.parse_args()
    if options.trace and options.device == "cpu":
        parser.error("--trace needs a GPU: add --device cuda")
    return options


def main() -> None:
    """Measure, print, write."""
    options = read_options()
    if options.device == "cuda":
        require_gpu()
    width, batch = SIZES[options.device]
    width = options.width or (QUICK_WIDTH if options.quick else width)
    batch = options.batch or batch
    plan = plan_of(options)
    if not options.quick:
        seconds = options.batch_seconds or LONG.batch_seconds
        plan = replace(LONG, rounds=options.rounds or LONG.rounds, batch_seconds=seconds)
    machine = options.machine
    with Conductor(plan) as conductor:
        case = case_of(width, batch, options.ranks, options.device)
        steps = case.measurement
        try:
            conductor.measure(case, contenders(options.ranks))
        except KeyboardInterrupt:  # show the finished rounds
            keep_whole_rounds(steps)
        judged = verdicts(steps, options.ranks, options.device)
        threads = "1 BLAS thread per rank" if options.device == "cpu" else "on the GPU"
        print(f"\n{steps.nbytes / 4e6:.3g} million parameters, batch {batch}, {threads}\n")
        print(f"{table(steps, options.ranks)}\n\n{verdict_table(judged)}\n", flush=True)
        trace = ""
        if options.trace:
            trace = traced(case, max(options.ranks), conductor, options.trace)
            print(trace, end="\n\n")
    print(facts_text(machine, conductor))
    print(left_out_text([steps], lambda m: m.task))
    if options.json:
        write_json(options.json, machine, conductor, [steps], judged)
    conductor.require("flashlight_py")
    if options.device == "cuda":
        require_all([steps], "")
        if trace.startswith(NO_TRACE):
            raise SystemExit(f"FAILED: {trace}")


if __name__ == "__main__":
    main()
