"""Times of every verb next to every peer at a few sizes.

    python benchmarks/collectives.py --json collectives.json

The method is the method of all_reduce.py. Sizes are bytes of each rank's argument: the array that a
rank sends in an all_gather, and the array that is divided in a reduce_scatter, a scatter or an
all_to_all. send_recv goes from rank 0 to rank 1 and back; sendrecv is one step around a ring. The
root of a broadcast may finish early; the slowest rank's time for a batch of calls counts. If a
result is not in place, each library writes into an array that was allocated before. Verbs of
objects
get the array (or a dict of integers of the same length) and return a new object. "Number" rows pass
and return
a Python float. "Every second element" rows pass a view that is not contiguous, which mpi4py users
must pack themselves. torch has no all_gather of unequal parts. A copy of the argument by one core
shows the limit of the memory.

"Several arrays" rows divide the argument into arrays. This package reduces them by
all_reduce_multiple, by
all_reduce_multiple(contiguous=True), and in a loop of all_reduce. The peers reduce them in a loop.

A halo row sends 4 fields to both neighbours in a ring, as one batch or as one sendrecv after the
other. In a task row rank 0 gives 100 tasks, one at a time, to the rank that asks first, with
receives from any source; the time is for all tasks. In a row of open messages each element of the
argument is a message between ranks 0 and 1, and between 2 and 3. All receives start, then all
sends, then the rank waits for all.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.calls.combining import RESULTS
from flashlight_py.distributed.verbs import VERBS as TABLE
from flashlight_py.distributed.verbs import Verb
from harness.all_reduce_targets import COPY
from harness.collectives_targets import SEVERALLY, label, verdicts
from harness.conductor import Case, Conductor, Contender
from harness.launchers import Library
from harness.options import collective_peers, common_arguments, ours, plan_of
from harness.report import conclude, ratio_table, time_table
from harness.roles.verbs import SEVERAL
from harness.statistics import Measurement

OURS = "flashlight_py"
SIZES = (4, 4 << 10, 64 << 10, 1 << 20, 64 << 20)
OPEN = (4_000, 40_000)
OBJECTS = (100, 1 << 10, 64 << 10, 1 << 20)


class Row(NamedTuple):
    """The arrays that a rank holds at once, as multiples of its argument, and the sizes in
    bytes."""

    arrays: Callable[[int], int]
    sizes: Sequence[int] = SIZES


VERBS: dict[str, Row] = {
    "all_reduce": Row(lambda ranks: 2),
    "all_reduce, number": Row(lambda ranks: 2, (4,)),
    "all_reduce, every second": Row(lambda ranks: 3),
    "broadcast": Row(lambda ranks: 2),
    "reduce": Row(lambda ranks: 2),
    "all_gather": Row(lambda ranks: 2 + 2 * ranks),
    "gather": Row(lambda ranks: 2 + ranks),
    "scatter": Row(lambda ranks: 2),
    "reduce_scatter": Row(lambda ranks: 3),
    "all_to_all": Row(lambda ranks: 3),
    "send_recv": Row(lambda ranks: 2),
    "sendrecv": Row(lambda ranks: 3),
    "barrier": Row(lambda ranks: 0, [0]),
    "all_gather, unequal": Row(lambda ranks: 2 + ranks),
    "all_to_all, unequal": Row(lambda ranks: 3),
    "batch_isend_irecv": Row(lambda ranks: 4),
    "batch_isend_irecv, new ops": Row(lambda ranks: 4, (4,)),
    "halo, batch": Row(lambda ranks: 4),
    "halo, sendrecv": Row(lambda ranks: 4),
    "tasks, any source": Row(lambda ranks: 2, (4, 64 << 10)),
    "broadcast_object": Row(lambda ranks: 5, OBJECTS),
    "all_gather_object": Row(lambda ranks: 3 + 3 * ranks, OBJECTS),
    "broadcast_object, dict": Row(lambda ranks: 50, OBJECTS),
    "all_gather_object, dict": Row(lambda ranks: 50 * ranks, OBJECTS),
}

VERBS |= dict.fromkeys(SEVERAL, Row(lambda ranks: 3, SIZES[1:]))
# Verbs outside the table of verbs. Their meaning is sent to the peers with the task.
TABLED = {v.name: v for v in TABLE if v.reduces and v.in_place and v.name not in VERBS}
VERBS |= dict.fromkeys(TABLED, VERBS["all_reduce"])
# The last row, because a library that cannot open so many messages gets no further tasks.
VERBS |= dict.fromkeys(("open messages", "open messages, one tag"), Row(lambda ranks: 2, OPEN))


def cases(options: argparse.Namespace, ranks: int) -> list[Case]:
    """Return every verb at every size. Verbs of fixed size have one case."""
    return [
        _case(verb, options.dtype, nbytes, ranks)
        for verb in options.verbs
        for nbytes in (options.sizes if len(VERBS[verb].sizes) > 1 else None) or VERBS[verb].sizes
    ]


def _case(verb: str, dtype: str, nbytes: int, ranks: int) -> Case:
    task: dict[str, Any] = {"verb": verb, "dtype": dtype, "nbytes": nbytes}
    if verb in TABLED:
        task["means"] = [_meaning(TABLED[verb], rank, ranks) for rank in range(ranks)]
    return Case(Measurement(verb, dtype, nbytes, ranks), task, VERBS[verb].arrays(ranks) * nbytes)


def _meaning(verb: Verb, rank: int, ranks: int) -> float | None:
    """Return the result of ``rank`` if rank r passes r + 1 everywhere.

    None means that MPI leaves the result undefined: rank 0 in an exclusive prefix reduction.
    """
    if verb.prefix and not verb.fills(rank, 0):
        return None
    call, arrays = Call(verb), [np.array(r + 1.0) for r in range(ranks)]
    result = RESULTS[verb](arrays, rank, call) if verb.fills(rank, call.root) else arrays[rank]
    return float(result)


def measure(options: argparse.Namespace, conductor: Conductor) -> list[Measurement]:
    """Return all cases, grouped by the number of ranks."""
    results = []
    for ranks in options.ranks:
        entrants = [Contender(OURS, ours("flashlight_collectives"), ranks)]
        entrants += collective_peers(options, ranks, conductor.absent)
        entrants.append(Contender(COPY, Library(COPY, "copy", Path(sys.executable)), 1))
        library = entrants[0].library
        ways = [Contender(title, library, ranks, {"kind": k}) for k, title in SEVERALLY.items()]
        for case in cases(options, ranks):
            more = ways if case.measurement.task in SEVERAL else []
            results.append(conductor.measure(case, [*entrants, *more]))
    return results


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = common_arguments("Time every verb beside its peers.", [2, 4], "openmpi,mpich,torch")
    add = parser.add_argument
    add("--sizes", type=int, nargs="+", help="bytes of each rank's argument")
    add("--verbs", nargs="+", default=list(VERBS), choices=list(VERBS), metavar="VERB")
    add("--dtype", default="float32")
    return parser.parse_args()


def main() -> None:
    """Measure, print, write."""
    options = read_options()
    with Conductor(plan_of(options)) as conductor:
        measurements = measure(options, conductor)
    for ranks in options.ranks:
        some = [m for m in measurements if m.ranks == ranks]
        print(f"\n### Verbs, {options.dtype}, {ranks} ranks\n")
        print(time_table(some, "verb", label))
        print(f"\nTime of each peer divided by the time of {OURS}:\n")
        print(ratio_table(some, "verb", label, OURS))
    judged = verdicts(measurements, conductor.absent)
    conclude(options, conductor, measurements, judged, lambda m: f"{m.ranks} ranks {label(m)}")


if __name__ == "__main__":
    main()
