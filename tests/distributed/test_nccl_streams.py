"""Pending NCCL collectives, mismatches and lost ranks, with stand-ins for a GPU."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py import _native
from flashlight_py.distributed.backends.nccl.backend import NcclBackend
from flashlight_py.distributed.backends.nccl.communicator import Communicator
from flashlight_py.distributed.backends.nccl.library import Launcher, NcclLibrary
from flashlight_py.distributed.backends.nccl.streams import DeviceFlight, Flights
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.constants import ReduceOp
from flashlight_py.distributed.start.world import current_world
from flashlight_py.distributed.verbs import ALL_REDUCE, BROADCAST, REDUCE, REDUCE_SCATTER
from flashlight_py.errors import MismatchError, PeerLostError
from tests import cupy_stand_in
from tests.cupy_stand_in import Event, StandInCupy, Stream
from tests.distributed import nccl_stand_in
from tests.distributed.conformance import on_ranks, raises
from tests.distributed.nccl_stand_in import StandInLibrary
from tests.distributed.test_nccl_failures import IN_PROGRESS, Cpu, Nccl, communicator

BEGINNING = {"ncclAllReduce", "ncclReduce", "ncclReduceScatter", "ncclBroadcast", "ncclGroupEnd"}
ALWAYS = {"ncclCommGetAsyncError", "ncclGetErrorString", "ncclGetLastError", "ncclCommAbort"}


class Strict(Nccl):
    """An NCCL that is in progress for two polls after each call that starts an operation."""

    def __init__(self) -> None:
        super().__init__()
        self.questions = self.depth = 0

    def __getattribute__(self, name: str) -> Any:
        function = super().__getattribute__(name)
        if not name.startswith("nccl") or not callable(function) or name in ALWAYS:
            return function

        def call(*arguments: Any) -> int:
            assert not self.questions, f"{name} before what was called has begun"
            self.depth += {"ncclGroupStart": 1, "ncclGroupEnd": -1}.get(name, 0)
            status: int = function(*arguments)
            if name in BEGINNING and not self.depth:
                self.questions, status = 2, IN_PROGRESS
            return status

        return call

    def ncclCommGetAsyncError(self, comm: Any, state: Any) -> int:
        state[0] = IN_PROGRESS if self.questions else 0
        self.questions = max(0, self.questions - 1)
        return 0


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "a sum": lambda b, x: b.start(Call(ALL_REDUCE, x(), ReduceOp.SUM, 1.0, blocking=False)),
    "a scaled sum": lambda b, x: b.start(Call(ALL_REDUCE, x(), ReduceOp.SUM, 0.5, blocking=False)),
    "a product that is scaled afterwards": lambda b, x: b.start(
        Call(ALL_REDUCE, x(), ReduceOp.PROD, 0.5, blocking=False)
    ),
    "one that is widened": lambda b, x: b.start(Call(ALL_REDUCE, x("int16"))),
    "several": lambda b, x: b.start_many(
        [Call(ALL_REDUCE, a, scale=0.25, blocking=False) for a in (x(), x("int16"), x())]
    ),
    "onto a root": lambda b, x: b.start(Call(REDUCE, x(), ReduceOp.MAX, blocking=False)),
    "parts": lambda b, x: b.start(Call(REDUCE_SCATTER, x(), blocking=False)),
    "a broadcast": lambda b, x: b.start(Call(BROADCAST, x())),
}


@pytest.mark.parametrize("name", CALLS)
def test_call_waits_until_the_last_call_began(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cupy, nccl = StandInCupy(1), Strict()
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    for kind, method in ((Event, "record"), (Stream, "wait_event"), (Stream, "__enter__")):
        monkeypatch.setattr(kind, method, after_it_has_begun(nccl, getattr(kind, method)))
    backend = NcclBackend(Cpu(), communicator(nccl, 30.0), cupy, 0)
    for _ in range(2):  # the second call finds the cached scaled sum
        CALLS[name](backend, lambda dtype="float32": cupy.asarray(np.ones(4, dtype))).wait()
    backend.close()
    assert BEGINNING & set(nccl.calls)


def after_it_has_begun(nccl: Strict, method: Callable[..., Any]) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        assert not nccl.questions, "given to the stream before NCCL has given its own part"
        return method(*arguments)

    return call


LIBRARY = r"""
#include <stddef.h>
#include <string.h>
typedef struct { char internal[128]; } ncclUniqueId;
typedef struct {
  size_t size;
  unsigned magic, version;
  int blocking, cga, least, most;
  const char *name;
  int share;
} ncclConfig_t;
static int communicator, child, asked;

