"""The MPI backend with its CPU backend, under mpirun, beyond the conformance tests."""

import contextlib
import os
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.distributed.backend import BackendStore
from flashlight_py.distributed.backends.mpi import backend as mpi_backend
from flashlight_py.distributed.backends.mpi import verb_steps
from flashlight_py.distributed.backends.mpi.backend import MpiBackend, Progress
from flashlight_py.distributed.backends.shm import ShmBackend
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.failures import abort
from flashlight_py.distributed.start.settings import Settings
from flashlight_py.distributed.start.world import current_world
from flashlight_py.distributed.verbs import BARRIER
from tests.distributed import conformance
from tests.distributed.conformance import (
    dtype_of,
    first_error,
    hosts_by_letter,
    mismatch_now_or_later,
    on_ranks,
    raises,
    slow,
    two_hosts,
)
from tests.distributed.harness import run_ranks
from tests.distributed.processes import await_file
from tests.distributed.programs import every_verb, run_program
from tests.distributed.test_failures import CALLS, skip_the_call

pytest.importorskip("mpi4py")

TIMEOUT = 20.0
# With Gloo as the CPU backend, and with shared memory inside hosts and Gloo between them.
APART: dict[str, Any] = {"env": hosts_by_letter("abc")}
HOSTS: dict[str, Any] = {"env": two_hosts}
UNCHECKED = {"FLASHLIGHT_CHECKS": "0"}


def on_one_host_and_several(**options: Any) -> Any:
    return on_ranks(("mpi", 3), slow=[("mpi", 3, APART)], fresh=True, **options)


