"""Time of all_reduce next to every peer, from 4 bytes to 256 MB, on 2 and 4 ranks.

    python benchmarks/all_reduce.py --json all_reduce.json --plot all_reduce.png

The ranks of each library are processes in the library's own environment, started once by its own
launcher. Between their turns they block on a socket. For each size the contenders take turns in
rounds: a barrier, then a batch of calls. The time of the slowest rank counts. The report shows
medians of the rounds and of the ratios within a round. All contenders call from Python, in place,
on arrays of zeros. One call with other values before and after the rounds checks the sum. Sizes are
bytes of the array on each rank.

Run it on a quiet machine; the report prints the load. Variables OMPI_MCA_* and MPIR_CVAR_* are
passed to the peers.

    python benchmarks/all_reduce.py --device cuda --ranks 1 2 4

measures CuPy arrays through NCCL. The peers are raw NCCL on the communicator of this package and
through cupy.cuda.nccl, cupyx.distributed, nccl4py, and torch's backends nccl and nccl2. The report
names peers that are not installed. Two times are measured: until the device has finished, and the
host's time to launch. Each case is printed and written to the JSON file at once. If ranks share a
GPU, every library communicates over the loopback interface.
"""

import argparse
import contextlib
import itertools
import sys
from collections.abc import Mapping
from pathlib import Path

from harness import all_reduce_targets as targets
from harness import cuda_targets
from harness.conductor import Case, Conductor, Contender
from harness.gpu import require_all, require_gpu
from harness.launchers import Library
from harness.options import collective_peers, common_arguments, ours, plan_of
from harness.plot import plot_times
from harness.report import (
    facts_text,
    left_out_text,
    ratio_table,
    size_name,
    time_table,
    verdict_table,
    write_json,
)
from harness.statistics import Measurement
from harness.verdicts import Verdict

SIZES = [4, 64, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10]
SIZES += [megabytes << 20 for megabytes in (1, 4, 16, 64, 256)]
ROLE = "flashlight_collectives"


def contenders(
    options: argparse.Namespace, ranks: int, dtype: str, nbytes: int, absent: dict[str, str]
) -> list[Contender]:
    """Return the contenders of one case."""
    automatic = ours(ROLE)
    entrants = [Contender(targets.OURS, automatic, ranks)]
    entrants.append(Contender(targets.ZERO_COPY, automatic, ranks, {"kind": "shared"}))
    if (ranks, dtype, nbytes) == (2, "float32", 64 << 20):
        entrants += [
            Contender(title, automatic, ranks, {"dtype": dtype})
            for title, dtype in targets.HALF_TYPES.items()
        ]
    if "int" in dtype:
        entrants += [
            Contender(title, automatic, ranks, {"verb": verb})
            for title, verb in targets.EXTREMES.items()
        ]
    for backend in options.backends:
        library = ours(ROLE, f"flashlight_py, {backend}", BACKEND=backend)
        entrants.append(Contender(library.title, library, ranks))
    copy = Library(targets.COPY, "copy", Path(sys.executable))
    return [*entrants, *collective_peers(options, ranks, absent), Contender(copy.title, copy, 1)]


def measure(options: argparse.Namespace, conductor: Conductor) -> list[Measurement]:
    """Return all cases, grouped by ranks and dtype, in increasing sizes."""
    results = []
    for ranks in options.ranks:
        for dtype in options.dtypes:
            for nbytes in options.sizes:
                case = Case(
                    Measurement("all_reduce", dtype, nbytes, ranks),
                    {"verb": "all_reduce", "dtype": dtype, "nbytes": nbytes},
                    memory=2 * nbytes,
                )
                entrants = contenders(options, ranks, dtype, nbytes, conductor.absent)
                results.append(conductor.measure(case, entrants))
    return results


