"""torch.distributed with the backend "flashlight", next to torch's gloo.

    python benchmarks/torch_backend.py --json torch_backend.json

Both backends run the same lines of torch in torch's environment: its collectives, and the training
steps of
its tutorials. A process group that does nothing shows the time of torch's own Python code. The
method is
the method of all_reduce.py, and the sizes are the sizes of collectives.py: bytes of each rank's
argument. "List" is dist.all_gather with a list; "async" is a call with async_op=True and its wait.
Each rank trains on its own batch. The gradients of all ranks and of both backends must be equal.
The
hosts are Linux namespaces as in hosts.py, connected at 1 Gbit/s.
"""

import argparse
import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.conductor import Case, Conductor, Contender
from harness.environments import PEERS, python_of
from harness.launchers import Host, Library
from harness.options import common_arguments, plan_of
from harness.report import conclude, duration, ratio_table, size_name, time_table
from harness.statistics import Measurement
from harness.verdicts import Verdict, at_least, at_most

OURS, GLOO, NOTHING = "flashlight", "gloo", "nothing"
KB, MB = 1 << 10, 1 << 20
HOSTS, RATE = "2 hosts of one rank, 1 Gbit/s", 1e9
BETWEEN = (4 * KB, 4 * MB)
MOVES = ("broadcast", "all_gather", "reduce_scatter", "all_to_all")
OTHERS = ("all_gather, list", "reduce", "send_recv", "all_gather_object", "all_reduce, async")
DDP, LARGE_DDP, FSDP2 = "DDP, 10-100-1", "DDP, 25 MB", "FSDP2, 2 blocks of 512"
# Calls, and the numbers of their bytes; 0 means that the call has no size.
PARTS: dict[str, list[tuple[str, int]]] = {
    "all_reduce": [("all_reduce", kb * KB or 4) for kb in (0, 1, 4, 16, 64, KB, 16 * KB, 64 * KB)],
    "moves": [(verb, nbytes) for verb in MOVES for nbytes in BETWEEN],
    "others": [("barrier", 0), *((verb, nbytes) for verb in OTHERS for nbytes in BETWEEN)],
    "training": [(step, 0) for step in (DDP, LARGE_DDP, FSDP2)],
}
CLOSE = 1e-5  # tolerance for sums in another order
ABOVE_NOTHING = 5e-6  # seconds more than the empty group, up to 64 KB


@dataclass(frozen=True)
class Target:
    """A case that must be ``bound`` times as fast as gloo. Without a task, it covers every other
    case."""

    title: str
    section: str
    bound: float
    tasks: Sequence[str] = ()
    sizes: Callable[[int], bool] = lambda nbytes: True


TWO = "2 ranks"
TARGETS = [
    Target("all_reduce, to 64 KB", TWO, 10.0, ["all_reduce"], lambda nbytes: nbytes <= 64 * KB),
    Target("all_reduce, from 1 MB", TWO, 3.0, ["all_reduce"], lambda nbytes: nbytes >= MB),
    Target(f"{', '.join(MOVES)}, 4 KB", TWO, 5.0, MOVES, lambda nbytes: nbytes == 4 * KB),
    Target(f"{', '.join(MOVES)}, 4 MB", TWO, 2.0, MOVES, lambda nbytes: nbytes == 4 * MB),
    Target(f"a step of {DDP}, batch 8", TWO, 3.0, [DDP]),
    Target(f"a step of {FSDP2}", TWO, 1.5, [FSDP2]),
    Target("all of it", "4 ranks", 1.0),
    Target("all of it", HOSTS, 1.0),
]


def case_of(task: str, nbytes: int, ranks: int) -> Case:
    """Return the case for the conductor."""
    task_options: dict[str, Any] = {"verb": task, "dtype": "float32", "nbytes": nbytes}
    if task in (DDP, LARGE_DDP, FSDP2):
        task_options = dict(zip(("wrapper", "model"), task.split(", "), strict=True))
    return Case(Measurement(task, "float32", nbytes, ranks), task_options, (2 + ranks) * nbytes)


def contenders(python: Path, case: Case, hosts: Sequence[Host]) -> list[Contender]:
    """Return both backends, and the empty group if the call is compared with it."""
    ranks, task = case.measurement.ranks, case.measurement.task
    role = "torch_collectives" if "verb" in case.task else "torch_training"
    library = functools.partial(Library, python=python, hosts=hosts)
    entrants = [
        Contender(name, library(f"{name}, {role}", role, options={"backend": name}), ranks)
        for name in (OURS, GLOO)
    ]
    if task == "all_reduce" and not hosts:
        nothing = library(NOTHING, "torch_nothing", options={"backend": NOTHING})
        entrants.append(Contender(NOTHING, nothing, ranks))
    return entrants


