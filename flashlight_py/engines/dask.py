"""Ranks in the worker processes of a Dask cluster."""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any, TypeVar

from flashlight_py.distributed.internal import rendezvous
from flashlight_py.engines import run as engine
from flashlight_py.engines.rank import ENDING_SECONDS, Start, end_rank, listen_for_ranks
from flashlight_py.launch.calls import SpawnCall

T = TypeVar("T")

_END_SECONDS = 2 * ENDING_SECONDS  # seconds to wait until the processes of ended ranks exit


def run(
    client: Any, fn: Callable[..., T], args: Sequence[Any] = (), nprocs: int | None = None,
    params: Mapping[str, Any] | None = None, timeout: float | None = None, max_restarts: int = 0,
) -> list[T]:  # fmt: skip
    """Run ``fn(rank, *args)`` on workers of a Dask cluster, like :func:`flashlight_py.spawn`.

    Each rank is a task on a separate worker process; all ranks run at the same time. The output of
    a rank appears in the log of its worker. The call blocks until every rank has returned.

    Args:
        client: A ``distributed.Client`` that is not asynchronous.
        fn, args, params, timeout, max_restarts: As in ``spawn``. cloudpickle sends objects that a
            worker cannot import. A restart waits at most 60 seconds for new workers.
        nprocs: Number of ranks. Default: one rank per worker.

    Raises:
        TypeError: As in ``spawn``.
        ValueError: As in ``spawn``, or if there are too few worker processes.
        RankFailedError: If a rank raises or its worker dies. The other ranks are ended: their
            collectives raise PeerLostError, and other Python code raises SystemExit. A worker whose
            rank still runs after 5 seconds is killed.
        TimeoutError: If ``timeout`` passes, or no new worker replaces a lost worker. The call
            raises this after all ranks have ended.
    """
    size = len(client.nthreads()) if nprocs is None else nprocs

    def attempt(start: Start, call: SpawnCall) -> list[bytes]:
        return engine.follow(call, DaskRanks(client, call, start))

    return engine.run("dask.run", attempt, fn, args, size, params, timeout, max_restarts)


def _workers(client: Any, call: SpawnCall, restarts: int) -> list[str]:
    """Return the addresses of ``call.size`` workers, each in a different process."""
    workers: list[str] = []

    def count() -> int:
        processes = _run_on_workers(client, call, rendezvous.this_process, on_error="ignore")
        workers[:] = sorted({process: worker for worker, process in processes.items()}.values())
        return len(workers)

    advice = f"Start more workers with processes=True and call client.wait_for_workers({call.size})"
    engine.wait_for_slots(call, restarts and engine.SLOT_SECONDS, count, "worker processes", advice)
    return workers[: call.size]


def _run_on_workers(
    client: Any, call: SpawnCall, function: Callable[..., T], *args: Any, **kw: Any
) -> Any:
    """Return the results of ``function`` on workers; TimeoutError if a worker does not answer."""
    try:
        return client.run(function, *args, callback_timeout=engine.seconds_until(call.ends), **kw)
    except asyncio.TimeoutError:
        raise call.late(range(call.size)) from None


class DaskRanks:
    """The ranks of one attempt, each a Dask task. Dask cannot cancel a task that runs."""

    def __init__(self, client: Any, call: SpawnCall, start: Start) -> None:
        self._client, self._call, self._start = client, call, start
        self._workers, self._tasks = _workers(client, call, start.restarts), dict[int, Any]()

    def start(self) -> None:
        start, first, hosts = self._start, self._workers[0], [*map(engine.host_of, self._workers)]
        listening = (listen_for_ranks, start.key, hosts[0], hosts)
        addresses = _run_on_workers(self._client, self._call, *listening, workers=[first])
        for rank, worker in enumerate(self._workers):
            pinned = {"workers": [worker], "retries": 0, "key": f"{start.key}-{rank}"}
            self._tasks[rank] = self._client.submit(start.serve, rank, addresses[first], **pinned)

    def outcomes(self, ranks: Set[int], until: float) -> engine.Outcomes:
        import distributed

        seconds = min(engine.POLL_SECONDS, max(until - time.monotonic(), 0.0))
        with suppress(asyncio.TimeoutError):
            distributed.wait([self._tasks[rank] for rank in ranks], seconds, "FIRST_COMPLETED")
        living, outcomes = self._client.nthreads(), engine.Outcomes()
        for rank in ranks:
            task, worker = self._tasks[rank], self._workers[rank]
            if worker not in living:  # Dask would wait for the worker and repeat the task
                outcomes[rank] = engine.lost_rank(f"its worker {worker} was killed or has ended")
            elif task.status == "finished":
                outcomes[rank] = task.result()
            elif task.done():
                outcomes[rank] = engine.lost_rank(f"its worker {worker} failed: {task.exception()}")
        return outcomes

    def end(self) -> None:
        """End the running ranks. Ranks of this attempt that start later end immediately."""
        done = {rank for rank, task in self._tasks.items() if task.done()}
        living, runs = self._client.nthreads(), dict[str, bool]()  # asking a dead worker takes 30 s
        workers = {r: w for r, w in enumerate(self._workers) if r not in done and w in living}
        options = {"callback_timeout": _END_SECONDS, "workers": [*workers.values()]}
        with suppress(asyncio.TimeoutError):  # a worker is suspended
            runs = self._client.run(end_rank, self._start.key, on_error="ignore", **options)
        late, ends = {r for r in workers if runs.get(workers[r])}, time.monotonic() + _END_SECONDS
        while late and time.monotonic() < ends:  # the next attempt needs these workers
            late -= self.outcomes(late, ends).keys()
        self._client.cancel([*self._tasks.values()], force=True)
