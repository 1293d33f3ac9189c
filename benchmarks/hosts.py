"""Times of verbs between hosts, next to torch's Gloo and Open MPI over the same cables.

    python benchmarks/hosts.py --links "1 Gbit/s" --verbs all_reduce --json hosts.json

The hosts are the Linux namespaces of tests/cluster, connected by a switch whose cables have a rate,
a delay and a loss. The ranks of all hosts and the switch share the cores of this machine. The
method is the method of all_reduce.py, and the rows are the rows of collectives.py. By default,
messages and verbs that are not limited by bandwidth are measured at 1 Gbit/s only. The wire's time
is the time for the bytes that the busiest cable must carry in one direction, in full frames.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from harness.conductor import Case, Conductor, Contender
from harness.launchers import Library
from harness.options import collective_peers, common_arguments, ours, plan_of
from harness.report import conclude, markdown, ratio_table, size_name, time_table
from harness.roles.verbs import TASKS
from harness.statistics import Measurement, median
from harness.verdicts import Verdict, at_least, at_most

OURS, MPI, TORCH = "flashlight_py", "Open MPI", "torch gloo"
SIZES = [4, 4 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20]
LINKS: dict[str, dict[str, float]] = {
    "1 Gbit/s": {"rate": 1e9},
    "5 ms": {"rate": 1e9, "delay": 0.005},
    "no limit": {},
    "1 % loss": {"rate": 1e9, "loss": 0.01},
}
SHAPES = {"2 x 1": (1, 1), "2 x 2": (2, 2), "4 x 1": (1, 1, 1, 1)}  # ranks of each host
MIDDLE = (4 << 10, 64 << 10, 1 << 20)
TYPICAL = "1 Gbit/s"


class Row(NamedTuple):
    """Demands of a verb on cables and memory, as functions of the numbers of hosts and ranks.

    ``wire`` is the least traffic of the busiest cable in one direction, as a multiple of a rank's
    argument. If it
    is 0, it is unknown and the verb is left out. ``arrays`` is the number of arrays that a rank
    holds at once.
    """

    wire: Callable[[int, int], float]
    arrays: Callable[[int], int]
    sizes: Sequence[int] = SIZES


VERBS = {
    "all_reduce": Row(lambda hosts, ranks: 2 * (hosts - 1) / hosts, lambda ranks: 2),
    "broadcast": Row(lambda hosts, ranks: 1, lambda ranks: 2),
    "reduce": Row(lambda hosts, ranks: 1, lambda ranks: 2),
    "all_gather": Row(lambda hosts, ranks: ranks - ranks / hosts, lambda ranks: 2 + 2 * ranks),
    "reduce_scatter": Row(lambda hosts, ranks: (hosts - 1) / hosts, lambda ranks: 3),
    "gather": Row(lambda hosts, ranks: ranks - ranks / hosts, lambda ranks: 2 + ranks, MIDDLE),
    "scatter": Row(lambda hosts, ranks: (hosts - 1) / hosts, lambda ranks: 2, MIDDLE),
    "all_to_all": Row(
        lambda hosts, ranks: ranks / hosts * (hosts - 1) / hosts, lambda ranks: 3, MIDDLE
    ),
    "send_recv": Row(lambda hosts, ranks: 2 * (hosts == ranks), lambda ranks: 2, MIDDLE),
    "sendrecv": Row(lambda hosts, ranks: 1, lambda ranks: 3, MIDDLE),
    "batch_isend_irecv": Row(lambda hosts, ranks: 2, lambda ranks: 4, MIDDLE),
    "halo, batch": Row(lambda hosts, ranks: 2, lambda ranks: 4, MIDDLE),
    "tasks, any source": Row(
        lambda hosts, ranks: TASKS * (hosts == ranks), lambda ranks: 2, MIDDLE[:2]
    ),
    "broadcast_object": Row(lambda hosts, ranks: 1, lambda ranks: 5, MIDDLE),
    "all_gather_object": Row(
        lambda hosts, ranks: ranks - ranks / hosts, lambda ranks: 3 + 3 * ranks, MIDDLE
    ),
    "barrier": Row(lambda hosts, ranks: 1, lambda ranks: 1, (4,)),
}
FRAME, DATA = 1538, 1448  # bytes of a frame on the wire with gap and preamble, and of its data
LARGE = 64 << 20


@dataclass(frozen=True)
class NetworkCase:
    """Cables and hosts that were measured together, with the results."""

    link: str
    shape: str
    measurements: Sequence[Measurement]

    @property
    def name(self) -> str:
        return f"{self.link}, {self.shape}"

    def shares(self, measurement: Measurement) -> list[float]:
        """Return our times divided by the wire's time; empty if the cable has no rate."""
        counts = SHAPES[self.shape]
        units = VERBS[measurement.task].wire(len(counts), sum(counts))
        if "rate" not in LINKS[self.link] or OURS not in measurement.seconds:
            return []
        wire = units * measurement.nbytes * FRAME / DATA * 8 / LINKS[self.link]["rate"]
        return [seconds / wire for seconds in measurement.seconds[OURS]]