def measure(
    options: argparse.Namespace,
    conductor: Conductor,
    python: Path,
    ranks: int,
    hosts: Sequence[Host] = (),
) -> list[Measurement]:
    """Return the selected cases on this number of ranks."""
    results = []
    with conductor:
        for task, nbytes in (
            task_and_size for part in options.parts for task_and_size in PARTS[part]
        ):
            case = case_of(task, nbytes, ranks)
            results.append(conductor.measure(case, contenders(python, case, hosts)))
            if "verb" not in case.task:
                _compare(task, conductor.details)
    return results


def _compare(task: str, details: Mapping[str, list[list[float]]]) -> None:
    """Raise if the gradients differ between ranks or backends."""
    gradients = {f"{title}, rank {r}": g for title, of in details.items() for r, g in enumerate(of)}
    for who, squares in gradients.items():
        for whom, others in gradients.items():
            pairs = zip(squares, others, strict=True)
            if not all(math.isclose(one, other, rel_tol=CLOSE) for one, other in pairs):
                raise RuntimeError(f"{task}: {who} has other gradients than {whom}")


def measure_between_hosts(
    options: argparse.Namespace, conductor: Conductor, python: Path
) -> list[Measurement]:
    """Return the selected cases on two hosts that this function creates."""
    from tests.cluster.hosts import Cluster

    with Cluster(2, families="4", rate=RATE) as cluster:
        return measure(options, conductor, python, 2, tuple(cluster))


def verdicts(measured: Mapping[str, Sequence[Measurement]], missing: str) -> list[Verdict]:
    """Judge the results. ``missing`` contains the cases that could not run, and the reasons."""
    judged = [_judge(target, measured.get(target.section, ()), missing) for target in TARGETS]
    above = {
        size_name(m.nbytes): [a - b for a, b in zip(m.seconds[OURS], nothing, strict=True)]
        for m in measured.get(TWO, ())
        if (nothing := m.seconds.get(NOTHING)) and m.nbytes <= 64 * KB and OURS in m.seconds
    }
    title = f"{TWO}: all_reduce, to 64 KB, above a group that does nothing"
    judged.insert(1, at_most(title, ABOVE_NOTHING, above, missing, duration))
    return judged


def _judge(target: Target, measurements: Sequence[Measurement], missing: str) -> Verdict:
    rounds = {
        label(m): m.ratios(GLOO, OURS)
        for m in measurements
        if m.task in (target.tasks or [m.task]) and target.sizes(m.nbytes)
    }
    return at_least(f"{target.section}: {target.title}", target.bound, rounds, missing)


def label(measurement: Measurement) -> str:
    """Return the name of a row."""
    size = f", {size_name(measurement.nbytes)}" if measurement.nbytes else ""
    return measurement.task + size


def show(heading: str, measurements: Sequence[Measurement]) -> None:
    """Print times, and ratios."""
    print(f"\n### {heading}\n\n{time_table(measurements, 'call', label)}")
    print(f"\nTime of each peer divided by the time of {OURS}:\n")
    print(ratio_table(measurements, "call", label, OURS))


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = common_arguments("Time torch.distributed by our backend.", [2, 4], "torch")
    add = parser.add_argument
    add("--parts", nargs="+", default=list(PARTS), choices=list(PARTS), metavar="PART")
    add("--no-hosts", action="store_true", help="measure on this host only")
    return parser.parse_args()


def main() -> None:
    """Measure, print, write."""
    sys.path.append(str(Path(__file__).parent.parent))
    from tests.cluster.hosts import why_not

    options = read_options()
    conductor = Conductor(plan_of(options))
    python, measured, missing = python_of(PEERS["torch"], options.environments), {}, ""
    if isinstance(python, str):
        conductor.absent["torch"], missing = python, "torch is absent"
    else:
        for ranks in options.ranks:
            measured[f"{ranks} ranks"] = measure(options, conductor, python, ranks)
        if not options.no_hosts and not (missing := why_not()):
            measured[HOSTS] = measure_between_hosts(options, conductor, python)
    for heading, measurements in measured.items():
        show(heading, measurements)
    judged = verdicts(measured, missing)
    everything = [
        dataclasses.replace(m, task=f"{heading}, {m.task}")
        for heading, measurements in measured.items()
        for m in measurements
    ]
    failed = [library for library in conductor.absent if library.startswith(OURS)]
    conclude(options, conductor, everything, judged, label, *failed[:1])


if __name__ == "__main__":
    main()
