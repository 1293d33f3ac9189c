"""Failures with NCCL: an error in time that names the cause, and never a hang."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

import flashlight_py as fl
from tests.distributed.harness import run_outcomes
from tests.gpu import verbs
from tests.gpu.conftest import world

pytestmark = pytest.mark.gpu

TIMEOUT = 6.0
# Seconds for failures that are detected without the timeout. Ranks may share a GPU in time slices.
SOON = 4.0
# Bytes that a driver may keep; a process with CUDA takes ten times as much.
KEPT = 48 << 20
GIVEN_BACK_SECONDS = 10.0


class Failure(NamedTuple):
    """Result of a call of a rank, and the seconds since its start."""

    kind: str
    message: str
    seconds: float


Measured = Callable[[Any], Failure]


@pytest.fixture(autouse=True)
def _memory_is_given_back() -> Iterator[None]:
    """Fail the test if the GPU has less free memory after it than before."""
    import cupy

    def free() -> int:
        return int(cupy.cuda.runtime.memGetInfo()[0])

    before, ends = free(), time.monotonic() + GIVEN_BACK_SECONDS
    yield
    while free() < before - KEPT and time.monotonic() < ends:
        time.sleep(0.1)  # no event: the driver releases the memory later
    assert free() >= before - KEPT, f"{before - free():,} bytes are still taken"


def outcomes(fn: Callable[..., Any], *args: Any, size: int = 2) -> Any:
    return run_outcomes(fn, size, *args, deadline=100.0, **world(size, TIMEOUT=TIMEOUT))


def joined() -> Any:
    """Return an array of every rank. The GPUs are joined, but NCCL has not connected them."""
    x = verbs.on_gpu(np.ones(1 << 20))
    fl.barrier()  # loading CuPy and starting CUDA may take longer on one rank
    fl.all_reduce(x[:0])
    return x


def connected() -> Any:
    x = joined()
    fl.all_reduce(x)
    fl.sync_distributed()
    fl.barrier()
    return x


def failure_of(call: Callable[[], object]) -> Failure:
    """Call, and continue for a while, because calls that NCCL can finish are compared later."""
    begun = time.monotonic()
    try:
        call()
        while time.monotonic() - begun < SOON:
            fl.sync_distributed()
            fl.all_reduce(verbs.on_gpu(np.ones(3)))
    except fl.errors.DistributedError as error:
        return Failure(type(error).__name__, str(error), time.monotonic() - begun)
    return Failure("returned", "", time.monotonic() - begun)


DIFFERENT: dict[str, tuple[Callable[[Any], object], Callable[[Any], object]]] = {
    "shape": (fl.all_reduce, lambda x: fl.all_reduce(x[:10].copy())),
    "verb": (fl.all_reduce, lambda x: fl.broadcast(x, root=0)),
}


def call_differently(rank: int, size: int, difference: str, begin: Callable[[], Any]) -> Failure:
    x = begin()
    return failure_of(lambda: DIFFERENT[difference][rank](x))


def refused_on_rank_1(rank: int, size: int) -> Failure:
    """Pass an invalid argument on rank 1; the other ranks have started the call, so the group ends
    on all ranks."""
    x = connected()
    if rank == 1:
        with pytest.raises((TypeError, ValueError), match="median"):
            fl.all_reduce(x, op="median")  # type: ignore[call-overload]
    return failure_of(lambda: fl.all_reduce(x))


@pytest.fixture
def measured(record_property: Callable[[str, object], None]) -> Measured:
    def show(outcome: Any) -> Failure:
        assert outcome.ok, outcome.report()
        result: Failure = outcome.value
        record_property(f"rank {outcome.rank}: {result.kind}", f"{result.seconds:.2f} s")
        return result

    return show


WAYS: dict[str, tuple[Any, ...]] = {
    **{difference: (call_differently, difference, connected) for difference in DIFFERENT},
    "while NCCL connects": (call_differently, "shape", joined),
    "refused": (refused_on_rank_1,),
}


@pytest.mark.parametrize("difference", WAYS)
def test_nccl_mismatch_raises_on_every_rank(difference: str, measured: Measured) -> None:
    for outcome in map(measured, outcomes(*WAYS[difference])):
        assert outcome.kind == "MismatchError", outcome
        assert "test_failures.py" in outcome.message
        assert outcome.seconds < SOON


def raises_on_rank_1(rank: int, size: int) -> Failure:
    x = connected()
    if rank == 1:
        with fl.abort_on_exception():
            raise ValueError("of this rank's own")
    return failure_of(lambda: fl.all_reduce(x))


def test_exception_of_a_rank_raises_peer_lost_error_with_its_traceback(measured: Measured) -> None:
    waiting, raised = outcomes(raises_on_rank_1)
    assert raised.error_type == "ValueError"
    result = measured(waiting)
    assert result.kind == "PeerLostError"
    assert "ValueError: of this rank's own" in result.message
    assert "in raises_on_rank_1" in result.message
    assert result.seconds < SOON


def killed(rank: int, size: int, begin: Callable[[], Any]) -> Failure:
    x = begin()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return failure_of(lambda: fl.all_reduce(x))


@pytest.mark.parametrize(("size", "begin"), [(2, joined), (2, connected), (4, connected)])
def test_ranks_name_a_killed_rank(size: int, begin: Callable[[], Any], measured: Measured) -> None:
    for rank, outcome in enumerate(outcomes(killed, begin, size=size)):
        if rank == 1:
            assert outcome.signal is signal.SIGKILL
            continue
        result = measured(outcome)
        assert result.kind == "PeerLostError", result
        assert "rank 1" in result.message
        assert result.seconds < SOON


def stopped_for_a_while(rank: int, size: int) -> Failure:
    """Stop rank 1 until rank 0 has raised."""
    x = connected()
    processes: list[int] = fl.all_gather_object(os.getpid())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    result = failure_of(lambda: fl.all_reduce(x))
    if rank == 0:
        os.kill(processes[1], signal.SIGCONT)
    return result


def test_survivors_name_a_stopped_rank_after_the_timeout(measured: Measured) -> None:
    waiting, stopped = outcomes(stopped_for_a_while)
    result = measured(waiting)
    assert result.kind == "CollectiveTimeoutError", result
    assert "rank 1" in result.message
    assert TIMEOUT <= result.seconds < 3 * TIMEOUT
    assert stopped.ok, stopped.report()
    assert stopped.value.kind != "returned"


def never_calls(rank: int, size: int) -> None:
    x = connected()
    if rank == 0:
        fl.all_reduce(x)
        fl.sync_distributed()


def never_joins(rank: int, size: int) -> None:
    if rank == 0:
        fl.all_reduce(verbs.on_gpu(np.ones(3)))


@pytest.mark.parametrize("missing", [never_calls, never_joins])
def test_survivors_name_a_rank_that_exits_without_the_call(missing: Callable[..., None]) -> None:
    late, idle = outcomes(missing)
    assert idle.ok, idle.report()
    assert late.error_type in ("CollectiveTimeoutError", "PeerLostError"), late.report()
    assert "rank 1" in late.message


def begins_anew(rank: int, size: int, meeting: str) -> float:
    """After a mismatch: leave, join again, and reduce."""
    result = call_differently(rank, size, "verb", connected)
    assert result.kind == "MismatchError", result
    fl.distributed_shutdown()
    params = {"FILE_PATH": meeting, "TIMEOUT": 5 * TIMEOUT}
    fl.distributed_init(fl.DistributedInit.FILE_SYSTEM, rank, size, params)
    x = verbs.on_gpu(np.full(10, rank + 1.0))
    fl.all_reduce(x)
    return float(x[0])


def test_processes_can_initialize_again_after_a_failure(tmp_path: Any) -> None:
    for outcome in outcomes(begins_anew, str(tmp_path / "again")):
        assert outcome.ok, outcome.report()
        assert outcome.value == 3.0


def on_the_wrong_device(rank: int, size: int) -> str:
    cupy = verbs.cupy()
    x = connected()
    other = 1 - int(x.device.id)
    with cupy.cuda.Device(other):
        elsewhere = cupy.ones(3)
    try:
        fl.all_reduce(elsewhere)
    except ValueError as error:
        return str(error)
    return ""


def test_all_reduce_rejects_an_array_on_another_device(pool: Any) -> None:
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    assert all("move it" in text for text in pool(2, **world(2)).run(on_the_wrong_device))
