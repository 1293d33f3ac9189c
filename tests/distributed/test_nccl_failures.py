"""Failures of NCCL, with a stand-in for the library.

The real library here cannot produce a communicator that never settles, a lost peer, or a given
order of events and stream waits. tests/gpu tests these with real GPUs.
"""

import contextlib
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flashlight_py import _native
from flashlight_py.distributed.backends.nccl import communicator as communicator_module
from flashlight_py.distributed.backends.nccl import library as nccl_library
from flashlight_py.distributed.backends.nccl.backend import NcclBackend
from flashlight_py.distributed.backends.nccl.communicator import Communicator
from flashlight_py.distributed.backends.nccl.library import slow_launch_reason
from flashlight_py.distributed.backends.nccl.streams import MAX_PENDING, Comparisons
from flashlight_py.distributed.backends.single import SingleBackend
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.verbs import ALL_REDUCE, BARRIER, BROADCAST, RECV, SEND
from flashlight_py.distributed.work import Done, Work
from flashlight_py.errors import (
    CollectiveTimeoutError,
    DistributedError,
    GroupClosedError,
    MismatchError,
    PeerLostError,
)
from tests.cupy_stand_in import LOG, Event, StandInCupy, Stream
from tests.distributed.nccl_stand_in import StandInLibrary, StandInNccl
from tests.distributed.test_work import Fails
from tests.distributed.threads import run_on_threads

ffi = _native.load_extension("nccl").ffi
IN_PROGRESS, REMOTE, INVALID_USAGE, SYSTEM_ERROR = 7, 6, 5, 2


class Cpu(SingleBackend):
    """The CPU backend of a group of two ranks, whose other rank never answers."""

    size = 2
    path = "the CPU"

    def __init__(self) -> None:
        self.dead: DistributedError | None = None

    def start(self, call: Call) -> Work:
        if call.verb is BARRIER:
            raise CollectiveTimeoutError("rank 1 did not come")
        return Done() if call.compared else super().start(call)

    def lost(self, doing: str) -> DistributedError | None:
        return self.dead


class Nccl(StandInNccl):
    """An NCCL that does nothing and returns the statuses of a test."""

    def __init__(self) -> None:
        super().__init__(ffi, Cpu())
        self.answers: dict[str, int] = {}
        self.calls: list[str] = []
        self.state = 0

    def __getattribute__(self, name: str) -> Any:
        function = super().__getattribute__(name)
        if not name.startswith("nccl") or not callable(function):
            return function

        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            return self.answers[name] if name in self.answers else function(*arguments)

        return call

    def ncclCommGetAsyncError(self, comm: Any, state: Any) -> int:
        state[0] = self.state
        return 0

    def _do(self, name: str, *arguments: Any) -> int:
        LOG.append(("nccl", name))
        return 0


@pytest.fixture
def nccl() -> Nccl:
    LOG.clear()
    return Nccl()


def communicator(nccl: Nccl, timeout: float = 0.05, splits: bool = False) -> Communicator:
    library = StandInLibrary(ffi, nccl, "stand-in", 22703, "" if splits else "a test")
    made = Communicator(library, bytes(range(128)), 0, 2, timeout)
    made.find_missing = lambda: (None, "rank 1 is missing")
    return made


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> StandInCupy:
    library = StandInCupy(1)
    monkeypatch.setitem(sys.modules, "cupy", library)
    return library


