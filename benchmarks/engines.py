"""Cost of an engine: ``run`` next to ``spawn``, and all_reduce in Ray actors next to flrun's ranks.

    python benchmarks/engines.py --json engines.json

The engines are the engines of tests/engines on the loopback interface of this machine, started
before the
measurement. A start consists of two ranks that join the world, do one all_reduce, return and end.
It takes
turns with ``spawn``. A further row shows the time of the engine for two tasks that do nothing: a
Ray
actor is a new process, and Dask and Spark workers exist already. The all_reduce rows use the method
of
all_reduce.py.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

import flashlight_py as fl
from harness.conductor import Case, Conductor, Contender
from harness.launchers import Library
from harness.options import common_arguments, plan_of
from harness.report import conclude, ratio_table, size_name, time_table
from harness.statistics import Measurement
from harness.verdicts import Verdict, at_most

ENGINES, RANKS = ["ray", "dask", "spark"], 2
SIZES = [4, 64 << 10, 4 << 20]
SPAWN, RUN, ALONE = "spawn", "run", "engine only"
FLRUN, ACTORS = "flrun", "fl.launch.ray"
SECONDS = 1.0  # seconds that a start may take longer than spawn
MOST = 1.2  # times flrun's all_reduce

Run = Callable[..., list[Any]]


def total(rank: int) -> int:
    """Return the sum of all ranks."""
    return int(fl.all_reduce(np.array(rank)))


def measure_starts(engine: str, rounds: int) -> Measurement:
    """Return the times of starts on ``engine``, or the reason why they are missing."""
    from tests.engines import engines

    measurement = Measurement(engine, "", 0, RANKS)
    with _started(getattr(engines, engine), measurement) as run:
        if run is None:
            return measurement
        calls: dict[str, Callable[[], Any]] = {
            SPAWN: lambda: fl.spawn(total, nprocs=RANKS),
            RUN: lambda: run(total, nprocs=RANKS),
            ALONE: alone(engine),
        }
        for title, call in calls.items():
            call()  # the first call starts processes that later calls reuse
            measurement.seconds[title] = []
        for _ in range(rounds):
            for title, call in calls.items():
                began = time.perf_counter()
                call()
                measurement.seconds[title].append(time.perf_counter() - began)
    return measurement


@contextmanager
def _started(
    engine: Callable[[], AbstractContextManager[Any]], measurement: Measurement
) -> Iterator[Any]:
    """Start an engine. Return None if it is not available, and record the reason."""
    import pytest

    try:
        context: AbstractContextManager[Any] = engine()
        client = context.__enter__()
    except pytest.skip.Exception as absent:
        measurement.left_out[RUN] = str(absent)
        context, client = nullcontext(), None
    try:
        yield client
    finally:
        context.__exit__(None, None, None)


def alone(engine: str) -> Callable[[], Any]:
    """Return the function that lets the engine run two empty tasks at once."""
    if engine == "ray":
        return _actors
    if engine == "dask":
        from distributed import default_client

        client = default_client()
        return lambda: client.gather([client.submit(_nothing, i, pure=False) for i in range(RANKS)])
    from pyspark import SparkContext

    ranks = SparkContext._active_spark_context.parallelize(range(RANKS), RANKS).barrier()
    return lambda: ranks.mapPartitions(_nothing).collect()


def _actors() -> None:
    import ray

    from flashlight_py.engines.ray import _Actor

    actors = [ray.remote(_Actor).options(num_cpus=1).remote() for _ in range(RANKS)]
    ray.get([actor.call.remote(_nothing, i) for i, actor in enumerate(actors)])
    for actor in actors:
        ray.kill(actor)


def _nothing(argument: Any) -> Any:
    return [] if hasattr(argument, "__next__") else argument


def measure_all_reduces(sizes: list[int], conductor: Conductor) -> list[Measurement]:
    """Return the times of all_reduce in actors on one host, and of flrun's ranks on the same
    host."""
    from tests.engines import engines

    measurements = [Measurement("all_reduce", "float32", nbytes, RANKS) for nbytes in sizes]
    python, role = Path(sys.executable), "flashlight_started"
    entrants = [
        Contender(library.title, library, RANKS)
        for library in (
            Library(FLRUN, role, python, "flrun"),
            Library(ACTORS, role, python, "ray"),
        )
    ]
    with _started(lambda: engines.ray_cluster(cpus=2), measurements[0]), conductor:
        if measurements[0].left_out:
            return []
        import ray

        os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
        for m in measurements:
            task = {"verb": m.task, "dtype": m.dtype, "nbytes": m.nbytes}
            conductor.measure(Case(m, task, 2 * m.nbytes), entrants)
        os.environ.pop("RAY_ADDRESS")
    return measurements


def verdicts(starts: list[Measurement], reduces: list[Measurement]) -> list[Verdict]:
    """Judge the starts and the all_reduces."""
    beyond = {
        m.task: [a - b for a, b in zip(m.seconds[RUN], m.seconds[SPAWN], strict=True)]
        for m in starts
        if RUN in m.seconds
    }
    missing = "; ".join(reason for m in starts for reason in m.left_out.values())
    return [
        at_most("run beyond spawn, in seconds", SECONDS, beyond, missing),
        at_most(
            f"{ACTORS}, all_reduce, to {FLRUN}",
            MOST,
            {size_name(m.nbytes): m.ratios(ACTORS, FLRUN) for m in reduces},
        ),
    ]


def read_options() -> argparse.Namespace:
    """Read the command line."""
    parser = common_arguments("Measure starts and all_reduce on engines.", [RANKS], "")
    add = parser.add_argument
    add("--engines", nargs="*", default=ENGINES, choices=ENGINES, metavar="ENGINE")
    add("--sizes", type=int, nargs="*", default=SIZES, help="bytes of each rank's argument")
    return parser.parse_args()


def main() -> None:
    """Measure, print, write."""
    sys.path.append(str(Path(__file__).parent.parent))
    options = read_options()
    conductor = Conductor(plan_of(options))
    rounds = options.rounds or (3 if options.quick else 9)
    starts = [measure_starts(engine, rounds) for engine in options.engines]
    reduces = measure_all_reduces(options.sizes, conductor) if options.sizes else []
    if starts:
        print(f"\n### Two ranks\n\n{time_table(starts, 'from start to end', lambda m: m.task)}")
    if reduces:
        print(f"\n### all_reduce\n\n{time_table(reduces, 'bytes', lambda m: size_name(m.nbytes))}")
        print(f"\nTime of each peer divided by the time of {FLRUN}:\n")
        print(ratio_table(reduces, "bytes", lambda m: size_name(m.nbytes), FLRUN))
    judged = verdicts(starts, reduces)
    conclude(
        options, conductor, [*starts, *reduces], judged, lambda m: f"{m.task} {m.nbytes or ''}", ""
    )


if __name__ == "__main__":
    main()
