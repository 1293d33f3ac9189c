"""A forked child has no group, cannot disturb its parent, and keeps no descriptor of it open."""

import functools
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.distributed.api.group import ProcessGroup
from flashlight_py.distributed.calls import journal
from tests.distributed.conformance import on_ranks

MANY = 1000  # open receives, which end at once in a child
VERBS: list[Callable[[ProcessGroup], Any]] = [
    lambda group: group.all_reduce(np.ones(3)),
    lambda group: group.all_reduce(np.ones((4, 4)).T[::2], async_op=True),
    lambda group: group.all_reduce_multiple([np.ones(3), np.ones(4)]),
    lambda group: group.broadcast(np.ones(3)),
    lambda group: group.all_gather(np.ones(3)),
    lambda group: group.send(np.ones(3), (group.rank + 1) % group.size),
    lambda group: group.irecv(np.ones(3), (group.rank + 1) % group.size),
    lambda group: group.all_gather_object("x"),
    lambda group: group.broadcast_object("x"),
    lambda group: group.new_group([0]),
    lambda group: group.split(0),
    lambda group: group.barrier(),
    lambda group: group.synchronize(),
]


def check_group_closed(call: Callable[[], Any], match: str) -> None:
    with pytest.raises(fl.errors.GroupClosedError, match=match):
        call()


def check_child(groups: list[ProcessGroup], works: list[Any]) -> None:
    assert not fl.is_distributed_init()
    assert (fl.get_world_rank(), fl.get_world_size()) == (0, 1)
    assert fl.all_reduce(np.full(3, 2.0)).tolist() == [2.0] * 3
    assert [group["ranks"] for group in journal.groups().values()] == [[0]]
    for work in works:
        check_group_closed(work.wait, "forked")
        assert work.is_completed()
        check_group_closed(work.result, "forked")
    for group in groups:
        for verb in VERBS:
            check_group_closed(functools.partial(verb, group), "forked")
        assert "closed" in repr(group)
    links = {os.readlink(fd.path) for fd in os.scandir("/proc/self/fd") if fd.is_symlink()}
    assert not [name for name in links if "memfd:flashlight" in name or "pidfd" in name]
    groups[0].close()
    groups.clear()
    works.clear()
    gc.collect()
    fl.new_group([0]).barrier()
    if multiprocessing.parent_process():  # the other child exits without atexit handlers
        fl.distributed_shutdown()


# Fresh ranks: otherwise shared arrays of other tests would stay open.
@on_ranks(("gloo", 3), ("shm", 3), ("hierarchical", 5), slow=[("mpi", 3)], fresh=True)
def test_forked_child_has_no_group_and_does_not_disturb_its_parent(rank: int, size: int) -> None:
    everyone = fl.new_group(range(size))
    part = everyone.new_group(range(size))
    after, before = (rank + 1) % size, (rank - 1) % size
    x, y, z = np.zeros(1000), np.zeros(5), np.full((4, 4), 1.0).T[::2]
    works = [everyone.irecv(x, before), everyone.all_reduce(z, async_op=True)]
    rooms = np.zeros((MANY, 2))
    works += [everyone.irecv(room, before, 8) for room in rooms]
    waiting = threading.Thread(target=everyone.recv, args=(y, before, 7))
    waiting.start()
    groups = [fl.distributed.start.world.current_world().group, everyone, part]
    child = os.fork()
    if child == 0:
        check_child(groups, works)
        sys.exit(0)  # runs the atexit handlers
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    process = multiprocessing.get_context("fork").Process(
        target=check_child, args=(list(groups), list(works))
    )
    process.start()
    process.join()
    assert process.exitcode == 0

    works.append(everyone.isend(np.full(5, float(rank)), after, 7))
    works += [everyone.isend(np.full(2, float(rank)), after, 8) for _ in rooms]
    sent = everyone.isend(np.full(1000, float(rank)), after)
    for work in (*works, sent):
        work.wait()
    waiting.join()
    assert np.all(x == before)
    assert np.all(y == before)
    assert np.all(rooms == before)
    assert np.all(z == size)
    for group in groups:
        assert group.all_reduce(np.full(2, 1.0)).tolist() == [group.size] * 2
    everyone.close()
    part.close()


def by_fork() -> int:
    child = os.fork()
    if child == 0:
        signal.pause()
    return child


def by_exec() -> int:
    """Start a program that inherits descriptors without close-on-exec."""
    return subprocess.Popen(["sleep", "1000"], close_fds=False).pid


@pytest.mark.parametrize("start", [by_fork, by_exec])
@on_ranks(("gloo", 2), ("shm", 2), lost=1, params={"TIMEOUT": 15})
def test_killed_rank_with_a_child_is_lost(rank: int, size: int, start: Callable[[], int]) -> None:
    group = fl.new_group(range(size))
    child = group.broadcast_object(start() if rank == 1 else None, root=1)
    group.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        with pytest.raises(fl.errors.PeerLostError):
            group.all_reduce(np.ones(3))
    finally:
        os.kill(child, signal.SIGKILL)  # it holds the pipes of the test harness
