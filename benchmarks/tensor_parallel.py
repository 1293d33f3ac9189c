"""Tokens per second of a Llama whose layers are split between ranks, next to gloo and one process.

    python benchmarks/tensor_parallel.py --json tensor_parallel.json --plot tensor_parallel.png

transformers splits random models with the proportions of Llama 3 by ``tp_plan="auto"``. "Prefill"
computes a prompt of 512 tokens, "decode" then computes one token of each sequence. One process uses
all cores by its threads. The ranks divide the cores, and have at least one thread each. All
contenders read the same parameters, and the first logits must be equal. The method is the method of
all_reduce.py: the contenders take turns, so other load slows all of them equally. A process group
that sends nothing shows the time of transformers, torch and the processor. `make clients` makes the
environment.
"""

import argparse
import itertools
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.conductor import Case, Conductor, Contender
from harness.environments import PEERS, python_of
from harness.facts import cores
from harness.launchers import Library
from harness.options import common_arguments, plan_of
from harness.plot import plot_bars
from harness.report import conclude, markdown, ratio_table
from harness.statistics import Measurement, median
from harness.team import BENCHMARKS
from harness.verdicts import Verdict, at_least

OURS, GLOO, NOTHING, ALONE = "flashlight", "gloo", "nothing", "one process"
ROLE = "torch_llama"
LAYERS = {1024: 4, 2048: 4, 4096: 2}  # by width: what three copies in 8 GB allow
BATCHES, PHASES = (1, 8), ("decode", "prefill")
PROMPT = 512
SHOWN = OURS, GLOO, ALONE  # in the figure
# Tolerance for logits, which are sums in another order, relative to the largest of them.
CLOSE = {"bfloat16": 0.1, "float32": 1e-3}
# Least ratios of the peers' times of a decoded token to ours, with batch 1 on 2 ranks.
TARGETS = {GLOO: 1.8, ALONE: 1.0, NOTHING: 0.95}


