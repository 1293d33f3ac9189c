"""Groups without close() end when they are no longer needed, at the latest in the shutdown."""

import gc
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cffi
import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.distributed import backend as backends
from flashlight_py.distributed.groups import membership
from flashlight_py.parallel import functional
from tests.distributed.conformance import on_ranks, ranks_in, two_hosts
from tests.distributed.harness import run_ranks

ranks = ranks_in(("gloo", 2), ("shm", 2), slow=[("hierarchical", 4), ("mpi", 2)])


def held() -> tuple[int, int]:
    """Return the numbers of descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def drop_groups(rank: int, size: int, count: int) -> None:
    for _ in range(count):
        group = fl.new_group(range(size))
        assert group.all_reduce(np.full(3, rank + 1.0))[0] == size * (size + 1) / 2
        group.all_reduce(np.ones((40, 40)).T[::2], async_op=True).wait()  # runs on a thread


def count_held(rank: int, size: int) -> tuple[int, int]:
    end = time.monotonic() + 20
    while backends.dropped and time.monotonic() < end:  # their messages end without a call
        membership.close_dropped()
        time.sleep(0.001)
    fl.barrier()
    return held()


@on_ranks()
def test_next_call_closes_a_dropped_group(rank: int, size: int) -> None:
    drop_groups(rank, size, 2)
    fl.barrier()
    before = held()
    drop_groups(rank, size, 15)
    fl.barrier()
    # The world may have one more thread for its messages, and one group may still be open.
    assert all(now < then + 8 for then, now in zip(before, held(), strict=True)), (before, held())


def cycle(group: Any) -> None:
    holder = [group]
    holder.append(holder)


@pytest.mark.parametrize("source", [1, None])
@on_ranks()
def test_dropped_group_stays_open_while_an_operation_runs(
    rank: int, size: int, source: int | None
) -> None:
    got, last = np.zeros(1000), size - 1
    group = fl.new_group([0, last])
    if rank == 0:
        work = group.irecv(got, source)
        cycle(group)
    if rank != last:
        del group
    gc.collect()
    fl.barrier()  # closes dropped groups without pending operations
    if rank == last:
        group.isend(np.ones(1000), 0)  # the Work is dropped
        cycle(group)
        del group
        gc.collect()
    fl.barrier()
    if rank == 0:
        assert np.all(work.wait() == 1)
        assert work.source == 1
    fl.barrier()


def used(group: fl.ProcessGroup) -> fl.ProcessGroup:
    """Return ``group`` after calls of every kind, whose resources must be freed with it."""
    group.all_reduce(np.ones(3))
    group.all_reduce(np.ones((40, 40)).T[::2], async_op=True).wait()
    functional.all_reduce(fl.param(np.ones(3)), group=group)
    return group


def closed(group: fl.ProcessGroup) -> fl.ProcessGroup:
    group.close()
    return group


FREED: dict[str, Callable[[fl.ProcessGroup], Any]] = {
    "a group": used,
    "a closed group": lambda group: closed(used(group)),
    "a group and one of its parts": lambda group: [group, used(group.new_group(range(group.size)))],
    "a shared array": lambda group: group.shared_empty(3),
    "a received array": lambda group: group.all_gather(np.ones(2 + group.rank)),
    "a scattered array": lambda group: group.scatter(
        np.ones((group.size, 3)) if group.rank == 0 else None
    ),
    "messages that nobody waits for": lambda group: group.batch_isend_irecv(
        [fl.P2POp(kind, np.ones(3), group.size - 1 - group.rank) for kind in ("send", "recv")]
    ),
}


def free_under_ctrl_c(rank: int, size: int, kind: str) -> None:
    """Raise SIGINT first. The next Python code of the process runs its handler."""
    lost: list[Any] = []
    sys.unraisablehook = lost.append
    library = cffi.FFI()
    library.cdef("int raise(void *);")  # takes a number, which is passed as a pointer
    press = getattr(library.dlopen(None), "raise")
    group = fl.new_group(range(size))
    held_by = [FREED[kind](group), library.gc(library.cast("void *", signal.SIGINT), press)]
    if not isinstance(held_by[0], fl.ProcessGroup | list):
        held_by.insert(0, group)
    del group
    try:
        with pytest.raises(KeyboardInterrupt):
            held_by.clear()  # in reverse order
    finally:
        sys.unraisablehook = sys.__unraisablehook__
    assert lost == []
    fl.barrier()


def test_ctrl_c_is_raised_if_it_arrives_while_an_object_is_freed(ranks: Any) -> None:
    ranks.run_each(free_under_ctrl_c, [(kind,) for kind in FREED])
    before = ranks.run(count_held)
    ranks.run_each(free_under_ctrl_c, [(kind,) for kind in FREED] * 2)
    for then, now in zip(before, ranks.run(count_held), strict=True):
        assert now[0] < then[0] + 8
        assert now[1] < then[1] + 8  # the world may have one more thread


class _Interrupted:
    closed = 0

    def is_busy(self) -> bool:
        return False

    def close(self) -> None:
        self.closed += 1
        if self.closed == 1:
            raise KeyboardInterrupt


def test_group_is_closed_later_if_its_closing_was_interrupted() -> None:
    backend, group = _Interrupted(), fl.ProcessGroup(None)
    reference = weakref.ref(group, backends.dropped.append)
    membership._watched[reference] = membership.OpenGroup([backend])
    del group
    with pytest.raises(KeyboardInterrupt):
        membership.close_dropped()
    membership.close_dropped()
    assert backend.closed == 2
    membership.close_dropped()
    assert backend.closed == 2
    assert not backends.dropped


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@on_ranks(("shm", 2), fresh=True, init=None)
def test_shutdown_closes_every_group(rank: int, size: int, tmp_path: Path, backend: str) -> None:
    def world(number: int) -> Any:
        params = {"FILE_PATH": str(tmp_path / f"meet{number}"), "BACKEND": backend}
        fl.distributed_init(fl.DistributedInit.FILE_SYSTEM, rank, size, params)
        fl.new_group(range(size)).all_reduce(np.ones((40, 40)).T[::2], async_op=True)
        inner = fl.new_group(range(size)).new_group(range(size))  # the parent is dropped
        assert inner.all_reduce(np.ones(3))[0] == size
        fl.distributed_shutdown()
        assert (fl.get_world_rank(), fl.get_world_size()) == (0, 1)
        assert not fl.is_distributed_init()
        assert fl.all_reduce(np.ones(2))[0] == 1
        return inner

    world(0)
    before = held()
    kept = [world(number) for number in range(1, 4)]
    assert held() == before
    assert list(tmp_path.iterdir()) == []
    for group in kept:
        with pytest.raises(fl.errors.GroupClosedError):
            group.barrier()


CYCLES = int(os.environ.get("CYCLES", "12"))
# Cycles until caches are filled and the allocator has its final size.
WARM = 15
# Kilobytes by which the allocator may still grow.
SLACK = 1500


def holdings() -> dict[str, int]:
    gc.collect()
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    memory, threads = (int(fields[name].split()[0]) for name in ("RssAnon", "Threads"))
    return {"memory": memory, "threads": threads, "descriptors": len(os.listdir("/proc/self/fd"))}


def growth(rank: int, size: int, params: dict[str, Any]) -> dict[str, int]:
    held = {}
    for number in range(1, WARM + CYCLES + 1):
        fl.distributed_init(fl.DistributedInit.FILE_SYSTEM, rank, size, params)
        fl.all_reduce(np.ones(1000, np.float32))
        fl.distributed_shutdown()
        if number == WARM:
            held = holdings()
    return {name: end - held[name] for name, end in holdings().items()}


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", "shm", "hierarchical"])
def test_init_and_shutdown_release_resources(tmp_path: Path, backend: str) -> None:
    params: dict[str, Any] = {"FILE_PATH": str(tmp_path / "meeting")}
    if backend != "hierarchical":
        params["BACKEND"] = backend
    env = two_hosts if backend == "hierarchical" else None
    for grown in run_ranks(growth, 3, params, init=None, env=env, deadline=60.0 + CYCLES):
        assert grown["descriptors"] <= 0
        assert grown["threads"] <= 0
        assert grown["memory"] < max(SLACK, CYCLES)
    assert list(tmp_path.iterdir()) == []