@pytest.fixture
def backend(nccl: Nccl, cupy: StandInCupy) -> Any:
    made = NcclBackend(Cpu(), communicator(nccl, 30.0), cupy, 0)
    yield made
    made.close()


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device completes work only when the test says so."""
    monkeypatch.setattr(Event, "ends_at_once", False)


def ones(count: int = 4, **options: Any) -> Call:
    """Return an all_reduce of an array on the device."""
    return Call(ALL_REDUCE, sys.modules["cupy"].asarray(np.ones(count)), **options)


def test_communicator_creation_times_out_if_a_rank_is_missing(nccl: Nccl) -> None:
    nccl.answers["ncclCommInitRankConfig"] = IN_PROGRESS
    nccl.state = IN_PROGRESS
    with pytest.raises(CollectiveTimeoutError, match=r"\[init\] rank 0 of 2.*within 0.05 seconds"):
        communicator(nccl)


def test_late_call_aborts_once_and_names_missing_ranks(nccl: Nccl) -> None:
    made = communicator(nccl)
    nccl.state = IN_PROGRESS
    with pytest.raises(CollectiveTimeoutError, match="rank 1 is missing"):
        made.call("all_reduce", lambda _: IN_PROGRESS)
    made.close()
    assert nccl.calls.count("ncclCommAbort") == 1
    assert "ncclCommDestroy" not in nccl.calls
    with pytest.raises(GroupClosedError, match=r"\[broadcast\].*failed before:.*\[all_reduce\]"):
        made.require("broadcast")


def test_call_in_progress_is_waited_for(nccl: Nccl) -> None:
    made = communicator(nccl, timeout=30.0)
    nccl.state = IN_PROGRESS
    threading.Timer(0.02, vars(nccl).update, [{"state": 0}]).start()
    made.call("all_reduce", lambda _: IN_PROGRESS)
    assert made.broken is None


def test_call_polls_without_sleep_at_first(nccl: Nccl, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shortest sleep, even time.sleep(0), takes longer than most calls."""
    made = communicator(nccl, timeout=30.0)
    states = iter([IN_PROGRESS] * 3 + [0])
    monkeypatch.setattr(communicator_module, "_BUSY_SECONDS", 60.0)
    monkeypatch.setattr(made, "poll", lambda: next(states))
    monkeypatch.setattr(time, "sleep", None)
    made.call("all_reduce", lambda _: IN_PROGRESS)
    assert made.broken is None


def test_waiting_call_runs_on_wait(nccl: Nccl) -> None:
    made = communicator(nccl, timeout=30.0)
    made.on_wait = lambda: made.fail(PeerLostError("rank 1 has raised"))
    nccl.state = IN_PROGRESS
    with pytest.raises(PeerLostError, match="rank 1 has raised"):
        made.call("all_reduce", lambda _: IN_PROGRESS)
    assert nccl.calls.count("ncclCommAbort") == 1


@pytest.mark.parametrize(("state", "kind"), [(REMOTE, None), (SYSTEM_ERROR, PeerLostError)])
def test_watch_raises_peer_lost_error_if_a_rank_is_missing(
    nccl: Nccl, state: int, kind: type[DistributedError] | None
) -> None:
    made = communicator(nccl, timeout=30.0)
    made.find_missing = lambda: (kind, "rank 1 is missing")
    nccl.state = state
    run_on_threads(1, lambda _: made.watch("all_reduce", time.monotonic()))
    assert nccl.calls.count("ncclCommAbort") == 1
    for _ in range(2):  # missing ranks are searched only once
        assert type(made.error()) is PeerLostError
        assert "rank 1 is missing" in str(made.error())


def test_watch_aborts_late_collectives_only(nccl: Nccl) -> None:
    made = communicator(nccl, timeout=5.0)
    made.watch("all_reduce", time.monotonic())
    assert made.broken is None
    made.watch("all_reduce", time.monotonic() - 6.0)
    assert isinstance(made.broken, CollectiveTimeoutError)


def test_failure_inside_an_nccl_group_is_raised_after_its_end(nccl: Nccl, backend: Any) -> None:
    nccl.answers["ncclAllReduce"] = INVALID_USAGE
    with pytest.raises(DistributedError, match=r"status 5"):
        backend.start_many([ones(), ones()])
    assert nccl.calls.count("ncclAllReduce") == 2
    assert nccl.calls.index("ncclGroupEnd") < nccl.calls.index("ncclCommAbort")


def test_scaled_sums_are_cached_up_to_a_limit(nccl: Nccl) -> None:
    made = communicator(nccl)
    for scale in (*range(2, 70), 69):
        op = made.scaled_sum("all_reduce", scale / 64, "float32", nccl.ncclFloat32)
        assert nccl._scales[op] == np.float32(scale / 64)
    assert len(nccl._scales) == 64
    assert nccl.calls.count("ncclRedOpCreatePreMulSum") == 68


