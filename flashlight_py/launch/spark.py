"""Ranks in the Python workers of a Spark application."""

from __future__ import annotations

import base64
import math
import pickle
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from flashlight_py.launch import engine
from flashlight_py.launch.failures import Failure

T = TypeVar("T")

# What the exception of a task carries to the driver, in the text that Spark makes of it.
_REPORT = re.compile(r"flashlight rank (\d+) failed: ([\w+/=]+)!")
_LOST = re.compile(r"ResultTask\(\d+, (\d+)\) finished unsuccessfully\.\s*([^\n]*)")


def run(
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    nprocs: int | None = None,
    params: Mapping[str, Any] | None = None,
    timeout: float | None = None,
    max_restarts: int = 0,
) -> list[T]:
    """Run ``fn(rank, *args)`` in a barrier stage of Spark, as :func:`flashlight_py.spawn` does.

    Blocks until every rank has returned. Uses the active ``SparkContext``; each rank is a task, and
    all run at once, so as many slots must be free as there are ranks. What they print is the
    executor's output.

    Args:
        fn: function; cloudpickle sends what an executor cannot import.
        args: further arguments of ``fn``, the same for every rank, sent by pickle.
        nprocs: number of ranks; default the application's parallelism.
        params: of :func:`flashlight_py.distributed_init`, without FILE_PATH.
        timeout: seconds for all attempts together; default no limit.
        max_restarts: how often all ranks are started again when one has failed;
            FLASHLIGHT_RESTART_COUNT counts. Spark itself runs no failed stage of results again.

    Raises:
        TypeError: ``fn`` cannot be called, or it or ``args`` cannot be pickled.
        ValueError: arguments make no sense. No rank was started.
        RuntimeError: no SparkContext is active.
        RankFailedError: a rank raised, or its worker or executor died; the first cause. The others
            were ended by Spark.
        TimeoutError: ``timeout`` has passed; the ranks have been ended.
    """
    from pyspark import SparkContext

    context = SparkContext._active_spark_context
    if context is None:
        raise RuntimeError("spark.run: no SparkContext is active; make a SparkSession first")
    size = context.defaultParallelism if nprocs is None else nprocs

    def attempt(start: engine.Start, ends: float) -> list[bytes]:
        return _attempt(context, start, ends)

    return engine.run("spark.run", attempt, fn, args, size, params, timeout, max_restarts)


def _attempt(context: Any, start: engine.Start, ends: float) -> list[bytes]:
    """Run the stage in a thread, as nothing else lets a call of Spark have an end in time."""
    tag, outcome = f"flashlight-{uuid.uuid4().hex}", list[Any]()

    def stage() -> None:
        context.addJobTag(tag)
        try:
            outcome.append(_stage(context, start))
        except Exception as error:  # noqa: BLE001 - Java's, the caller's thread raises it
            outcome.append(error)

    from pyspark import InheritableThread

    thread = InheritableThread(target=stage, daemon=True)
    thread.start()
    try:
        thread.join(None if math.isinf(ends) else max(ends - time.monotonic(), 0.0))
        is_late = thread.is_alive()
    finally:
        if thread.is_alive():
            context.cancelJobsWithTag(tag)
            thread.join()
    if is_late:
        raise engine.TimeIsUp(range(start.size))
    (result,) = outcome
    if isinstance(result, Exception):
        raise _failure(str(result), result)
    return [pickled for _, pickled in sorted(result)]


def _stage(context: Any, start: engine.Start) -> list[tuple[int, bytes]]:
    ranks = context.parallelize(range(start.size), start.size)
    return ranks.barrier().mapPartitions(lambda _: _serve(start)).collect()  # type: ignore[no-any-return]


def _serve(start: engine.Start) -> Iterator[tuple[int, bytes]]:
    """Be the rank of this task, in a Python worker."""
    from pyspark import BarrierTaskContext

    task = BarrierTaskContext.get()
    rank = task.partitionId()
    host = task.getTaskInfos()[0].address.rpartition(":")[0]
    port = task.allGather(str(engine.listen(host)) if rank == 0 else "")[0]
    outcome = start.serve(rank, host, int(port))
    if not isinstance(outcome, Failure):
        return iter([(rank, outcome)])
    if outcome.follows:  # Spark names the task that fails first, and then ends this one
        threading.Event().wait(engine.CAUSE_SECONDS)
    report = base64.b64encode(pickle.dumps(outcome)).decode()
    raise RuntimeError(f"{outcome.what}; flashlight rank {rank} failed: {report}!")


def _failure(text: str, error: Exception) -> Exception:
    """Return what ``text``, of Spark's exception, says of the rank that failed; else ``error``."""
    now = time.monotonic()
    if match := _REPORT.search(text):
        failure = pickle.loads(base64.b64decode(match[2]))
        return engine.RankFailure(int(match[1]), failure._replace(at=now))
    if match := _LOST.search(text):
        return engine.RankFailure(int(match[1]), Failure(f"was lost: {match[2]}", now))
    return error