def measure_cuda(
    options: argparse.Namespace, conductor: Conductor, machine: Mapping[str, str]
) -> tuple[list[Measurement], cuda_targets.HostTimes]:
    """Return all cases on the GPU, and the host's seconds to launch, by ranks and bytes.

    Print each case and write the cases so far, because the machine may end the run. Ctrl-C ends the
    loop and keeps the finished cases.
    """
    results, times = [], {}
    with contextlib.suppress(KeyboardInterrupt):
        for ranks, nbytes in itertools.product(options.ranks, options.sizes):
            measurement = Measurement("all_reduce", "float32", nbytes, ranks)
            case = Case(measurement, {"dtype": "float32", "nbytes": nbytes})
            entrants = cuda_targets.contenders(options, ranks, conductor.absent)
            results.append(conductor.measure(case, entrants))
            times[ranks, nbytes] = cuda_targets.host_times(conductor)
            print(cuda_targets.case_line(measurement, times[ranks, nbytes]), flush=True)
            if options.json:
                judged = cuda_targets.verdicts(results, times)
                write_json(options.json, machine, conductor, results, judged)
    return results, times


def show(measurements: list[Measurement]) -> None:
    """Print a table of times and a table of ratios for each number of ranks and dtype."""
    for ranks, dtype in dict.fromkeys((m.ranks, m.dtype) for m in measurements):
        some = [m for m in measurements if (m.ranks, m.dtype) == (ranks, dtype)]
        print(f"\n### all_reduce, {dtype}, {ranks} ranks\n")
        print(time_table(some, "bytes", lambda m: size_name(m.nbytes)))
        print(f"\nTime of each peer divided by the time of {targets.OURS}:\n")
        print(ratio_table(some, "bytes", lambda m: size_name(m.nbytes), targets.OURS))


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = common_arguments("Time all_reduce beside its peers.", [2, 4], "openmpi,mpich,torch")
    add = parser.add_argument
    add("--sizes", type=int, nargs="+", help="bytes of the array on each rank")
    add("--dtypes", nargs="+", default=["float32"], help="float32, float16, uint8, ...")
    backends = ["gloo", "portable"]
    add("--backends", nargs="*", default=backends, help="of ours, besides the automatic choice")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: CuPy arrays, by NCCL")
    add("--plot", type=Path, metavar="FILE.png", help="draw times against sizes")
    options = parser.parse_args()
    if options.sizes is None:
        options.sizes = [size for size in SIZES if size <= 64 << 20] if options.quick else SIZES
    return options


def report_cuda(measurements: list[Measurement], times: cuda_targets.HostTimes) -> list[Verdict]:
    """Print the GPU results before the ranks end, which takes time, and judge them."""
    show(measurements)
    print(f"\n### Host time to launch\n\n{cuda_targets.launch_table(times)}")
    judged = cuda_targets.verdicts(measurements, times)
    print(f"\n### Targets\n\n{verdict_table(judged)}", flush=True)
    return judged


def main() -> None:
    """Measure, print, write."""
    options = read_options()
    if options.device == "cuda":
        require_gpu()
    machine = options.machine
    with Conductor(plan_of(options)) as conductor:
        if options.device == "cuda":
            measurements, times = measure_cuda(options, conductor, machine)
            judged = report_cuda(measurements, times)
            if options.json:
                write_json(options.json, machine, conductor, measurements, judged)
        else:
            measurements = measure(options, conductor)
    if options.device == "cpu":
        show(measurements)
        judged = targets.verdicts(measurements, conductor.absent)
        print(f"\n### Targets\n\n{verdict_table(judged)}")
    print(f"\n{facts_text(machine, conductor)}")
    print(left_out_text(measurements, lambda m: f"{m.ranks} ranks {m.dtype} {size_name(m.nbytes)}"))
    if options.json:
        write_json(options.json, machine, conductor, measurements, judged)
    if options.plot:
        first = [m for m in measurements if m.dtype == options.dtypes[0]]
        plot_times(first, f"{machine['CPU']}, {machine['cores']} cores", options.plot)
    conductor.require(targets.OURS)
    if options.device == "cuda":
        require_all(measurements, targets.OURS)


if __name__ == "__main__":
    main()
