"""Ranks in the worker processes of a Dask cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from typing import Any, TypeVar

from flashlight_py.distributed.internal import this_process
from flashlight_py.engines import run as engine
from flashlight_py.engines.rank import ENDING_SECONDS, Start, end_rank, listen
from flashlight_py.launch.calls import SpawnCall

T = TypeVar("T")

# How long is waited for the end of ranks, in seconds: until their processes are gone.
_END_SECONDS = 2 * ENDING_SECONDS


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
    once. Their output is the worker's. Blocks until every rank has returned.

    Args:
        client: a ``distributed.Client`` that is not asynchronous.
        fn, args, params, timeout, max_restarts: as of ``spawn``; cloudpickle sends what a worker
            cannot import, and a restart waits 60 seconds at most for new workers.
        nprocs: number of ranks; default one for each worker.

    Raises:
        TypeError, ValueError: as of ``spawn``; or workers are too few, or threads of one process.
        RankFailedError: a rank raised, or its worker died; the first cause. The others were ended:
            verbs raise PeerLostError, Python code SystemExit; after 5 seconds the worker is killed.
        TimeoutError: ``timeout`` has passed, or no worker came back; the ranks have been ended.
    """
    size = len(client.nthreads()) if nprocs is None else nprocs

    def attempt(start: Start, call: SpawnCall) -> list[bytes]:
        return engine.follow(call, DaskRanks(client, call, start))

    return engine.run("dask.run", attempt, fn, args, size, params, timeout, max_restarts)


def _workers(client: Any, call: SpawnCall, restarts: int) -> list[str]:
    """Return the addresses of workers that are processes of their own, one for each rank."""
    found: list[str] = []

    def count() -> int:
        answers = _answers(client, call, this_process, on_error="ignore")  # of those not dead yet
        found[:] = sorted({process: worker for worker, process in answers.items()}.values())
        return len(found)

    advice = f"start more with processes=True, and call client.wait_for_workers({call.size})"
    engine.wait_for_room(call, restarts and engine.ROOM_SECONDS, count, "worker processes", advice)
    return found[: call.size]


def _answers(
    client: Any, call: SpawnCall, function: Callable[..., T], *args: Any, **at: Any
) -> Any:
    """Return what ``function`` returns on workers; one that is stopped does not, and time is up."""
    try:
        return client.run(function, *args, callback_timeout=engine.seconds_until(call.ends), **at)
    except asyncio.TimeoutError:
        raise call.late(range(call.size)) from None


class DaskRanks:
    """A task for each rank, which nothing of Dask can end once it runs."""

    def __init__(self, client: Any, call: SpawnCall, start: Start) -> None:
        self._client, self._call, self._start = client, call, start
        self._workers, self._tasks = _workers(client, call, start.restarts), dict[int, Any]()

    def start(self) -> None:
        start, first, hosts = self._start, self._workers[0], [*map(engine.host_of, self._workers)]
        listening = (listen, start.key, hosts[0], hosts)
        where = _answers(self._client, self._call, *listening, workers=[first])
        for rank, worker in enumerate(self._workers):
            pinned = {"workers": [worker], "retries": 0, "key": f"{start.key}-{rank}"}
            self._tasks[rank] = self._client.submit(start.serve, rank, where[first], **pinned)

    def outcomes(self, ranks: Set[int], until: float) -> engine.Outcomes:
        """Wait a moment for a rank of ``ranks`` to end; return the outcomes of all that ended."""
        import distributed

        seconds = min(engine.LOOK_SECONDS, max(until - time.monotonic(), 0.0))
        with suppress(asyncio.TimeoutError):
            distributed.wait([self._tasks[rank] for rank in ranks], seconds, "FIRST_COMPLETED")
        living, found = self._client.nthreads(), engine.Outcomes()
        for rank in ranks:
            task, worker = self._tasks[rank], self._workers[rank]
            if worker not in living:  # Dask would wait for it, and run the task again
                found[rank] = engine.lost(f"its worker {worker} was killed or has ended")
            elif task.status == "finished":
                found[rank] = task.result()
            elif task.done():
                found[rank] = engine.lost(f"its worker {worker} failed: {task.exception()}")
        return found

    def end(self) -> None:
        """End the ranks that run, and those that begin later."""
        done = {rank for rank, task in self._tasks.items() if task.done()}
        living, runs = self._client.nthreads(), dict[str, bool]()  # to ask a dead one takes 30 s
        at = {r: each for r, each in enumerate(self._workers) if r not in done and each in living}
        asked = {"on_error": "ignore", "callback_timeout": _END_SECONDS, "workers": [*at.values()]}
        with suppress(asyncio.TimeoutError):  # one is stopped; the others have ended by then
            runs = self._client.run(end_rank, self._start.key, **asked)
        late, ends = {r for r in at if runs.get(at[r])}, time.monotonic() + _END_SECONDS
        while late and time.monotonic() < ends:  # the next attempt must not get its worker
            late -= self.outcomes(late, ends).keys()
        self._client.cancel([*self._tasks.values()], force=True)