def backend() -> MpiBackend:
    group_backend = current_world().group.backend()
    assert isinstance(group_backend, MpiBackend)
    return group_backend


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "limit"), [("int8", 50), ("longdouble", 10_000)])
@on_ranks(("mpi", 3))
def test_arrays_above_the_limit_use_chunks(rank: int, size: int, dtype: str, limit: int) -> None:
    """With a limit of 50 or 10,000 bytes instead of 2 GB."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verb_steps, "LARGEST_BYTES", limit)
        run_program(rank, size, every_verb(size, dtype, (1, 25, 1000)))
        conformance.check_message_ring(rank, size, 5000)


@pytest.mark.slow
@on_ranks(("mpi", 2))
def test_operation_progresses_while_its_rank_does_not_wait(
    rank: int, size: int, tmp_path: Path
) -> None:
    """Rank 0 starts an operation and waits for it only after rank 1 has its result."""
    x = np.ones(100_000)
    work = fl.all_reduce(x, async_op=True)
    if rank == 0:
        await_file(tmp_path / "reduced")
    work.wait()
    (tmp_path / "reduced").touch()
    assert np.all(x == size)


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64", "longdouble"])
@on_ranks(("mpi", 3))
def test_min_and_max_of_nan_and_zeros_agree_on_all_ranks(rank: int, size: int, name: str) -> None:
    """NaN and zeros of both signs, in a different order on each rank."""
    odd = [np.nan, -np.nan, 0.0, -0.0, np.inf, -np.inf, 1.0, -1.0]
    table = np.array([np.roll(odd, shift) for shift in range(size)])
    for op, ufunc in (("min", np.minimum), ("max", np.maximum)):
        x = fl.all_reduce(table[rank].astype(dtype_of(name)), op=op)  # type: ignore[arg-type]
        np.testing.assert_array_equal(x.astype(table.dtype), ufunc.reduce(table))
        assert len(set(fl.all_gather_object(x.tobytes()))) == 1


@on_ranks(("mpi", 2))
def test_group_is_freed_after_all_ranks_have_left(rank: int, size: int) -> None:
    """They are freed when the next group is created."""
    before = len(backend().progress._closed)
    for _ in range(20):
        store = BackendStore(backend())
        cpu = partial(ShmBackend, store, TIMEOUT)
        group = mpi_backend.connect_mpi(store, cpu, TIMEOUT, True, gpu_aware=False)
        group.start(Call(BARRIER)).wait()
        group.close()
        fl.barrier()
    assert len(backend().progress._closed) - before <= 2


@on_ranks(("mpi", 2), fresh=True)
def test_world_can_be_created_again(rank: int, size: int) -> None:
    params = {"BACKEND": "mpi", "TIMEOUT": TIMEOUT}
    for _ in range(5):
        fl.distributed_shutdown()
        fl.distributed_init(fl.DistributedInit.MPI, params=params)
        x = np.ones(1000)
        fl.all_reduce(x, async_op=True)
        fl.sync_distributed()
        assert np.all(x == size)
    assert threading.active_count() < 4


@on_ranks(("mpi", 2))
def test_describe_names_the_mpi_library(rank: int, size: int) -> None:
    text = fl.distributed.describe()
    assert fl.distributed_backend().name == "MPI"
    assert all(words in text for words in ("NumPy arrays: MPI (", "mpi4py 4", "BACKEND is mpi"))


@on_ranks(("mpi", 2), fresh=True, env={"MPI4PY_RC_THREAD_LEVEL": "funneled", **UNCHECKED})
def test_operations_advance_in_waits_if_mpi_is_single_threaded(rank: int, size: int) -> None:
    """Also verbs without checks."""
    got = fl.all_gather(np.full(rank + 1, rank))
    assert np.array_equal(got, np.repeat(np.arange(size), np.arange(size) + 1))
    conformance.check_pending_works(rank, size)
    conformance.check_message_ring(rank, size, 50_000)
    work = fl.all_reduce(np.ones(3), async_op=True)
    while not work.is_completed():  # each check runs a step
        pass
    assert "one thread" in fl.distributed.describe()
    assert threading.active_count() == 1


@on_ranks(("mpi", 3, HOSTS), slow=[("mpi", 3, APART)])
def test_mpi_backend_works_on_several_hosts(rank: int, size: int) -> None:
    is_apart = os.environ["FLASHLIGHT_MEMORY_DOMAIN"] in "abc"
    path = "Gloo" if is_apart else "shared memory inside hosts, Gloo between"
    assert f"calls are compared over {path}" in fl.distributed.describe()
    run_program(rank, size, random.Random(4).sample(every_verb(size, "float32", (2000,)), 60), 12)
    for name in ("shape", "verb"):
        message = mismatch_now_or_later(lambda name=name: CALLS[name](rank))
        assert "made different calls" in message
        assert "rank 0 called" in message
        assert np.all(fl.all_reduce(np.ones(5)) == size)  # the group remains usable


def stop_in_the_middle(rank: int, manner: str) -> None:
    """Rank 1 joins a call and then does not run its part of the transfer."""
    if rank == 1:
        group = current_world().group
        backend()._verb_steps._all_reduce = lambda call, _: _stop(manner, group)
    fl.all_reduce(np.ones(100_000))


def _stop(manner: str, group: fl.ProcessGroup) -> Iterator[None]:
    if manner == "is interrupted":
        raise KeyboardInterrupt
    if manner == "raises":
        threading.Thread(target=_raise).start()
    if manner == "leaves":
        threading.Thread(target=group.close).start()
    while True:
        yield


def _raise() -> None:
    with contextlib.suppress(ValueError), fl.abort_on_exception():
        raise ValueError("in another thread")


@pytest.mark.parametrize(
    ("manner", "raised", "why"),
    [
        ("is interrupted", KeyboardInterrupt, "(it stopped in all_reduce: KeyboardInterrupt())"),
        *slow(
            ("raises", fl.errors.GroupClosedError, "it raised ValueError: in another thread"),
            ("leaves", fl.errors.GroupClosedError, "lost rank 1 (it has left the group)"),
        ),
    ],
)
@on_one_host_and_several()
def test_rank_that_ends_during_a_call_is_named_at_once(
    rank: int, size: int, manner: str, raised: type[BaseException], why: str
) -> None:
    began, lost = time.monotonic(), (fl.errors.PeerLostError, f"rank {rank} of 3: lost rank 1", why)
    with raises(raised) if rank == 1 else raises(*lost):
        stop_in_the_middle(rank, manner)
    assert time.monotonic() - began < 5.0


@pytest.mark.slow
@on_one_host_and_several(params={"TIMEOUT": 1})
def test_stuck_operation_ends_after_the_timeout(rank: int, size: int) -> None:
    with pytest.raises(fl.errors.DistributedError, match="did not finish within 1 seconds"):
        stop_in_the_middle(rank, "is stuck")


@pytest.mark.slow
@on_one_host_and_several()
def test_rank_may_leave_after_it_has_sent_its_data(rank: int, size: int) -> None:
    x = np.full(10, float(rank + 1))
    if rank:
        broadcast = backend()._verb_steps._broadcast
        backend()._verb_steps._broadcast = lambda call, _: _late(broadcast(call, None))
    fl.broadcast(x, 0)
    current_world().group.close()
    assert np.all(x == 1)


def _late(steps: Iterator[None]) -> Iterator[None]:
    end = time.monotonic() + 0.5
    while time.monotonic() < end:
        yield
    yield from steps


@pytest.mark.slow
@on_ranks(("mpi", 3, APART), ("mpi", 3, HOSTS), fresh=True, params={"TIMEOUT": 1})
def test_absent_rank_is_named_on_several_hosts(rank: int, size: int) -> None:
    output = skip_the_call(rank, size, 3.0)
    assert rank == 1 or "rank 1 did not join within" in output


@pytest.mark.slow
@on_ranks(("mpi", 3), fresh=True, params={"TIMEOUT": 1}, env=UNCHECKED)
def test_unchecked_call_raises_after_a_rank_has_left_or_is_late(rank: int, size: int) -> None:
    group = fl.new_group(range(size))
    if rank == size - 1:
        group.close()
    else:
        with pytest.raises(fl.errors.DistributedError):
            group.all_reduce(np.full(4, 5.0))
    if rank == 1:
        time.sleep(2.0)
    with pytest.raises(fl.errors.CollectiveTimeoutError, match="a rank did not join"):
        fl.barrier() if rank == 1 else fl.all_reduce(np.ones(10))  # the other ranks have given up


def test_mpi_cuda_aware_must_be_an_equal_flag_on_every_rank() -> None:
    for other, expected in (
        (mpi_backend.MpiCard(1, 2, gpu_aware=True), "MPI_CUDA_AWARE differs between ranks"),
        (mpi_backend.MpiCard(problem="no libmpi"), "rank 1: no libmpi"),
    ):
        with pytest.raises(fl.errors.UnavailableEverywhereError, match=expected):
            mpi_backend._check_cards([mpi_backend.MpiCard(0, 2), other])
    assert Settings.from_params({"MPI_CUDA_AWARE": "1"}).mpi_cuda_aware
    assert not Settings.from_params({"MPI_CUDA_AWARE": False}).mpi_cuda_aware
    with pytest.raises(ValueError, match="MPI_CUDA_AWARE"):
        Settings.from_params({"MPI_CUDA_AWARE": "yes"})


def meet_as_strangers(rank: int, size: int, path: str) -> str:
    """Create a world of processes that MPI did not start together."""
    params = {"BACKEND": "mpi", "FILE_PATH": path, "TIMEOUT": TIMEOUT}
    init_args = fl.DistributedInit.FILE_SYSTEM, rank, size
    return first_error(lambda: fl.distributed_init(*init_args, params))


def test_separate_mpi_jobs_are_rejected_on_every_rank(tmp_path: Any) -> None:
    path = str(tmp_path / "meet")
    for message in run_ranks(meet_as_strangers, 2, path, init=None):
        assert "expected 2 ranks of one MPI job" in message
        assert "0 of 1, 0 of 1" in message
        assert "Start all ranks by one mpirun" in message
    assert list(tmp_path.iterdir()) == []


class FakeMpi:
    """Replaces MPI, whose Abort would end the tests."""

    Request = SimpleNamespace(Testall=None)

    def __init__(self) -> None:
        self.COMM_WORLD = self
        self.aborted: list[int] = []

    def Is_finalized(self) -> bool:
        return False

    def Abort(self, code: int) -> None:
        self.aborted.append(code)


def test_exception_hook_prints_first_and_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: printed.append(error))
    before, mpi = sys.excepthook, FakeMpi()
    progress, (one, other) = Progress(mpi, threaded=False), (SimpleNamespace() for _ in range(2))
    progress.add(one)
    progress.add(other)
    progress.remove(one, healthy=False)
    for group in progress._groups:  # no rank is waited for
        group.leaving = SimpleNamespace(leave=lambda moved: None, have_all_left=lambda: True)
    error = ValueError("uncaught")
    guard = sys.excepthook
    guard(ValueError, error, None)
    assert (printed, mpi.aborted) == ([error], [1])
    progress.remove(other, healthy=False)
    guard(ValueError, error, None)  # a wrapper may still call the old hook
    assert (printed, mpi.aborted) == ([error, error], [1])
    abort.uninstall_hooks()
    assert sys.excepthook is before


# A program whose Abort reports unread output, which mpirun would lose.
ABORTING = """
import fcntl, os, sys, termios
from flashlight_py.distributed.backends.mpi import backend
from flashlight_py.distributed.failures import abort

