"""Ranks in the Python workers of a Spark application."""

import base64
import json
import pickle
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
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
    return engine.follow(call, SparkRanks(stage, cancel, InheritableThread))


class SparkRanks:
    """The ranks of one attempt: the tasks of the job that ``stage`` runs, in a thread.

    ``stage`` returns the rank and the result of each task. ``end`` repeats ``cancel`` until the
    thread ends, because it has no effect until ``stage`` has started the job.
    """

    def __init__(
        self, stage: Callable[[], list[tuple[int, bytes]]], cancel: Callable[[], None],
        thread_type: type[threading.Thread] = threading.Thread,
    ) -> None:  # fmt: skip
        self._stage, self._cancel = stage, cancel
        self._ended: engine.Outcomes | Exception = {}
        self._thread = thread_type(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def outcomes(self, ranks: Set[int], until: float) -> engine.Outcomes:
        self._thread.join(engine.seconds_until(until))
        if isinstance(self._ended, Exception):
            raise self._ended
        return self._ended

    def end(self) -> None:
        while self._thread.is_alive():
            self._cancel()
            self._thread.join(_CANCEL_SECONDS)

    def _run(self) -> None:
        try:
            self._ended = dict(self._stage())
        except Exception as error:  # noqa: BLE001 - ``outcomes`` raises it
            self._ended = _failures(str(error)) or error


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


def _failures(text: str) -> engine.Outcomes:
    """Return the failure of the rank that Spark names in ``text``, the message of its exception."""
    if match := _REPORT.search(text):
        failure = pickle.loads(base64.b64decode(match[2]))
        # A rank that failed because of another rank has already waited for the report of the cause.
        return {int(match[1]): failure._replace(at=time.monotonic(), follows=0)}
    if match := _LOST.search(text):
        return {int(match[1]): engine.lost_rank(match[2])}
    return {}