static int is_right(const ncclConfig_t *config, int blocking) {
  return config->magic == 0xcafebeef && config->blocking == blocking && config->share == 1 &&
         config->cga == -2147483647 - 1 && !config->name && config->size == sizeof *config;
}
int ncclCommInitRankConfig(void **comm, int ranks, ncclUniqueId id, int rank,
                           ncclConfig_t *config) {
  int right = ranks == 5 && rank == 3 && is_right(config, 0);
  for (int i = 0; i < 128; i++) right = right && id.internal[i] == (char)i;
  *comm = &communicator;
  return right ? 7 : 4;
}
int ncclCommSplit(void *comm, int color, int key, void **made, ncclConfig_t *config) {
  *made = &child;
  return comm == &communicator && !color && key == 3 && is_right(config, 1) ? 0 : 4;
}
int ncclCommGetAsyncError(void *comm, int *state) {
  *state = comm == &communicator ? (asked++ < 3 ? 7 : 0) : 4;
  return 0;
}
int ncclRedOpCreatePreMulSum(int *op, void *scalar, int type, int residence, void *comm) {
  float quarter = 0.25f;
  *op = 0x7abc1234; /* such numbers have the operations that users create */
  return !memcmp(scalar, &quarter, 4) && type == 7 && residence == 1 && comm == &child ? 0 : 4;
}
int ncclCommFinalize(void *comm) { return comm == &communicator || comm == &child ? 0 : 4; }
int ncclCommDestroy(void *comm) { return 0; }
int ncclCommAbort(void *comm) { return 0; }
const char *ncclGetErrorString(int status) { return "wrong arguments"; }
const char *ncclGetLastError(void *comm) { return ""; }
"""


def test_launcher_passes_arguments_as_declared_in_c(tmp_path: Path) -> None:
    if shutil.which("cc") is None:
        pytest.skip("needs a C compiler")
    source, built = tmp_path / "nccl.c", tmp_path / "libnccl.so"
    source.write_text(LIBRARY)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", built, source], check=True)
    ffi = _native.load_extension("nccl").ffi
    nccl = NcclLibrary(ffi, ffi.dlopen(str(built)), str(built), 23203)
    made = Communicator(nccl, bytes(range(128)), 3, 5, 30.0)
    assert made.scaled_sum("all_reduce", 0.25, "float32", nccl.lib.ncclFloat32) == OP
    made.close()
    assert made.broken is None


FROM, TO, COUNT, FLOAT, OP, PEER = 0x7F0000001000, 0x7F0000002000, 1 << 40, 7, 0x7ABC1234, 2
ENDS = COMM, STREAM = 0x99, 0x55
LAUNCHED = [
    ("ncclAllReduce", FROM, TO, COUNT, FLOAT, OP, *ENDS),
    ("ncclReduceScatter", FROM, TO, COUNT, FLOAT, OP, *ENDS),
    ("ncclReduce", FROM, TO, COUNT, FLOAT, OP, PEER, *ENDS),
    ("ncclBroadcast", FROM, TO, COUNT, FLOAT, PEER, *ENDS),
    ("ncclAllGather", FROM, TO, COUNT, FLOAT, *ENDS),
    ("ncclSend", FROM, COUNT, FLOAT, PEER, *ENDS),
    ("ncclRecv", TO, COUNT, FLOAT, PEER, *ENDS),
]


class Noting:
    """Functions of NCCL and the driver that record the arguments from C."""

    def __init__(self) -> None:
        self.callbacks: list[Any] = []
        self.log: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        cast = _native.load_extension("nccl").ffi.cast

        def note(*arguments: Any) -> int:
            self.log.append((name, *(int(cast("uintptr_t", argument)) for argument in arguments)))
            return 0

        return note


@pytest.mark.parametrize("is_group", [False, True])
def test_launcher_calls_nccl_between_the_events_of_two_streams(is_group: bool) -> None:
    """The communication stream waits for the caller's stream 0x66, which then waits for it."""
    ffi = _native.load_extension("nccl").ffi
    for kind, call in enumerate(LAUNCHED):
        lib = Noting()
        launcher = Launcher(StandInLibrary(ffi, lib, "stand-in", 23203), STREAM, 0x77)
        steps = launcher.steps([(kind, FROM, TO, COUNT, FLOAT, OP, PEER)])
        comm = ffi.cast("ncclComm_t", COMM)
        assert launcher.launch(comm, is_group, steps, 0x66, 0x88, True) == 0
        assert lib.log == [
            *(("cuEventRecord", 0x77, 0x66), ("cuStreamWaitEvent", STREAM, 0x77, 0)),
            *([("ncclGroupStart",), call, ("ncclGroupEnd",)] if is_group else [call]),
            *(("cuEventRecord", 0x88, STREAM), ("cuStreamWaitEvent", 0x66, 0x88, 0)),
        ]


