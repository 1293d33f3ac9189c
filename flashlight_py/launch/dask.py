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

    Each rank is a task on a worker process of its own, however many threads that has; all run at
    once. What they print is the worker's output. Blocks until every rank has returned.

    Args:
        client: a ``distributed.Client`` that is not asynchronous.
        fn, args, params, timeout: as of ``spawn``; cloudpickle sends what a worker cannot import.
        nprocs: number of ranks; default one for each worker.
        max_restarts: how often all ranks are started again when one has failed;
            FLASHLIGHT_RESTART_COUNT counts. A new worker is waited for, 60 seconds at most.

    Raises:
        TypeError, ValueError: as of ``spawn``; or workers are too few, or threads of one process.
        RankFailedError: a rank raised, or its worker died; the first cause. The others were ended:
            verbs raise PeerLostError, Python code SystemExit; after 5 seconds the worker is killed.
        TimeoutError: ``timeout`` has passed, or no worker came back; the ranks have been ended.
    """
    size = len(client.nthreads()) if nprocs is None else nprocs
    doomed = set[str]()  # workers that the cluster may still list, and that are dead or dying

    def attempt(start: engine.Start, ends: float) -> list[bytes]:
        ranks = _Ranks(client, _workers(client, start, doomed))
        try:
            ranks.start(start)
            return engine.collect(range(start.size), ranks.outcomes, ends)
        finally:
            doomed.update(ranks.end())

    return engine.run("dask.run", attempt, fn, args, size, params, timeout, max_restarts)


def _workers(client: Any, start: engine.Start, doomed: set[str]) -> list[str]:
    """Return the addresses of workers that are processes of their own, one for each rank."""
    ends = time.monotonic() + (_RETURN_SECONDS if start.restarts else 0.0)
    while len(found := sorted(set(client.nthreads()) - doomed)[: start.size]) < start.size:
        if time.monotonic() >= ends:
            error = TimeoutError if start.restarts else ValueError
            raise error(
                f"{start.name}: {start.size} ranks need as many workers, and the cluster has "
                f"{len(found)}; start more, and call client.wait_for_workers({start.size}) first"
            )
        time.sleep(_LOOK_SECONDS)  # Dask itself only looks again and again
        doomed &= set(client.nthreads())  # who comes back to an address of old is another one
    places = client.run(_process, workers=found, on_error="return")
    for rank, worker in enumerate(found):
        if isinstance(error := places[worker], Exception):
            doomed.add(worker)
            raise engine.RankFailure(
                rank, engine.lost(f"its worker {worker} does not answer: {error}")
            )
    if len(set(places.values())) < start.size:
        raise ValueError(
            f"{start.name}: workers are threads of one process, and each rank needs a process of "
            "its own, as of LocalCluster(processes=True)"
        )
    return found


class _Ranks:
    """A task for each rank, which nothing of Dask can end once it runs."""

    def __init__(self, client: Any, workers: list[str]) -> None:
        self._client, self._workers, self._tasks = client, workers, dict[int, Any]()
        self._port: int | None = None

    def start(self, start: engine.Start) -> None:
        first, key = self._workers[0], f"flashlight-{uuid.uuid4().hex}"
        host = urlsplit(first).hostname
        self._port = port = self._client.run(engine.listen, host, workers=[first])[first]
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
            worker = self._workers[rank]
            if worker not in living:  # Dask would wait for it, and run the task again
                found[rank] = engine.lost(f"its worker {worker} was killed or has ended")
            elif task.done():
                error = None if task.status == "finished" else task.exception()
                found[rank] = (
                    engine.lost(f"its worker {worker} failed: {error}") if error else task.result()
                )
        return found

    def end(self) -> set[str]:
        """End the ranks that run, and forget all; returns the workers that did not survive it."""
        living = self._client.nthreads()  # to tell a dead one takes 30 seconds
        at = {rank: self._workers[rank] for rank, task in self._tasks.items() if not task.done()}
        here = [worker for worker in at.values() if worker in living]
        told = self._client.run(engine.end_rank, workers=here, on_error="ignore") if here else {}
        late = self._still_running({rank for rank in at if told.get(at[rank])})
        doomed = {worker for rank, worker in at.items() if rank in late or worker not in told}
        for rank in late:
            self._client.run(_die, workers=[at[rank]], wait=False, on_error="ignore")
        first = self._workers[0]
        if self._port is not None and first in here and 0 not in late:
            there = {"workers": [first], "on_error": "ignore"}
            self._client.run(engine.stop_listening, self._port, **there)
        self._still_running(late)  # the next attempt must not get a worker that is being killed
        self._client.cancel([*self._tasks.values()], force=True)
        return doomed

    def _still_running(self, ranks: set[int]) -> set[int]:
        """Wait a while for ``ranks`` to end; return those that have not."""
        ends = time.monotonic() + engine.ENDING_SECONDS
        while ranks and time.monotonic() < ends:
            ranks -= self.outcomes(ranks, ends).keys()
        return ranks


async def _die() -> None:
    signal.raise_signal(signal.SIGKILL)


def _process() -> tuple[str, int]:
    return socket.gethostname(), os.getpid()