def test_integer_scales_wrap_like_the_cpu(nccl: Nccl) -> None:
    made = communicator(nccl)
    scale_of = nccl._scales
    assert scale_of[made.scaled_sum("all_reduce", 300.0, "uint8", nccl.ncclUint8)] == 44
    assert scale_of[made.scaled_sum("all_reduce", -3.0, "int64", nccl.ncclInt64)] == -3


@pytest.mark.parametrize("state", [0, IN_PROGRESS])
@pytest.mark.parametrize("status", [0, IN_PROGRESS])
def test_close_aborts_only_if_a_rank_is_missing(nccl: Nccl, status: int, state: int) -> None:
    made = communicator(nccl)
    nccl.answers["ncclCommFinalize"], nccl.state = status, state
    made.close()
    made.close()
    ends = [nccl.calls.count(name) for name in ("ncclCommDestroy", "ncclCommAbort")]
    assert ends == ([0, 1] if status and state else [1, 0])


class Splits(Nccl):
    """Records the communicator of each function, and can block in a launch."""

    def __init__(self, leaves: bool = True) -> None:
        super().__init__()
        self.on: list[tuple[str, int]] = []
        self.blocks, self.leaves = False, leaves
        self.aborted, self.ended = threading.Event(), threading.Event()

    def ncclCommGetAsyncError(self, comm: Any, state: Any) -> int:
        return StandInNccl.ncclCommGetAsyncError(self, comm, state)

    def _end(self, name: str, comm: Any) -> int:
        self.on.append((name, self._number(comm)))
        if name == "abort":
            self.aborted.set()
        return 0

    def _do(self, name: str, *arguments: Any) -> int:
        self.on.append((name, self._number(arguments[-2])))
        if self.blocks:
            assert self.aborted.wait(10)
            assert self.leaves or self.ended.wait(10)
        return 0


@pytest.fixture
def split(cupy: StandInCupy) -> Any:
    def make(timeout: float = 30.0, leaves: bool = True) -> tuple[NcclBackend, Splits]:
        nccl = Splits(leaves)
        backend = NcclBackend(Cpu(), communicator(nccl, timeout, splits=True), cupy, 0)
        made.append((backend, nccl))
        return backend, nccl

    made: list[tuple[NcclBackend, Splits]] = []
    yield make
    for backend, nccl in made:
        nccl.ended.set()
        backend.close()


def test_collectives_are_launched_on_the_second_communicator(split: Any, cupy: StandInCupy) -> None:
    backend, nccl = split()
    assert int(ffi.cast("uintptr_t", backend.communicator.child)) == 2
    backend.start(Call(ALL_REDUCE, cupy.asarray(np.ones(3))))
    backend.start(Call(ALL_REDUCE, cupy.asarray(np.ones(3, np.int16)), scale=2.0))
    backend.start(Call(BROADCAST, cupy.asarray(np.ones(3))))
    assert nccl.on == [("all_reduce", 2), ("all_reduce", 2), ("broadcast", 2)]
    backend.close()
    assert nccl.on[3:] == [("finalize", 2), ("destroy", 2), ("finalize", 1), ("destroy", 1)]


def test_first_message_connects_a_non_blocking_communicator(split: Any, cupy: StandInCupy) -> None:
    backend, nccl = split()
    for _ in range(2):
        backend.start(Call(SEND, cupy.asarray(np.ones(3)), peer=1))
        backend.start(Call(RECV, cupy.asarray(np.ones(3)), peer=1))
    assert nccl.on == [("send", 1), ("send", 2), ("recv", 1), ("recv", 2), ("send", 2), ("recv", 2)]


def test_blocking_launch_ends_after_the_watchdog_aborts(split: Any) -> None:
    """The abort of the first communicator ends the launch. Then the second one is freed."""
    backend, nccl = split(timeout=0.1)
    nccl.blocks = True
    with pytest.raises(CollectiveTimeoutError, match=r"within 0.1 seconds"):
        backend.start(ones())
    backend.close()
    assert nccl.on == [("all_reduce", 2), ("abort", 1), ("abort", 2)]