class Landed(Event):
    """An event that is done when ``ends`` is set. Another thread runs while CUDA is asked."""

    ends = True

    @property
    def done(self) -> bool:
        time.sleep(0)
        return self.ends

    @done.setter
    def done(self, _: bool) -> None:
        pass


def test_flights_are_removed_once_if_several_threads_check() -> None:
    """The watchdog removes ended flights, and so does each thread that adds or checks a flight."""
    flights, ended = Flights(Landed() for _ in range(4)), threading.Event()

    def ask() -> None:
        while not ended.is_set():
            flights.oldest()

    def take() -> Landed:
        while (event := flights.free_event()) is None:
            pass
        result: Landed = event
        return result

    with ThreadPoolExecutor(3) as threads:
        futures = [threads.submit(ask) for _ in range(3)]
        try:
            for _ in range(200):
                flights.add(DeviceFlight("all_reduce", take(), [np.ones(1)]))
                flights.newest()
            last = DeviceFlight("all_reduce", take(), [np.ones(1)])
            last.event.ends = False
            flights.add(last)
        finally:
            ended.set()
    assert [future.result() for future in futures] == [None] * 3
    assert flights.oldest() is flights.newest() is last
    assert len(flights._events) == 3


def test_time_limit_starts_after_the_previous_collective_has_ended() -> None:
    """Many collectives may be queued on the device, each shorter than the time limit."""
    flights = Flights(Event() for _ in range(2))
    for _ in range(2):
        event = flights.free_event()
        event.done = False
        flights.add(DeviceFlight("all_reduce", event, ()))
    first, second = flights.oldest(), flights.newest()
    assert first.start_time(flights.last_end) == first.started
    first.event.done = True
    assert flights.oldest() is second
    assert second.start_time(flights.last_end) == first.ended
    assert first.ended is not None
    assert first.ended > second.started


def test_flights_have_no_free_event_if_all_are_in_use() -> None:
    flights = Flights(Landed() for _ in range(2))
    held = [DeviceFlight("all_reduce", flights.free_event(), []) for _ in range(1)]
    held[0].event.ends = False
    flights.add(held[0])
    held.append(DeviceFlight("all_reduce", flights.free_event(), []))
    flights.add(held[1])  # ends before the first, and is not checked before it
    assert flights.free_event() is None
    held[0].event.ends = True
    assert flights.free_event() is held[0].event


class Stuck(nccl_stand_in.StandInNccl):
    """An NCCL that starts everything, and whose communicator can be aborted."""

    def _do(self, name: str, *arguments: Any) -> int:
        return 0


def gpus(group: Any) -> Any:
    """Connect the stand-ins of GPUs, and return a module that creates arrays on them."""
    nccl_stand_in.install(group.backend()).__class__ = Stuck
    cupy_stand_in.Event.ends_at_once = False
    group.join_gpus()
    import cupy

    return cupy


def finish(group: Any, verb: Any, *args: Any) -> None:
    """Call and wait: otherwise the host does not wait."""
    verb(*args)
    group.synchronize()


DIFFERENT: dict[str, Any] = {
    "dtype": lambda g, cp, rank: g.all_reduce(cp.zeros(3, "float32" if rank else "float64")),
    "shape": lambda g, cp, rank: g.all_reduce(cp.zeros((2, 3) if rank else (3, 2))),
    "op": lambda g, cp, rank: g.all_reduce(cp.zeros(3), op="max" if rank else "min"),
    "root": lambda g, cp, rank: g.broadcast(cp.zeros(3), root=min(rank, 1)),
    "verb": lambda g, cp, rank: (g.reduce if rank else g.all_reduce)(cp.zeros(3)),
    "a verb of the CPU": lambda g, cp, rank: (g.all_gather if rank else g.all_reduce)(cp.zeros(3)),
}