def contenders(python: Path, ranks: int) -> list[Contender]:
    """Return all backends on ``ranks`` ranks, and one process with a thread for each core."""
    threads = max(1, cores() // ranks)
    settings: dict[str, dict[str, Any]] = {
        name: {"backend": name, "threads": threads} for name in (OURS, GLOO, NOTHING)
    }
    settings |= {ALONE: {"threads": cores()}}
    return [
        Contender(name, Library(name, ROLE, python, options=setting), 1 if name == ALONE else ranks)
        for name, setting in settings.items()
    ]


def measure(
    options: argparse.Namespace, conductor: Conductor, python: Path, ranks: int, folder: Path
) -> list[Measurement]:
    """Return all cases on this number of ranks. Models are stored in ``folder``."""
    results = []
    with conductor:
        cases = itertools.product(options.widths, options.phases, options.batches)
        for width, phase, batch in cases:
            tokens = batch * (PROMPT if phase == "prefill" else 1)
            task = f"{phase}, width {width}, batch {batch}"
            setting = {"phase": phase, "batch": batch, "dtype": options.dtype}
            setting["model"] = write(folder / str(width), width, python)
            case = Case(Measurement(task, options.dtype, tokens, ranks), setting)
            results.append(conductor.measure(case, contenders(python, ranks)))
            compare(results[-1], conductor.details)
    return results


def write(model: Path, width: int, python: Path) -> str:
    """Return the folder ``model``. Write a model of this width to it first, if it is missing."""
    if not model.exists():
        command = python, "-m", f"harness.roles.{ROLE}", model, width, LAYERS[width]
        subprocess.run(list(map(str, command)), cwd=BENCHMARKS, check=True, capture_output=True)
    return str(model)


def compare(measurement: Measurement, details: Mapping[str, list[list[float]]]) -> None:
    """Raise RuntimeError if ranks or contenders computed other logits."""
    logits = {
        f"{title}, rank {rank}": values
        for title, by_rank in details.items()
        for rank, values in enumerate(by_rank)
        if title != NOTHING
    }
    (first, expected), *others = logits.items()
    most = CLOSE[measurement.dtype] * max(map(abs, expected))
    for other, values in others:
        if max(abs(a - b) for a, b in zip(expected, values, strict=True)) > most:
            raise RuntimeError(
                f"{measurement.task}: expected the logits {expected} of {first}, got {values} of "
                f"{other}. Compare the versions of torch, or use --dtype float32"
            )


def label(measurement: Measurement) -> str:
    """Return the name of a row."""
    return f"{measurement.ranks} ranks, {measurement.task}"


def tokens_table(measurements: list[Measurement]) -> str:
    """Return tokens per second, for all sequences of the batch together."""
    titles = list(dict.fromkeys(title for m in measurements for title in m.seconds))
    rows = [
        [m.task, *(f"{speed:.3g}" if (speed := tokens(m, title)) else "-" for title in titles)]
        for m in measurements
    ]
    return markdown(["tokens per second", *titles], rows)


def tokens(measurement: Measurement, title: str) -> float:
    """Return the tokens per second of a contender, or 0 if it was not measured."""
    seconds = measurement.seconds.get(title)
    return measurement.nbytes / median(seconds) if seconds else 0.0


def verdicts(measurements: list[Measurement], missing: str) -> list[Verdict]:
    """Judge decoding of one sequence on 2 ranks, in every width."""
    judged = []
    for peer, bound in TARGETS.items():
        rounds = {
            m.task: m.ratios(peer, OURS)
            for m in measurements
            if m.ranks == 2 and m.task.startswith("decode") and m.nbytes == 1
        }
        judged.append(at_least(f"2 ranks: decode, batch 1, next to {peer}", bound, rounds, missing))
    return judged


def draw(measurements: list[Measurement], machine: Mapping[str, str], file: Path) -> None:
    """Draw the tokens per second of decoding: a panel for each batch and width."""
    panels: dict[str, dict[str, dict[str, float]]] = {}
    for batch in BATCHES:
        for m in measurements:
            phase, width, of = m.task.split(", ")
            if phase == "decode" and of == f"batch {batch}":
                panel = panels.setdefault(f"{width}, {of}", {})
                panel[f"{m.ranks} ranks"] = {title: tokens(m, title) for title in SHOWN}
    title = f"Decoding on {machine['cores']} cores, {machine['CPU']}"
    plot_bars(panels, "tokens per second", title, file)


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = common_arguments("Time a Llama that is split between ranks.", [2, 4], "clients")
    parser.set_defaults(batch_seconds=0.2)
    add = parser.add_argument
    add("--widths", type=int, nargs="+", default=list(LAYERS), choices=list(LAYERS))
    add("--phases", nargs="+", default=PHASES, choices=PHASES)
    add("--batches", type=int, nargs="+", default=BATCHES)
    add("--dtype", default="bfloat16", choices=list(CLOSE), help="of parameters and results")
    add("--plot", type=Path, metavar="FILE.png", help="draw the tokens per second")
    return parser.parse_args()


def main() -> None:
    """Measure, print, write."""
    options = read_options()
    conductor = Conductor(plan_of(options))
    python, missing = python_of(PEERS["clients"], options.environments), ""
    measured: list[Measurement] = []
    if isinstance(python, str):
        conductor.absent["clients"], missing = python, "transformers is absent"
    else:
        with tempfile.TemporaryDirectory(prefix="flashlight-bench-") as folder:
            for ranks in options.ranks:
                measured += measure(options, conductor, python, ranks, Path(folder))
    for ranks in options.ranks:
        of = [m for m in measured if m.ranks == ranks]
        print(f"\n### {ranks} ranks\n\n{tokens_table(of)}\n\nTime of each peer / time of {OURS}:\n")
        print(ratio_table(of, "work", lambda m: m.task, OURS))
    if options.plot and measured:
        draw(measured, options.machine, options.plot)
    judged = verdicts(measured, missing)
    failed = [library for library in conductor.absent if library.startswith(OURS)]
    conclude(options, conductor, measured, judged, label, *failed[:1])


if __name__ == "__main__":
    main()
