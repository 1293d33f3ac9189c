"""Several threads, or tasks of asyncio, that wait: each gets its result, when it is there."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.distributed.conformance import on_ranks, ranks_in

# Large enough to be reduced and brought home while the threads wake up.
SIDE = 300
ROUNDS = 10

ranks = ranks_in(("gloo", 3), ("shm", 3), ("hierarchical", 5), ("mpi", 3))


@on_ranks()
def test_each_of_two_threads_gets_the_whole_result(rank: int, size: int) -> None:
    total = size * (size + 1) / 2
    with ThreadPoolExecutor(2) as threads:
        for _ in range(ROUNDS):
            strided = np.full((SIDE, SIDE), rank + 1.0).T[::2]
            work = fl.all_reduce(strided, async_op=True)

            def reduced(work: Any = work) -> float:
                return float(work.wait().min())  # at once: it must be all there by then

            waits = [threads.submit(reduced) for _ in range(2)]
            assert [wait.result(30) for wait in waits] == [total] * 2

            pair = [np.full((SIDE, SIDE), rank + 1.0).T[::2], np.full(7, rank + 1.0)]
            several = fl.all_reduce_multiple(pair, async_op=True, contiguous=True)

            def both_reduced(work: Any = several) -> list[float]:
                return [float(x.min()) for x in work.wait()]

            waits_of_both = [threads.submit(both_reduced) for _ in range(2)]
            assert [wait.result(30) for wait in waits_of_both] == [[total] * 2] * 2

            gathered = fl.all_gather(np.full(SIDE, rank), async_op=True)
            found = [wait.result(30) for wait in [threads.submit(gathered.wait) for _ in range(2)]]
            assert all(np.array_equal(x, np.repeat(np.arange(size), SIDE)) for x in found)


async def await_while_other_tasks_run(rank: int, size: int) -> None:
    total, strided = size * (size + 1) / 2, np.full((SIDE, SIDE), rank + 1.0).T[::2]
    if rank:  # the last rank joins after a message that rank 0 sends while it awaits
        if rank == size - 1:
            fl.recv(np.empty(1), 0)
        assert (await fl.all_reduce(strided, async_op=True)).min() == total
    else:
        reduced = asyncio.ensure_future(fl.all_reduce(strided, async_op=True))
        await asyncio.sleep(0)
        assert not reduced.done()
        fl.send(np.ones(1), size - 1)
        assert (await reduced) is strided
        assert strided.min() == total
    every = [fl.all_gather(np.full(k, rank), async_op=True) for k in range(1, 6)]
    gathered = await asyncio.gather(*every)
    assert [len(x) for x in gathered] == [size * k for k in range(1, 6)]
    work = fl.irecv(np.empty(1), (rank - 1) % size)
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(work, 0.01)
    fl.barrier()
    fl.isend(np.array([float(rank)]), (rank + 1) % size)
    assert await work == (rank - 1) % size
    with pytest.raises(fl.errors.MismatchError):
        await fl.all_reduce(np.ones(rank + 1), async_op=True)


@on_ranks()
def test_await_does_not_block_the_event_loop(rank: int, size: int) -> None:
    asyncio.run(await_while_other_tasks_run(rank, size))