@on_ranks(("shm", 2), fresh=True)
def test_mismatch_aborts_nccl_and_raises_on_every_rank(rank: int, size: int) -> None:
    for name, call in DIFFERENT.items():
        group = fl.new_group(range(size))
        cp = gpus(group)
        group.all_reduce(cp.zeros(7), async_op=True)  # equal on all ranks
        started = time.monotonic()
        which = f"rank {rank} of 2: the ranks made different calls in call 2 of"
        with raises(MismatchError, which, "rank 0 called ", "rank 1 called ") as caught:
            finish(group, call, group, cp, rank)
        assert time.monotonic() - started < 5, name
        assert str(caught.value).count("test_nccl_streams.py:") == 2
        with pytest.raises(fl.errors.GroupClosedError, match="made different calls"):
            group.all_reduce(cp.zeros(3))


@on_ranks(("hierarchical", 3), fresh=True)
def test_mismatch_between_hosts_raises_on_every_rank(rank: int, size: int) -> None:
    world = current_world().group
    cp = gpus(world)
    calls = "ranks 0, 1 called all_reduce(cupy float64 (3,)", "rank 2 called all_reduce(cupy flo"
    with raises(MismatchError, f"call 1 of this group: {calls[0]}", calls[1]):
        finish(world, fl.all_reduce, cp.zeros(3 if rank < 2 else 4))


@on_ranks(("shm", 2), fresh=True)
def test_barrier_during_a_reduction_is_reported_once(rank: int, size: int) -> None:
    """The shutdown does not raise an error that was raised before."""
    world = current_world().group
    cp = gpus(world)
    call = (fl.barrier,) if rank == 0 else (fl.all_reduce, cp.zeros(3))
    calls = "rank 0 called barrier()", "rank 1 called all_reduce(cupy float64 (3,)"
    with raises(MismatchError, *calls):
        finish(world, *call)
    fl.distributed_shutdown()


@pytest.mark.parametrize(
    ("ranks", "has_called"), [(("shm", 2), True), (("gloo", 2), False)], indirect=["ranks"]
)
@on_ranks(lost=1)
def test_dead_rank_raises_peer_lost_error_soon(rank: int, size: int, has_called: bool) -> None:
    """Rank 1 is killed before or after its call. No operation on the CPU waits for it."""
    world = current_world().group
    cp = gpus(world)
    if has_called:
        world.all_reduce(cp.zeros(3), async_op=True)
        fl.all_reduce(np.ones(1))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    call = world.gpus.synchronize if has_called else lambda: fl.all_reduce(cp.zeros(3))
    why = "its process has ended)" if has_called else ""
    with raises(PeerLostError, f"lost rank 1 ({why}", ", which is process "):
        finish(world, call)
    assert time.monotonic() - started < 2


@on_ranks(("shm", 2), slow=[("gloo", 2), ("hierarchical", 3)], fresh=True)
def test_exception_of_another_rank_ends_pending_collectives(rank: int, size: int) -> None:
    """The last rank raises after all ranks have called, and its process continues."""
    world = current_world().group
    cp = gpus(world)
    world.all_reduce(cp.zeros(3), async_op=True)
    fl.all_reduce(np.ones(1))
    started = time.monotonic()
    if rank == size - 1:
        with pytest.raises(ZeroDivisionError), fl.abort_on_exception():
            raise ZeroDivisionError("of its own")
    words = f"lost rank {size - 1}, which is process ", "ZeroDivisionError: of its own"
    with (
        raises(fl.errors.GroupClosedError)
        if rank == size - 1
        else raises(PeerLostError, *words, "in test_exception_of_another_rank")
    ):
        world.gpus.synchronize()
    assert time.monotonic() - started < 2


@on_ranks(("shm", 2), fresh=True)
def test_numpy_and_cupy_arrays_in_one_call_raise_mismatch_error(rank: int, size: int) -> None:
    world = current_world().group
    cp, messages = gpus(world), []
    calls: list[Any] = [lambda: fl.all_reduce(np.zeros(3)), lambda: fl.all_reduce(cp.zeros(3))]
    started = time.monotonic()
    for call in (calls[rank], calls[1]):
        with pytest.raises(fl.errors.DistributedError) as caught:
            finish(world, call)
        messages.append(f"{type(caught.value).__name__}: {caught.value}")
    assert time.monotonic() - started < 5
    first, then = messages
    assert first.startswith("MismatchError")
    assert "rank 0 called all_reduce(float64 (3,)" in first
    assert "rank 1 called all_reduce(cupy float64 (3,)" in first
    # Rank 0 had started no NCCL call, and raises in the next call.
    assert then.startswith(("MismatchError", "GroupClosedError")[rank])
    assert "the ranks made different calls" in then


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", [False, True])
@on_ranks(("shm", 2), fresh=True)
def test_timeout_error_names_the_missing_rank(rank: int, size: int, elsewhere: bool) -> None:
    """Rank 1 calls nothing, or a verb of another group, until rank 0 has given up."""
    group = fl.new_group(range(size), timeout=0.5)
    cp, world = gpus(group), current_world().group
    world.all_reduce(np.ones(1))
    if rank == 1:
        work = world.all_reduce(np.ones(1), async_op=True) if elsewhere else None
        while group.backend().lost("waiting") is None:
            time.sleep(0.01)
    else:
        words: tuple[Any, ...] = (
            *(fl.errors.CollectiveTimeoutError, "rank 1 did not join within 0.5 seconds"),
            "Call 1 of this group is all_reduce(cupy float64 (3,)",
        )
        if elsewhere:
            first = "the ranks called verbs of different groups: this rank called all_reduce(cupy"
            words = MismatchError, first, "rank 1 called all_reduce(float64 (1,)"
        with raises(*words):
            finish(group, group.all_reduce, cp.zeros(3))
        work = world.all_reduce(np.ones(1), async_op=True) if elsewhere else None
    if work is not None:
        work.wait()


