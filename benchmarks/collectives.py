"""Every verb beside every peer, at a few sizes.

    python benchmarks/collectives.py --json collectives.json

The method is that of all_reduce.py. Sizes are bytes of each rank's argument: what it gives to an
all_gather, what it is given to cut in a reduce_scatter, a scatter or an all_to_all. send_recv is
there and back between ranks 0 and 1, sendrecv a step around a ring. The root of a broadcast may be
done before the others; as everywhere it is the slowest rank's time for a batch of calls that
counts. Where a result is not in place, everybody writes it into an array that was made before; of
the verbs of objects, to which the array (or a dict of whole numbers as long) is an object, it is
new. Of a number it is a Python float that goes in and comes out, of every second element a view
that is not contiguous, which users of mpi4py pack themselves. torch has no unequal all_gather. A
copy of the argument by one core, beside them, shows what is a matter of memory alone.

Several arrays are parts of the argument. This package reduces them by all_reduce_multiple, by the
same with contiguous=True, and in a loop of all_reduce; the others reduce them in a loop.

A halo is 4 fields, the parts of the argument, that go to both neighbours around a ring: as one
batch, or one sendrecv after another. In a row of tasks rank 0 gives 100 of them, one at a time, to
whichever rank asks first, by receives from any source; the time is that of all. Of open messages
each is an element of the argument, between ranks 0 and 1, 2 and 3: so many receives are begun, then
as many sends, and then all are waited for.
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
    """The arrays, in units of its argument, that a rank holds at once; and the sizes, in bytes."""

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
    "halo, batch": Row(lambda ranks: 4),
    "halo, sendrecv": Row(lambda ranks: 4),
    "tasks, any source": Row(lambda ranks: 2, (4, 64 << 10)),
    "broadcast_object": Row(lambda ranks: 5, OBJECTS),
    "all_gather_object": Row(lambda ranks: 3 + 3 * ranks, OBJECTS),
    "broadcast_object, dict": Row(lambda ranks: 50, OBJECTS),
    "all_gather_object, dict": Row(lambda ranks: 50 * ranks, OBJECTS),
}

VERBS |= dict.fromkeys(SEVERAL, Row(lambda ranks: 3, SIZES[1:]))
# What the table of the verbs has beside them; peers do not know it: its meaning goes with a task.
TABLED = {v.name: v for v in TABLE if v.reduces and v.in_place and v.name not in VERBS}
VERBS |= dict.fromkeys(TABLED, VERBS["all_reduce"])
# Last: a library that cannot have so many is not asked for anything afterwards.
VERBS |= dict.fromkeys(("open messages", "open messages, one tag"), Row(lambda ranks: 2, OPEN))


def cases(options: argparse.Namespace, ranks: int) -> list[Case]:
    """Return every verb at every size; those of one size have no other."""
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
    """Return what ``rank`` has in the end if rank r gave r + 1 everywhere; None: MPI does not say.

    That is the result of rank 0 in an exclusive prefix reduction.
    """
    if verb.prefix and not verb.fills(rank, 0):
        return None
    call, given = Call(verb), [np.array(r + 1.0) for r in range(ranks)]
    result = RESULTS[verb](given, rank, call) if verb.fills(rank, call.root) else given[rank]
    return float(result)


def measure(options: argparse.Namespace, conductor: Conductor) -> list[Measurement]:
    """Return all cases, those of the same number of ranks together."""
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
        print(f"\nTime of the others divided by that of {OURS}:\n")
        print(ratio_table(some, "verb", label, OURS))
    judged = verdicts(measurements, conductor.absent)
    conclude(options, conductor, measurements, judged, lambda m: f"{m.ranks} ranks {label(m)}")


if __name__ == "__main__":
    main()