class FakeMpi:
    def Is_finalized(self):
        return False

    def Abort(self, code):
        unread = fcntl.ioctl(2, termios.FIONREAD, b"    ")
        print(int.from_bytes(unread, sys.byteorder), flush=True)
        os._exit(code)

FakeMpi.COMM_WORLD = FakeMpi()
backend._LINGER_SECONDS = 30.0
abort.install_hooks()
abort.after_report.append(backend.Progress(FakeMpi(), False).abort_job)
raise ValueError("no such file")
"""


def test_job_is_aborted_after_its_output_has_been_read() -> None:
    reading, writing = os.pipe()
    command = [sys.executable, "-c", ABORTING]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=writing) as process:
        os.close(writing)
        with pytest.raises(subprocess.TimeoutExpired):  # without a reader the job does not end
            process.wait(0.3)
        text = b""
        while not text.endswith(b"ValueError: no such file\n"):
            text += os.read(reading, 1 << 16)
        assert process.stdout.read() == b"0\n"
    assert process.returncode == 1
    os.close(reading)


def test_arrays_of_a_failed_operation_are_kept() -> None:
    """Requests of mpi4py do not keep all arrays, and MPI still writes into them."""
    mpi = SimpleNamespace(Request=SimpleNamespace(Testall=lambda requests: False))
    array = np.ones(3)
    is_alive = weakref.ref(array)
    steps = Progress(mpi, threaded=False).until([partial(id, array)])
    next(steps)
    steps.close()  # like a failed operation
    del array, steps
    assert is_alive() is not None