def test_abort_frees_the_communicator_while_a_thread_finds_missing_ranks(nccl: Nccl) -> None:
    """The thread has left the launch, and holds the lock of calls while it asks."""
    made, aborted = communicator(nccl, 30.0, splits=True), threading.Event()
    made.child = ffi.cast("ncclComm_t", 2)
    is_freed = threading.Event()

    def abort(comm: Any) -> int:
        (is_freed if aborted.is_set() else aborted).set()
        return 0

    def ask() -> tuple[None, str]:
        assert is_freed.wait(10)
        return None, "rank 1 is missing"

    nccl.ncclCommAbort = abort  # type: ignore[method-assign]
    made.find_missing = ask

    def launch() -> None:
        with made.lock, pytest.raises(CollectiveTimeoutError, match="rank 1 is missing"):
            made.call("all_reduce", lambda _: 0 if aborted.wait(10) else 1)

    with ThreadPoolExecutor(1) as threads:
        launched = threads.submit(launch)
        while made.launching_since == float("inf"):
            time.sleep(0)
        made.fail(CollectiveTimeoutError("late"))
        launched.result()


def test_abort_keeps_a_communicator_in_launch(
    split: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(communicator_module, "_LEAVE_SECONDS", 0.1)
    backend, nccl = split(timeout=0.1, leaves=False)
    nccl.blocks = True
    with ThreadPoolExecutor(1) as thread:
        launched = thread.submit(backend.start, ones())
        assert nccl.aborted.wait(10)
        backend._watchdog.stop()
        nccl.ended.set()
        with pytest.raises(CollectiveTimeoutError):
            launched.result()
    assert nccl.on == [("all_reduce", 2), ("abort", 1)]
    assert "is freed when the process ends" in caplog.text


@pytest.mark.usefixtures("endless")
def test_launch_waits_while_too_many_collectives_are_pending(split: Any) -> None:
    backend, nccl = split()
    call = ones(blocking=False)
    for _ in range(MAX_PENDING):
        backend.start(call)
    with ThreadPoolExecutor(1) as thread:
        next_one = thread.submit(backend.start, call)
        with pytest.raises(TimeoutError):
            next_one.result(0.05)
        assert len(nccl.on) == MAX_PENDING
        backend._flights._pending[0].event.done = True
        next_one.result(10)
    assert len(nccl.on) == MAX_PENDING + 1
    for flight in backend._flights._pending:
        flight.event.done = True


@pytest.mark.parametrize(
    ("version", "loaded", "environment", "reason"),
    [
        (22809, None, {}, ""),
        (22809, None, {"NCCL_RUNTIME_CONNECT": "0"}, ""),
        (22809, "/lib/libnccl.so.2", {"NCCL_RUNTIME_CONNECT": "0"}, ""),
        (22809, "/lib/libnccl.so.2", {}, "/lib/libnccl.so.2 was loaded before"),
        (22809, None, {"NCCL_RUNTIME_CONNECT": "1"}, "NCCL_RUNTIME_CONNECT=1 is set"),
        (22809, None, {"NCCL_COMM_BLOCKING": "0"}, "NCCL_COMM_BLOCKING=0 is set"),
        (21600, None, {}, "NCCL 2.16.0 is older than 2.18.0"),
    ],
)
def test_slow_launch_reason_depends_on_version_and_environment(
    version: int, loaded: str | None, environment: dict[str, str], reason: str
) -> None:
    result = slow_launch_reason(version, loaded, environment)
    assert (result.startswith(reason), bool(result)) == (True, bool(reason))


def test_path_of_the_backend_says_why_launches_are_slow(nccl: Nccl, cupy: StandInCupy) -> None:
    made = communicator(nccl)
    made.nccl = replace(made.nccl, slow_reason="rank 1: NCCL 2.16.0 is older than 2.18.0")
    with contextlib.closing(NcclBackend(Cpu(), made, cupy, 0)) as backend:
        assert "150 us later: rank 1: NCCL 2.16.0 is older" in backend.path
        assert "2.16.0 is older" in backend.capture_problem()


@pytest.mark.usefixtures("endless")
def test_streams_wait_for_each_other_but_not_the_host(backend: Any, cupy: StandInCupy) -> None:
    x = cupy.asarray(np.ones(4))
    with Stream(name="mine"):
        work = backend.start(Call(ALL_REDUCE, x, blocking=False))
        assert [entry[:2] for entry in LOG] == [
            ("record", "mine"),
            ("wait", "communication"),
            ("nccl", "all_reduce"),
            ("record", "communication"),
        ]
        assert LOG[0][2] == LOG[1][2]
        assert work.wait() is x
    backend._flights.newest().event.done = True
    assert LOG[4] == ("wait", "mine", LOG[3][2])
    assert isinstance(backend.start(Call(BROADCAST, x)), Done)  # a blocking verb waits at once
    assert LOG[-1] == ("wait", "default", LOG[-2][2])
    backend._flights.newest().event.done = True


@pytest.mark.usefixtures("endless")
def test_arrays_are_kept_until_the_collective_has_ended(backend: Any) -> None:
    work = backend.start(ones(blocking=False))
    flight = backend._flights.newest()
    assert len(flight.arrays) == 1
    assert not work.is_completed()
    with pytest.raises(CollectiveTimeoutError, match="still running"):
        work.wait(timeout=0.01)
    flight.event.done = True
    assert work.is_completed()
    assert len(flight.arrays) == 0
    assert work.wait(timeout=0.01) is not None


def test_pending_work_raises_the_error_that_ended_the_communicator(
    backend: Any, cupy: StandInCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = cupy.asarray(np.ones(4))
    ended = backend.start(Call(ALL_REDUCE, x, blocking=False))
    assert ended.is_completed()
    monkeypatch.setattr(Event, "ends_at_once", False)
    work = backend.start(Call(ALL_REDUCE, x, blocking=False))
    flight = backend._flights.newest()
    backend.communicator.fail(PeerLostError("rank 1 is gone"))
    flight.event.done = True  # an aborted kernel ends too, with an incomplete result
    assert work.is_completed()
    with pytest.raises(PeerLostError, match=r"rank 1 is gone\. Asked over the CPU: rank 1 did not"):
        work.wait()
    assert ended.wait() is x
    with pytest.raises(GroupClosedError, match="failed before"):
        backend.start(Call(ALL_REDUCE, x, blocking=False))


def test_find_missing_returns_the_error_of_an_ended_comparison(nccl: Nccl) -> None:
    """NCCL fails for the same reason, and the CPU backend is closed by then."""
    comparisons = Comparisons(Cpu(), communicator(nccl))
    comparisons._posted += [Done(), Fails(PeerLostError("lost rank 1 (its process has ended)"))]
    text = "Asked over the CPU: lost rank 1 (its process has ended)"
    assert comparisons.find_missing() == (PeerLostError, text)


class AnsweredAhead(Cpu):
    """The other rank made a call ahead, which answers a barrier, and then ended."""

    def start(self, call: Call) -> Work:
        raise MismatchError("rank 1 called all_reduce")

    def lost(self, doing: str) -> DistributedError | None:
        was_dead, self.dead = self.dead, PeerLostError("lost rank 1 (its process has ended)")
        return was_dead


def test_find_missing_names_a_rank_that_ended_after_a_call_ahead(nccl: Nccl) -> None:
    """NCCL detects the end of a process before the host does."""
    made = communicator(nccl)
    nccl.state = REMOTE
    comparisons = Comparisons(AnsweredAhead(), made)
    made.find_missing = comparisons.find_missing
    made.watch("all_reduce", time.monotonic())
    assert str(made.error()).endswith("Asked over the CPU: lost rank 1 (its process has ended)")


def test_released_graph_is_destroyed_and_not_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error's traceback may keep the launcher alive, and NCCL waits for the end of the graph."""
    driver = StandInLibrary(ffi, StandInNccl(ffi, None), "stand-in", 22809)
    driver.lib.cuGraphLaunch = driver.lib.cuEventRecord = lambda *_: LOG.append("launch") or 0
    monkeypatch.setattr(nccl_library, "driver_address", driver.address)
    graph = type("Graph", (), {"graphExec": 3})()
    graphs = weakref.ref(graph)
    launcher = nccl_library.GraphLauncher(graph, [])
    LOG.clear()
    launcher.launch([], 1, 2)
    assert LOG == ["launch", "launch"]  # of the graph, and of the event
    del graph
    launcher.release()
    assert graphs() is None
    with pytest.raises(GroupClosedError, match="its group is closed"):
        launcher.launch([], 1, 2)


@pytest.mark.usefixtures("endless")
def test_watchdog_aborts_a_late_collective(nccl: Nccl, cupy: StandInCupy) -> None:
    backend = NcclBackend(Cpu(), communicator(nccl), cupy, 0)
    backend.start(ones(blocking=False))
    with pytest.raises(CollectiveTimeoutError, match=r"within 0.05 seconds.*Asked over the CPU"):
        backend.synchronize()
    backend.close()
    assert nccl.calls.count("ncclCommAbort") == 1
    assert not any(thread.name == "flashlight-nccl" for thread in threading.enumerate())


def test_dead_rank_is_detected_while_nccl_connects(nccl: Nccl, cupy: StandInCupy) -> None:
    """The first collective waits for other ranks inside NCCL, on the host."""
    cpu = Cpu()
    backend = NcclBackend(cpu, communicator(nccl, 30.0), cupy, 0)
    cpu.dead = PeerLostError("lost rank 1 (its process has ended)")
    nccl.answers["ncclAllReduce"] = nccl.state = IN_PROGRESS
    began = time.monotonic()
    with pytest.raises(PeerLostError, match="its process has ended"):
        backend.start(ones(blocking=False))
    assert time.monotonic() - began < 10
    backend.close()


@pytest.mark.usefixtures("endless")
def test_cuda_failure_is_not_reported_as_a_timeout(
    backend: Any, cupy: StandInCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.start(ones(blocking=False))
    for status in (600, 900):  # not ready; a graph is being captured
        monkeypatch.setattr(cupy.cuda.runtime, "eventQuery", lambda event, status=status: status)
        backend._watchdog.check()
    monkeypatch.setattr(cupy.cuda.runtime, "eventQuery", lambda event: 700)
    with pytest.raises(DistributedError, match=r"\[all_reduce\] rank 0 of 2: CUDA failed.*700"):
        backend.synchronize()


@pytest.mark.usefixtures("endless")
def test_failed_watchdog_ends_the_communicator(
    backend: Any, cupy: StandInCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(event: int) -> int:
        raise ZeroDivisionError("in the watchdog")

    messages: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", messages.append)
    monkeypatch.setattr(cupy.cuda.runtime, "eventQuery", fail)
    backend.start(ones(blocking=False))
    with pytest.raises(DistributedError, match=r"\[watchdog\] rank 0 of 2: ZeroDivisionError"):
        backend.synchronize()
    backend._watchdog.stop()
    assert messages[0].exc_type is ZeroDivisionError


def test_several_arrays_are_launched_as_one_operation(backend: Any, nccl: Nccl) -> None:
    nccl.calls.clear()
    backend.start_many([ones(n, blocking=False) for n in (3, 0, 5)])
    assert nccl.calls == ["ncclGroupStart", "ncclAllReduce", "ncclAllReduce", "ncclGroupEnd"]
    assert sum(entry[0] == "record" for entry in LOG) == 2


def test_array_on_another_device_is_rejected(backend: Any, nccl: Nccl, cupy: StandInCupy) -> None:
    x = cupy.asarray(np.ones(3))
    x.elsewhere = 1
    nccl.calls.clear()
    with pytest.raises(ValueError, match="device 0, got one on device 1"):
        backend.start(Call(ALL_REDUCE, x, blocking=False))
    assert nccl.calls == []
