"""What runs on the ranks in the tests of the MPI backend."""

import contextlib
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.distributed.backends.exchange import BackendStore
from flashlight_py.distributed.backends.mpi import verb_steps
from flashlight_py.distributed.backends.mpi.backend import MpiBackend
from flashlight_py.distributed.backends.mpi.joining import join
from flashlight_py.distributed.backends.shm import ShmBackend
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.rendezvous.store import Store, SubStore
from flashlight_py.distributed.start.world import current_world
from flashlight_py.distributed.verbs import ALL_GATHER, ALL_REDUCE, BARRIER
from tests.distributed.conformance import assert_equal, dtype_of, values
from tests.distributed.programs import run_program
from tests.distributed.told import first_error

TIMEOUT = 20.0


def backend() -> MpiBackend:
    found = current_world().group.backend()
    assert isinstance(found, MpiBackend)
    return found


def join_again(store: Store) -> MpiBackend:
    """Return another group of the ranks of ``store``."""
    return join(store, lambda: ShmBackend(store, TIMEOUT), TIMEOUT, True, gpu_aware=False)


def verbs_in_small_pieces(rank: int, size: int, program: Sequence[Any], limit: int) -> None:
    """As if MPI's counts ended at ``limit``."""
    before, verb_steps.LARGEST_BYTES = verb_steps.LARGEST_BYTES, limit
    try:
        run_program(rank, size, program)
        ring(rank, size, 5000)
    finally:
        verb_steps.LARGEST_BYTES = before


def ring(rank: int, size: int, count: int) -> None:
    x, y = values(rank, (count,), "float32"), np.zeros(count, np.float32)
    after, before = (rank + 1) % size, (rank - 1) % size
    sent, received = fl.isend(x, after, 9), fl.irecv(y, before, 9)
    assert received.wait() is y
    sent.wait()
    assert_equal(y, values(before, (count,), "float32"), f"{count} from before")


def messages_by_tag(rank: int, size: int, count: int) -> None:
    """Sent in one order, received in another; those of one tag keep theirs."""
    tags = [5, 7, 5, 2**31 - 1, 7]
    if rank == 0:
        works = [fl.isend(np.full(count, i), 1, tag) for i, tag in enumerate(tags)]
    elif rank == 1:
        order = [3, 1, 0, 4, 2]
        room = {i: np.zeros(count, int) for i in order}
        works = [fl.irecv(room[i], 0, tags[i]) for i in order]
    else:
        works = []
    fl.all_reduce(np.ones(10))  # messages do not wait for collectives, nor these for them
    for work in reversed(works):
        work.wait()
    if rank == 1:
        assert {i: set(x.tolist()) for i, x in room.items()} == {i: {i} for i in order}


def message_beside_a_collective(rank: int, size: int) -> None:
    """A message is received while this rank waits in a collective that needs the message."""
    x = np.zeros(100_000)
    if rank == 0:
        received = fl.irecv(x, 1, 3)
        fl.barrier()
        received.wait()
        assert np.all(x == 7)
    else:
        if rank == 1:
            fl.send(np.full(100_000, 7.0), 0, 3)
        fl.barrier()


def goes_on_in_the_background(rank: int, size: int) -> float:
    """Rank 0 starts and then does something else; nobody has to wait until it waits."""
    x = np.ones(100_000)
    started = time.monotonic()
    work = fl.all_reduce(x, async_op=True)
    if rank == 0:
        threading.Event().wait(2.0)
    work.wait()
    assert np.all(x == size)
    return time.monotonic() - started


def extremes(rank: int, size: int, name: str) -> list[bytes]:
    """NaN and zeros of both signs, whose order differs between ranks."""
    odd = [np.nan, -np.nan, 0.0, -0.0, np.inf, -np.inf, 1.0, -1.0]
    table = np.array([np.roll(odd, shift) for shift in range(size)])
    x, y = table[rank].astype(dtype_of(name)), table[rank].astype(dtype_of(name))
    fl.all_reduce(x, op="min")
    fl.all_reduce(y, op="max")
    np.testing.assert_array_equal(x.astype(table.dtype), np.minimum.reduce(table))
    np.testing.assert_array_equal(y.astype(table.dtype), np.maximum.reduce(table))
    return [x.tobytes(), y.tobytes()]


def half_of_the_world(rank: int, size: int) -> Any:
    """A group of the ranks 2 and 0, in this order; rank 1 only exchanges with them."""
    store = SubStore(BackendStore(backend()), [2, 0]) if rank != 1 else BackendStore(backend())
    if rank == 1:
        for _ in range(3):
            store.exchange(b"")
        fl.barrier()
        return None
    group = join_again(store)
    assert (group.rank, group.size) == ({2: 0, 0: 1}[rank], 2)
    x = np.full(3, float(rank))
    group.start(Call(ALL_REDUCE, x)).wait()
    gathered = group.start(Call(ALL_GATHER, np.array([rank]))).wait()
    group.close()
    fl.barrier()
    return x.tolist(), gathered.tolist()