def measure(
    options: argparse.Namespace, conductor: Conductor, link: str, shape: str
) -> list[Measurement]:
    """Return every verb at every size, on hosts that this function creates."""
    from tests.cluster.hosts import Cluster

    counts = SHAPES[shape]
    ranks = sum(counts)
    with Cluster(len(counts), families="4", **LINKS[link]) as cluster:  # type: ignore[arg-type]
        hosts = tuple(host for host, n in zip(cluster, counts, strict=True) for _ in range(n))
        for host in cluster:
            host.sshd()

        def on_hosts(library: Library) -> Library:
            return dataclasses.replace(library, hosts=hosts, ssh=" ".join(cluster.ssh))

        with conductor:
            peers = collective_peers(options, ranks, conductor.absent)
            entrants = [Contender(OURS, on_hosts(ours("flashlight_collectives")), ranks)]
            entrants += [
                dataclasses.replace(peer, library=on_hosts(peer.library)) for peer in peers
            ]
            return [
                conductor.measure(_case(verb, nbytes, ranks), entrants)
                for verb, row in VERBS.items()
                for nbytes in options.sizes or row.sizes
                if row.wire(len(counts), ranks)
                if verb in (options.verbs or VERBS)
                if options.verbs or row.sizes is SIZES or link == TYPICAL
            ]


def _case(verb: str, nbytes: int, ranks: int) -> Case:
    task: dict[str, Any] = {"verb": verb, "dtype": "float32", "nbytes": nbytes}
    return Case(
        Measurement(verb, "float32", nbytes, ranks), task, VERBS[verb].arrays(ranks) * nbytes
    )


def verdicts(cases: Sequence[NetworkCase], absent: Mapping[str, str]) -> list[Verdict]:
    """Judge the results. ``absent`` contains the missing peers and the reasons."""
    judged = []
    for case in cases:
        far = case.link == "5 ms"
        judged.append(_beside(case, TORCH, absent, 1.2 if far else 1.0, 0))
        if not far:
            judged.append(_beside(case, MPI, absent, 1.0, 4 << 10))
        judged.append(_beside_the_wire(case))
    return [verdict for verdict in judged if verdict.reached is not None or absent]


def _beside(
    case: NetworkCase, peer: str, absent: Mapping[str, str], bound: float, least: int
) -> Verdict:
    rounds = {
        f"{m.task} {size_name(m.nbytes)}": m.ratios(peer, OURS)
        for m in case.measurements
        if m.nbytes >= least and peer in m.seconds
    }
    sizes = f"from {size_name(least)}" if least else "every size"
    missing = f"{peer} is absent" if peer in absent else ""
    return at_least(f"{case.name}: to {peer}, {sizes}", bound, rounds, missing)


def _beside_the_wire(case: NetworkCase) -> Verdict:
    rounds = {
        f"{m.task}": case.shares(m)
        for m in case.measurements
        if m.nbytes == LARGE and case.link == TYPICAL
    }
    return at_most(f"{case.name}: 64 MB, to the wire's time", 1.08, rounds)


def show(case: NetworkCase) -> None:
    """Print times, ratios, and the ratios to the wire's time."""

    def label(measurement: Measurement) -> str:
        return f"{measurement.task}, {size_name(measurement.nbytes)}"

    some = case.measurements
    print(f"\n### {case.name}\n\n{time_table(some, 'verb', label)}")
    print(f"\nTime of each peer divided by the time of {OURS}:\n")
    print(ratio_table(some, "verb", label, OURS))
    rows = [
        [label(m), f"{median(shares):.3g}x"]
        for m in some
        if m.nbytes >= 1 << 20 and (shares := case.shares(m))
    ]
    if rows:
        print(f"\n{markdown(['verb', f'time of {OURS} divided by the time of the wire'], rows)}")


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = common_arguments("Time verbs between hosts.", [2, 4], "openmpi,torch")
    add = parser.add_argument
    add("--links", nargs="+", default=list(LINKS), choices=list(LINKS), metavar="LINK")
    add("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES), metavar="SHAPE")
    add("--sizes", type=int, nargs="+", help="bytes of each rank's argument")
    add("--verbs", nargs="+", choices=list(VERBS), metavar="VERB")
    return parser.parse_args()


def main() -> None:
    """Measure, print, write."""
    sys.path.append(str(Path(__file__).parent.parent))
    from tests.cluster.hosts import why_not

    options = read_options()
    if reason := why_not():
        print(f"SKIPPED {reason}")
        raise SystemExit(77)
    conductor = Conductor(plan_of(options))
    cases = [
        NetworkCase(link, shape, measure(options, conductor, link, shape))
        for link in options.links
        for shape in options.shapes
        if sum(SHAPES[shape]) in options.ranks
    ]
    for case in cases:
        show(case)
    judged = verdicts(cases, conductor.absent)
    everything = [
        dataclasses.replace(m, task=f"{case.name}, {m.task}")
        for case in cases
        for m in case.measurements
    ]
    conclude(options, conductor, everything, judged, lambda m: f"{m.task} {size_name(m.nbytes)}")


if __name__ == "__main__":
    main()