@on_ranks(("shm", 2), fresh=True)
def test_nccl_failure_on_one_rank_is_reported_to_the_other_ranks(rank: int, size: int) -> None:
    """NCCL fails on rank 0 only, after all ranks have called. Rank 0 asks for missing ranks."""
    world = current_world().group
    cp = gpus(world)
    world.all_reduce(cp.zeros(3), async_op=True)
    fl.all_reduce(np.ones(1))
    if rank == 0:
        world.gpus.communicator.lib.ncclCommGetAsyncError = lambda comm, state: 2
        words = "Every rank answered over", "over shared memory, so no rank is lost"
        with raises(fl.errors.DistributedError, *words) as caught:
            world.gpus.synchronize()
        assert type(caught.value) is fl.errors.DistributedError
        assert str(caught.value).startswith("[all_reduce] rank 0 of 2: NCCL ")
    else:
        why = r"rank 0 called nothing more, because NCCL failed: \[all_reduce\] rank 0"
        with pytest.raises(MismatchError, match=why):
            finish(world, world.all_reduce, cp.zeros(3))


@on_ranks(("shm", 2), ("gloo", 2), fresh=True)
def test_rank_that_leaves_after_its_calls_is_not_lost(rank: int, size: int) -> None:
    """Pending collectives end normally."""
    group = fl.new_group(range(size))
    cp = gpus(group)
    group.all_reduce(cp.zeros(3), async_op=True)
    group.all_reduce(np.ones(1))
    event = group.gpus._flights.newest().event
    if rank == 1:
        event.done = True
        group.close()
        fl.barrier()
        return
    fl.barrier()
    with group.gpus.communicator.lock:
        group.gpus._comparisons.find_lost("a test")
    event.done = True
    group.gpus.synchronize()


@on_ranks(("shm", 2), fresh=True)
def test_rejected_arguments_raise_on_every_rank(rank: int, size: int) -> None:
    """One rank passes invalid arguments. The other ranks raise instead of waiting."""
    group, messages = fl.new_group(range(size)), []
    cp = gpus(group)
    peer, x, locked = 1 - rank, cp.zeros(3), cp.zeros((4, 4))
    compared: list[tuple[Any, Any]] = [  # before data moves
        (lambda: group.all_gather(x, out=locked), lambda: group.all_gather(x)),
        (lambda: group.all_to_all(x, rows=[1]), lambda: group.all_to_all(x, rows=[2, 1])),
        (lambda: group.send(x.astype("S1"), peer), lambda: group.recv(x, peer)),
    ]
    begun: tuple[Any, Any] = (
        lambda: group.all_reduce(x, op="median"),
        lambda: finish(group, group.all_reduce, x),
    )
    for calls in (*compared, begun):
        with pytest.raises((TypeError, ValueError, MismatchError)) as caught:
            calls[rank == 0]()
        messages.append(f"{type(caught.value).__name__}: {caught.value}")
    # The communicator of the rank with invalid arguments has ended as well.
    with pytest.raises(MismatchError if rank else fl.errors.GroupClosedError):
        finish(group, group.all_reduce, x)
    kinds = (
        ["ValueError", "ValueError", "TypeError", "ValueError"] if rank else ["MismatchError"] * 4
    )
    assert [text.partition(":")[0] for text in messages] == kinds
    for text, verb in zip(
        messages, ("all_gather", "all_to_all", "send", "all_reduce"), strict=True
    ):
        assert rank or f"rank 1 called {verb}, and rejected its arguments (" in text