def open_and_close(rank: int, size: int, times: int) -> int:
    """Groups whose ranks have all left are freed when the next one is made."""
    before = len(backend().progress._closed)
    for _ in range(times):
        group = join_again(BackendStore(backend()))
        group.start(Call(BARRIER)).wait()
        group.close()
        fl.barrier()
    return len(backend().progress._closed) - before


def world_again(rank: int, size: int, times: int) -> int:
    params = {"BACKEND": "mpi", "TIMEOUT": TIMEOUT}
    for _ in range(times):
        fl.distributed_shutdown()
        fl.distributed_init(fl.DistributedInit.MPI, params=params)
        x = np.ones(1000)
        fl.all_reduce(x, async_op=True)
        fl.sync_distributed()
        assert np.all(x == size)
    return threading.active_count()


def meet_as_strangers(rank: int, size: int, path: str) -> str:
    """Each of these processes is a world of its own to MPI."""
    params = {"BACKEND": "mpi", "FILE_PATH": path, "TIMEOUT": TIMEOUT}
    place = fl.DistributedInit.FILE_SYSTEM, rank, size
    return first_error(lambda: fl.distributed_init(*place, params))


def unchecked(rank: int, size: int) -> None:
    x = np.full(1000, rank + 1.0)
    fl.all_reduce(x)
    assert np.all(x == sum(range(size + 1)))
    fl.barrier()
    got = fl.all_gather(np.full(rank + 1, rank))
    assert np.array_equal(got, np.repeat(np.arange(size), np.arange(size) + 1))


def one_thread(rank: int, size: int) -> tuple[str, int]:
    """Without threads in MPI, operations advance while somebody waits."""
    arrays = [np.full(10 ** (i % 6), float(i + rank)) for i in range(12)]
    works = [fl.all_reduce(array, async_op=True) for array in arrays]
    ring(rank, size, 50_000)
    fl.sync_distributed()
    assert all(work.is_completed() for work in works)
    for i, array in enumerate(arrays):
        assert np.all(array == i * size + sum(range(size)))
    work = fl.all_reduce(np.ones(3), async_op=True)
    while not work.is_completed():  # each look makes it advance
        pass
    return fl.distributed.describe(), threading.active_count()


def describe(rank: int, size: int) -> tuple[str, str]:
    return fl.distributed.describe(), fl.distributed_backend().name


def wait_alone(rank: int, size: int, case: str) -> str:
    """Rank 0 waits for a message under a tag; rank 1 offers, or wants, another one."""
    if rank == 0:
        x = np.zeros(3)
        work = fl.irecv(x, 1, 5) if case == "recv" else fl.isend(x, 1, 5)
    else:
        other = np.zeros(3, np.int8)
        work = fl.isend(other, 0, 7) if case == "recv" else fl.irecv(other, 0, 7)
    try:
        work.wait()
    except fl.errors.DistributedError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def leave_early(rank: int, size: int) -> str:
    """Rank 1 closes the world without the others, who wait for it, and at once hear of it."""
    fl.barrier()
    if rank == 1:
        current_world().group.close()
        return ""
    started = time.monotonic()
    message = first_error(lambda: fl.all_reduce(np.zeros(10)))
    assert time.monotonic() - started < 5.0
    return message


def stop_in_the_middle(rank: int, size: int, how: str) -> str:
    """Rank 1 has agreed on a call, and does not do its part of what MPI moves then."""
    group, x = current_world().group, np.ones(100_000)
    if rank == 1:
        backend()._verb_steps._all_reduce = lambda call, _: _stop(how, group)
    started = time.monotonic()
    try:
        fl.all_reduce(x)
    except (KeyboardInterrupt, fl.errors.DistributedError) as error:
        assert how == "is stuck" or time.monotonic() - started < 5.0
        return f"{type(error).__name__}: {error}"
    return "no error"


def _stop(how: str, group: fl.ProcessGroup) -> Iterator[None]:
    if how == "is interrupted":
        raise KeyboardInterrupt
    if how == "raises":
        threading.Thread(target=_raise).start()
    if how == "leaves":
        threading.Thread(target=group.close).start()
    while True:
        yield


def _raise() -> None:
    with contextlib.suppress(ValueError), fl.abort_on_exception():
        raise ValueError("in another thread")


def leave_in_order(rank: int, size: int) -> list[float]:
    """Rank 0 has sent what it had to, and leaves, while another rank has yet to take its part."""
    x = np.full(10, float(rank + 1))
    if rank:
        broadcast = backend()._verb_steps._broadcast
        backend()._verb_steps._broadcast = lambda call, _: _late(broadcast(call, None))
    fl.broadcast(x, 0)
    current_world().group.close()
    return x.tolist()


def _late(steps: Iterator[None]) -> Iterator[None]:
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        yield
    yield from steps


def stay_away_unchecked(rank: int, size: int) -> str:
    """As ``stay_away`` of test_failures.py, where calls are not compared."""
    if rank == 1:
        time.sleep(2.0)
        with pytest.raises(fl.errors.CollectiveTimeoutError, match="a rank did not join"):
            fl.barrier()  # the others have given up
        return "stayed away"
    return first_error(lambda: fl.all_reduce(np.ones(10)))
