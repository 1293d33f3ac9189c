"""Ranks in the Python workers of a Spark application."""

from __future__ import annotations

import base64
import json
import pickle
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from flashlight_py.engines import run as engine
from flashlight_py.engines.rank import Meeting, Start, listen
from flashlight_py.launch.calls import SpawnCall
from flashlight_py.launch.failures import Failure
from flashlight_py.launch.supervisor import CAUSE_SECONDS

T = TypeVar("T")

# The setting of the time to wait for executors, and Spark's default.
_EXECUTORS_SECONDS = ("spark.scheduler.maxRegisteredResourcesWaitingTime", "30s")
_CANCEL_SECONDS = 0.2  # between two attempts to cancel a stage
# Reports of failed tasks in the text of Spark's exception.
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

    Uses the active ``SparkContext``; each rank is a task, and as many slots must be free as there
    are ranks. Their output is the executor's. Blocks until every rank has returned.

    Args:
        fn, args, params, timeout, max_restarts: as of ``spawn``; cloudpickle sends what a worker
            cannot import.
        nprocs: number of ranks; default the application's parallelism.

    Raises:
        TypeError, ValueError: as of ``spawn``, or a local application has too few slots.
        RuntimeError: no SparkContext is active.
        RankFailedError: a rank raised, or its worker or executor died; the first cause. The others
            were ended by Spark.
        TimeoutError: ``timeout`` has passed, and the ranks have been ended; or the executors had
            too few slots for ``spark.scheduler.maxRegisteredResourcesWaitingTime`` (30 seconds).
    """
    from pyspark import SparkContext

    context = SparkContext._active_spark_context
    if context is None:
        raise RuntimeError("spark.run: no SparkContext is active; make a SparkSession first")
    size = context.defaultParallelism if nprocs is None else nprocs

    attempt = partial(_attempt, context)
    return engine.run("spark.run", attempt, fn, args, size, params, timeout, max_restarts)


def _attempt(context: Any, start: Start, call: SpawnCall) -> list[bytes]:
    from pyspark import InheritableThread

    # Wait for executors that are about to come; Spark itself would for 10 minutes.
    scala = context._jsc.sc()
    profile = scala.resourceProfileManager().defaultResourceProfile()
    seconds = scala.conf().getTimeAsSeconds(*_EXECUTORS_SECONDS)
    advice = "see spark.executor.instances, spark.executor.cores and spark.task.cpus"
    count = partial(scala.maxNumConcurrentTasks, profile)
    engine.wait_for_room(call, 0 if scala.isLocal() else seconds, count, "slots", advice)

    def stage() -> list[tuple[int, bytes]]:
        context.addJobTag(start.key)
        ranks = context.parallelize(range(start.size), start.size).barrier()
        return ranks.mapPartitions(lambda _: _serve(start)).collect()  # type: ignore[no-any-return]

    cancel = partial(context.cancelJobsWithTag, start.key)
    try:
        found = interruptible(call, stage, cancel, InheritableThread)
    except Exception as error:
        if failed := _failure(call, str(error)):
            raise failed from None
        raise
    return [pickled for _, pickled in sorted(found)]


def interruptible(
    call: SpawnCall,
    work: Callable[[], T],
    cancel: Callable[[], None],
    kind: type[threading.Thread] = threading.Thread,
) -> T:
    """Return what ``work`` does, in a thread, which ``cancel`` ends when time is up or by Ctrl-C.

    ``cancel`` is called until that has happened: the work may not have begun at first. ``kind`` is
    that of the thread. Raises what ``work`` does, or TimeoutError.
    """
    outcome: Future[T] = Future()

    def do() -> None:
        try:
            outcome.set_result(work())
        except Exception as error:  # noqa: BLE001 - the thread that waits raises it
            outcome.set_exception(error)

    thread = kind(target=do, daemon=True)
    thread.start()
    try:
        thread.join(engine.seconds_until(call.ends))
        is_late = thread.is_alive()
    finally:
        while thread.is_alive():
            cancel()
            thread.join(_CANCEL_SECONDS)
    if is_late:
        raise call.late(range(call.size))
    return outcome.result()


def _serve(start: Start) -> Iterator[tuple[int, bytes]]:
    """Be the rank of this task, in a Python worker."""
    from pyspark import BarrierTaskContext

    task = BarrierTaskContext.get()
    rank, hosts = task.partitionId(), [engine.host_of(each.address) for each in task.getTaskInfos()]
    meetings = task.allGather(json.dumps(listen(start.key, hosts[0], hosts)) if rank == 0 else "")
    outcome = start.serve(rank, Meeting(*json.loads(meetings[0])))
    if not isinstance(outcome, Failure):
        return iter([(rank, outcome)])
    if outcome.follows:  # Spark names the task that fails first, and then ends this one
        threading.Event().wait(CAUSE_SECONDS)
    report = base64.b64encode(pickle.dumps(outcome)).decode()
    raise RuntimeError(f"{outcome.what}; flashlight rank {rank} failed: {report}!")


def _failure(call: SpawnCall, text: str) -> Exception | None:
    """Return the error of the rank that failed, from the text of Spark's exception."""
    if match := _REPORT.search(text):
        failure = pickle.loads(base64.b64decode(match[2]))
        return call.failed(int(match[1]), failure._replace(at=time.monotonic()))
    if match := _LOST.search(text):
        return call.failed(int(match[1]), engine.lost(match[2]))
    return None
