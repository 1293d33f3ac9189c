"""Steps of the models of examples/: eager and captured, next to torch and torch DDP on gloo.

    python benchmarks/models.py --json models.json

The models are tiny_gpt, digits_cnn and cifar_resnet (ResNet-18, 32 images) of the examples, without
dropout, with
Adam. All libraries start from the same parameters and use the same batches, with one thread per
process.
The first losses are compared, so all compute the same. torch runs images in both of its layouts,
and the faster layout counts.
"""

import argparse
from typing import Any

import numpy as np

from harness.conductor import Case, Conductor, Contender
from harness.launchers import Library
from harness.options import common_arguments, installed, ours, plan_of
from harness.report import conclude, duration, markdown
from harness.roles.model_works import WORKS
from harness.statistics import Measurement, median
from harness.verdicts import Verdict, at_least

EAGER, CAPTURED = "eager", "captured"
TORCH, LAST = "torch", "torch, channels_last"
# Least ratios of torch's time to ours on one rank, by model: eager, captured.
TARGETS = {"tiny_gpt": (1.0, 1.3), "digits_cnn": (None, 1.5), "cifar_resnet": (0.9, None)}
# Least ratio of torch's time on two ranks; least ratio of torch's memory to ours in tiny_gpt; least
# ratios of our eager time and memory to the captured step's in cifar_resnet.
TOGETHER, MEMORY, REPLAYED = 1.1, 1.0, 1.0


def contenders(
    options: argparse.Namespace, work: str, ranks: int, absent: dict[str, str]
) -> list[Contender]:
    """Return the contenders; add torch to ``absent`` with the reason if it is not installed."""
    # Each contender has its own processes, because their memory is measured.
    kinds = EAGER, CAPTURED
    entrants = [Contender(k, ours("flashlight_models", k), ranks, {"kind": k}) for k in kinds]
    python = installed("torch", options, absent)
    if python is None:
        return entrants
    for title in [TORCH] if work == "tiny_gpt" else [TORCH, LAST]:
        library = Library(title, "torch_models", python)
        entrants.append(Contender(title, library, ranks, {"kind": title.removeprefix("torch, ")}))
    return entrants


def state_of(work: str) -> dict[str, Any]:
    """Return the parameters that all contenders start from."""
    import flashlight_py as fl
    from harness.roles.flashlight_models import model_of

    fl.set_seed(0)
    return {name: array.copy() for name, array in model_of(work).state_dict().items()}


def check_that_all_compute_the_same(work: str, details: dict[str, list[Any]]) -> None:
    """Compare the first losses, summed over the ranks.

    Raises:
        RuntimeError: If they differ.
    """
    sums = {title: np.sum([x["losses"] for x in ranks], axis=0) for title, ranks in details.items()}
    eager = sums[EAGER]
    for title, losses in sums.items():
        if not np.allclose(eager, losses, rtol=2e-3):
            raise RuntimeError(f"{work}: {title} has other losses than eager: {losses}, {eager}")


def ratios(measurement: Measurement, measured: str) -> list[float]:
    """Return the ratio of the time of torch's faster layout to our time."""
    candidates = [measurement.ratios(title, measured) for title in (TORCH, LAST)]
    return min((rounds for rounds in candidates if rounds), key=median, default=[])


def table(measurements: list[Measurement], peaks: dict[str, dict[str, int]]) -> str:
    """Return the medians, the ratios of torch's times to ours, and the memory of a step."""
    rows = []
    for measurement in measurements:
        for title, seconds in measurement.seconds.items():
            of = ratios(measurement, title) if title in (EAGER, CAPTURED) else []
            peak = peaks[measurement.task].get(title, 0)
            cells = [measurement.task, title, duration(median(seconds))]
            rows.append([*cells, f"{median(of):.3g}x" if of else "-", f"{peak / 2**20:.3g} MiB"])
    return markdown(["", "", "a step", "torch's time has room for", "memory"], rows)


def verdicts(
    measurements: dict[tuple[str, int], Measurement], peaks: dict[str, dict[str, int]], missing: str
) -> list[Verdict]:
    """Judge each model by torch's time, and captured steps also by eager steps."""
    judged = []
    for (work, ranks), measurement in measurements.items():
        eager, captured = TARGETS[work] if ranks == 1 else (None, TOGETHER)
        for title, bound in ((EAGER, eager), (CAPTURED, captured)):
            if bound is not None:
                rounds = {title: ratios(measurement, title)}
                judged.append(at_least(measurement.task, bound, rounds, missing))
        if work == "cifar_resnet":
            of, by_eager = f"captured next to eager, {measurement.task}", peaks[measurement.task]
            rounds = {CAPTURED: measurement.ratios(EAGER, CAPTURED)}
            judged.append(at_least(of, REPLAYED, rounds))
            rounds = {CAPTURED: [by_eager[EAGER] / by_eager[CAPTURED]]}
            judged.append(at_least(f"memory: {of}", REPLAYED, rounds))
    peak = peaks.get(f"{WORKS['tiny_gpt'].title}, 1 rank(s)", {})
    rounds = {title: [peak[TORCH] / peak[title]] for title in (EAGER, CAPTURED) if TORCH in peak}
    return [*judged, at_least("memory of a step of tiny_gpt", MEMORY, rounds, missing)]


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = common_arguments("Time steps of models.", [1, 2], "torch")
    parser.add_argument("--works", nargs="+", choices=WORKS, default=list(WORKS), help="which")
    return parser.parse_args()


def main() -> None:
    """Measure, check, print, write."""
    options = read_options()
    measurements: dict[tuple[str, int], Measurement] = {}
    peaks: dict[str, dict[str, int]] = {}
    with Conductor(plan_of(options)) as conductor:
        for work in options.works:
            state = state_of(work)
            for ranks in options.ranks:
                task = f"{WORKS[work].title}, {ranks} rank(s)"
                measurement = Measurement(task, "float32", 0, ranks)
                case = Case(measurement, {"work": work, "state": state})
                entrants = contenders(options, work, ranks, conductor.absent)
                measurements[work, ranks] = conductor.measure(case, entrants)
                details = {title: conductor.details[title] for title in measurement.seconds}
                check_that_all_compute_the_same(task, details)
                peaks[task] = {title: by_rank[0]["peak"] for title, by_rank in details.items()}
    missing = "torch is absent" if "torch" in conductor.absent else ""
    judged, measured = verdicts(measurements, peaks, missing), [*measurements.values()]
    print(f"\n{table(measured, peaks)}")
    conclude(options, conductor, measured, judged, ours=EAGER)


if __name__ == "__main__":
    main()
