"""Memory that other processes cannot read: it goes through shared memory, and nobody is lost."""

import ctypes
import mmap
import os
import platform
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.distributed.harness import run_ranks

_LIBC = ctypes.CDLL(None, use_errno=True)
_MEMFD_SECRET = 447  # on all architectures
_PR_SET_DUMPABLE = 4
_CAP_SYS_PTRACE = 19
_CAPABILITY_VERSION = 0x20080522

# Long enough to be read from the other's memory, and for several pieces of the other way.
COUNT = 600_000
# Calls of one kind take turns, to begin with, in how they move the data.
TURNS = 3


def secret(count: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return an array that no other process can read, and the kernel neither."""
    file = _LIBC.syscall(_MEMFD_SECRET, 0)
    if file < 0:
        raise OSError(ctypes.get_errno(), "memfd_secret")
    os.ftruncate(file, 4 * count)
    room = mmap.mmap(file, 4 * count)
    os.close(file)
    return np.frombuffer(room, np.int32)


def can_keep_secrets() -> bool:
    try:
        secret(1024)
    except OSError:  # the kernel lacks it, or this user may lock no memory
        return False
    return True


def filled(array: Any, rank: int) -> Any:
    array[...] = np.arange(array.size) % 1000 + rank
    return array


def broadcast(group: Any, x: Any, rank: int) -> Any:
    y = x if rank == 1 else np.empty(COUNT, np.int32)
    return group.broadcast(y, root=1), filled(np.empty_like(x), 1)


def reduce(group: Any, x: Any, rank: int) -> Any:
    y = group.reduce(x.copy() if rank == 0 else x, root=0)
    return (y, y) if rank else (y, expected_sum(group.size))


def expected_sum(size: int) -> Any:
    return sum(filled(np.empty(COUNT, np.int32), rank) for rank in range(size))


def reduce_scatter(group: Any, x: Any, rank: int) -> Any:
    return group.reduce_scatter(x), np.split(expected_sum(group.size), group.size)[rank]


def all_gather(group: Any, x: Any, rank: int) -> Any:
    each = [filled(np.empty_like(x), r) for r in range(group.size)]
    return group.all_gather(x), np.concatenate(each)


def scatter(group: Any, x: Any, rank: int) -> Any:
    whole = x.reshape(group.size, -1)
    parts = filled(np.empty_like(x), 1).reshape(group.size, -1)
    return group.scatter(whole if rank == 1 else None, 1), parts[rank]


def all_to_all(group: Any, x: Any, rank: int) -> Any:
    each = [np.split(filled(np.empty_like(x), r), group.size)[rank] for r in range(group.size)]
    return group.all_to_all(x), np.concatenate(each)


def message(group: Any, x: Any, rank: int) -> Any:
    got = np.empty(COUNT, np.int32)
    if rank == 1:
        group.send(x, 0)
    elif rank == 0:
        return group.recv(got, 1), filled(np.empty_like(x), 1)
    return got, got


def exchange(group: Any, x: Any, rank: int) -> Any:
    got = np.empty(COUNT, np.int32)
    left, right = (rank - 1) % group.size, (rank + 1) % group.size
    return group.sendrecv(x, right, out=got, src=left), filled(np.empty_like(x), left)


VERBS: list[Callable[[Any, Any, int], Any]] = [
    *(broadcast, reduce, reduce_scatter, all_gather, scatter, all_to_all, message, exchange)
]


def move_secrets(rank: int, size: int, owners: tuple[int, ...]) -> list[str]:
    """Call each verb in a new group, as one that has failed to read once does not try again."""
    x = filled(secret(COUNT) if rank in owners else np.empty(COUNT, np.int32), rank)
    wrong = []
    for verb in VERBS:
        with fl.new_group(range(size)) as group:
            for turn in range(TURNS):
                got, expected = verb(group, x, rank)
                if not np.array_equal(np.ravel(got), np.ravel(expected)):
                    wrong.append(f"{verb.__name__} {turn}")
            group.barrier()
    return wrong


@pytest.mark.skipif(not can_keep_secrets(), reason="needs memfd_secret (Linux 5.14, x86 or ARM)")
@pytest.mark.parametrize(("size", "owners"), [(2, (1,)), (3, (0, 1, 2))])
def test_secret_memory_is_moved_by_every_verb(
    pool: Any, size: int, owners: tuple[int, ...]
) -> None:
    assert pool(size, params={"BACKEND": "shm"}).run(move_secrets, owners) == [[]] * size


def give_up_reading_by_right() -> None:
    """Root may read every process; from here on this one is as any other user's."""
    words = (ctypes.c_uint32 * 6)()
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    assert _LIBC.capget(header, words) == 0
    for index in range(3):
        words[index] &= ~(1 << _CAP_SYS_PTRACE)
    assert _LIBC.capset(header, words) == 0


def become_undumpable(rank: int, size: int) -> list[bool]:
    give_up_reading_by_right()
    fl.barrier()
    right = []
    for turn in range(5 * TURNS):
        if turn == TURNS and rank == 1:
            assert _LIBC.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) == 0
        got = fl.all_gather(np.full(COUNT, rank, np.int32))
        right.append(bool((got.reshape(size, -1) == np.arange(size)[:, None]).all()))
    return right


@pytest.mark.skipif(platform.system() != "Linux", reason="needs prctl and capset")
def test_a_process_that_becomes_undumpable_is_not_lost() -> None:
    results = run_ranks(become_undumpable, 2, params={"BACKEND": "shm"})
    assert results == [[True] * 5 * TURNS] * 2
