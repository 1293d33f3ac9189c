"""Ranks in the worker processes of a Dask cluster."""

from __future__ import annotations

import os
import signal
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

from flashlight_py.launch import engine
from flashlight_py.launch.failures import Failure

T = TypeVar("T")

# How often is seen whether the workers are there, and how long a restart waits for one, in seconds.
_LOOK_SECONDS, _RETURN_SECONDS = 0.5, 60.0


def run(
    client: Any,
    fn: Callable[..., T],
    args: Sequence[Any] = (),
    nprocs: int | None = None,
    params: Mapping[str, Any] | None = None,
    timeout: float | None = None,
    max_restarts: int = 0,
) -> list[T]:
    """Run ``fn(rank, *args)`` on workers of a Dask cluster, as :func:`flashlight_py.spawn` does.

    Blocks until every rank has returned. Each rank is a task on a worker process of its own,
    however many threads that has; all run at once. What they print is the worker's output.

    Args:
        client: a ``distributed.Client`` that is not asynchronous.
        fn: function; cloudpickle sends what a worker cannot import.
        args: further arguments of ``fn``, the same for every rank, sent by pickle.
        nprocs: number of ranks; default one for each worker.
        params: of :func:`flashlight_py.distributed_init`, without FILE_PATH.
        timeout: seconds for all attempts together; default no limit.
        max_restarts: how often all ranks are started again when one has failed;
            FLASHLIGHT_RESTART_COUNT counts. A new worker is waited for, 60 seconds at most.

    Raises:
        TypeError: ``fn`` cannot be called, or it or ``args`` cannot be pickled.
        ValueError: arguments make no sense, there are fewer workers than ranks, or workers are
            threads of one process. No rank was started.
        RankFailedError: a rank raised, or its worker died; the first cause. The others were ended:
            verbs raise PeerLostError, Python code SystemExit; after 5 seconds the worker is killed.
        TimeoutError: ``timeout`` has passed, or no worker came back; the ranks have been ended.
    """
    size = len(client.nthreads()) if nprocs is None else nprocs

    def attempt(start: engine.Start, ends: float) -> list[bytes]:
        if start.restarts:
            client.wait_for_workers(start.size, timeout=_RETURN_SECONDS)
        ranks = _Ranks(client, _workers(client, start))
        try:
            ranks.start(start)
            return engine.collect(range(start.size), ranks.outcomes, ends)
        finally:
            ranks.end()

    return engine.run("dask.run", attempt, fn, args, size, params, timeout, max_restarts)


def _workers(client: Any, start: engine.Start) -> list[str]:
    """Return the addresses of workers that are processes of their own, one for each rank."""
    found = sorted(client.nthreads())[: start.size]
    if len(found) < start.size:
        raise ValueError(
            f"{start.name}: {start.size} ranks need as many workers, and the cluster has "
            f"{len(found)}; start more, and call client.wait_for_workers({start.size}) first"
        )
    if len(set(client.run(_process, workers=found).values())) < start.size:
        raise ValueError(
            f"{start.name}: workers are threads of one process, and each rank needs a process of "
            "its own, as of LocalCluster(processes=True)"
        )
    return found


class _Ranks:
    """A task for each rank, which nothing of Dask can end once it runs."""

    def __init__(self, client: Any, workers: list[str]) -> None:
        self._client, self._workers, self._tasks = client, workers, dict[int, Any]()

    def start(self, start: engine.Start) -> None:
        first, key = self._workers[0], f"flashlight-{uuid.uuid4().hex}"
        host = urlsplit(first).hostname
        port = self._client.run(engine.listen, host, workers=[first])[first]
        for rank, worker in enumerate(self._workers):
            pinned = {"workers": [worker], "allow_other_workers": False, "key": f"{key}-{rank}"}
            self._tasks[rank] = self._client.submit(start.serve, rank, host, port, **pinned)

    def outcomes(self, ranks: Set[int], until: float) -> engine.Outcomes:
        """Wait for the end of one of ``ranks``, for a moment; return how those did that have."""
        import distributed

        seconds = min(_LOOK_SECONDS, max(until - time.monotonic(), 0.0))
        tasks: Any = {rank: self._tasks[rank] for rank in ranks}
        with suppress(distributed.TimeoutError):
            distributed.wait([*tasks.values()], seconds, "FIRST_COMPLETED")
        living = self._client.nthreads()
        found: engine.Outcomes = {}
        for rank, task in tasks.items():
            worker, now = self._workers[rank], time.monotonic()
            if worker not in living:  # Dask would wait for it, and run the task again
                found[rank] = Failure(f"was lost: its worker {worker} was killed or has ended", now)
            elif task.done():
                error = None if task.status == "finished" else task.exception()
                found[rank] = Failure(f"did not run: {error}", now) if error else task.result()
        return found

    def end(self) -> None:
        """End the ranks that run, and forget all."""
        living = self._client.nthreads()  # to tell a dead one takes 30 seconds
        at = {rank: self._workers[rank] for rank, task in self._tasks.items() if not task.done()}
        here = [worker for worker in at.values() if worker in living]
        told = self._client.run(engine.end_rank, workers=here, on_error="ignore") if here else {}
        late = {rank for rank in at if told.get(at[rank])}
        ends = time.monotonic() + engine.ENDING_SECONDS
        while late and time.monotonic() < ends:
            late -= self.outcomes(late, ends).keys()
        for rank in late:
            self._client.run(_die, workers=[at[rank]], wait=False, on_error="ignore")
        self._client.cancel([*self._tasks.values()], force=True)


async def _die() -> None:
    signal.raise_signal(signal.SIGKILL)


def _process() -> tuple[str, int]:
    return socket.gethostname(), os.getpid()
