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
from flashlight_py.engines.rank import RendezvousAddress, Start, listen_for_ranks
from flashlight_py.launch.calls import SpawnCall
from flashlight_py.launch.failures import Failure
from flashlight_py.launch.supervisor import CAUSE_SECONDS

T = TypeVar("T")

# Spark's setting for the time to wait for executors, and its default.
_EXECUTORS_SECONDS = ("spark.scheduler.maxRegisteredResourcesWaitingTime", "30s")
_CANCEL_SECONDS = 0.2  # seconds between two attempts to cancel a stage
# Patterns of failed tasks in the text of a Spark exception.
_REPORT = re.compile(r"flashlight rank (\d+) failed: ([\w+/=]+)!")
_LOST = re.compile(r"ResultTask\(\d+, (\d+)\) finished unsuccessfully\.\s*([^\n]*)")


def run(
    fn: Callable[..., T], args: Sequence[Any] = (), nprocs: int | None = None,
    params: Mapping[str, Any] | None = None, timeout: float | None = None, max_restarts: int = 0,
) -> list[T]:  # fmt: skip
    """Run ``fn(rank, *args)`` in a barrier stage of Spark, like :func:`flashlight_py.spawn`.

    The call uses the active ``SparkContext``. Each rank is a task and needs a free slot. Its output
    appears in the log of the executor. The call blocks until every rank has returned.

    Args:
        fn, args, params, timeout, max_restarts: As in ``spawn``. cloudpickle sends objects that a
            worker cannot import.
        nprocs: Number of ranks. Default: the default parallelism of the application.

    Raises:
        TypeError: As in ``spawn``.
        ValueError: As in ``spawn``, or if the master is local and has fewer slots than ranks.
        RuntimeError: If no SparkContext is active.
        RankFailedError: If a rank raises, or its worker or executor dies. Spark ends the other
            ranks.
        TimeoutError: If ``timeout`` passes, or if the executors have too few slots after
            ``spark.scheduler.maxRegisteredResourcesWaitingTime`` (30 seconds). The call raises this
            after all ranks have ended.
    """
    from pyspark import SparkContext

    context = SparkContext._active_spark_context
    if context is None:
        raise RuntimeError("spark.run: no SparkContext is active. Create a SparkSession first")
    size = context.defaultParallelism if nprocs is None else nprocs

    attempt = partial(_attempt, context)
    return engine.run("spark.run", attempt, fn, args, size, params, timeout, max_restarts)


def _attempt(context: Any, start: Start, call: SpawnCall) -> list[bytes]:
    from pyspark import InheritableThread

    # Executors may still be starting. Spark itself would wait for slots for 10 minutes.
    scala = context._jsc.sc()
    profile = scala.resourceProfileManager().defaultResourceProfile()
    seconds = scala.conf().getTimeAsSeconds(*_EXECUTORS_SECONDS)
    advice = "Raise spark.executor.instances or spark.executor.cores, or lower spark.task.cpus"
    count = partial(scala.maxNumConcurrentTasks, profile)
    engine.wait_for_slots(call, 0 if scala.isLocal() else seconds, count, "slots", advice)

    def stage() -> list[tuple[int, bytes]]:
        context.addJobTag(start.key)
        ranks = context.parallelize(range(start.size), start.size).barrier()
        return ranks.mapPartitions(lambda _: _serve(start)).collect()  # type: ignore[no-any-return]

    cancel = partial(context.cancelJobsWithTag, start.key)
    try:
        results = interruptible(call, stage, cancel, InheritableThread)
    except Exception as error:
        if rank_error := _failure(call, str(error)):
            raise rank_error from None
        raise
    return [pickled for _, pickled in sorted(results)]


def interruptible(
    call: SpawnCall,
    work: Callable[[], T],
    cancel: Callable[[], None],
    thread_type: type[threading.Thread] = threading.Thread,
) -> T:
    """Run ``work`` in a thread of type ``thread_type`` and return its result.

    On timeout or Ctrl-C, ``cancel`` is called repeatedly until the thread ends, because it has no
    effect until ``work`` has started a job. Raises the exception of ``work``, or TimeoutError.
    """
    outcome: Future[T] = Future()

    def run_work() -> None:
        try:
            outcome.set_result(work())
        except Exception as error:  # noqa: BLE001 - the waiting thread raises it
            outcome.set_exception(error)

    thread = thread_type(target=run_work, daemon=True)
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
    from pyspark import BarrierTaskContext

    task = BarrierTaskContext.get()
    rank, hosts = task.partitionId(), [engine.host_of(info.address) for info in task.getTaskInfos()]
    address = json.dumps(listen_for_ranks(start.key, hosts[0], hosts)) if rank == 0 else ""
    outcome = start.serve(rank, RendezvousAddress(*json.loads(task.allGather(address)[0])))
    if not isinstance(outcome, Failure):
        return iter([(rank, outcome)])
    if outcome.follows:  # Spark reports only the first failed task, which must be the cause
        threading.Event().wait(CAUSE_SECONDS)
    report = base64.b64encode(pickle.dumps(outcome)).decode()
    raise RuntimeError(f"{outcome.description}; flashlight rank {rank} failed: {report}!")


def _failure(call: SpawnCall, text: str) -> Exception | None:
    if match := _REPORT.search(text):
        failure = pickle.loads(base64.b64decode(match[2]))
        return call.failed(int(match[1]), failure._replace(at=time.monotonic()))
    if match := _LOST.search(text):
        return call.failed(int(match[1]), engine.lost_rank(match[2]))
    return None
