"""The blocking communicator that is split from the first where NCCL connects when ranks join.

With the stand-in for NCCL: which of the two is given what, in which order they end, and that the
host never waits inside NCCL where nothing could end that wait.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.distributed.backends.nccl import joining, streams
from flashlight_py.distributed.backends.nccl.backend import NcclBackend
from flashlight_py.distributed.backends.nccl.communicator import Communicator, connects_at_once
from flashlight_py.distributed.backends.nccl.library import NcclLibrary
from flashlight_py.distributed.calls.call import Call
from flashlight_py.distributed.verbs import ALL_REDUCE
from flashlight_py.errors import (
    CollectiveTimeoutError,
    DistributedError,
    GroupClosedError,
    PeerLostError,
)
from tests.cupy_stand_in import LOG, Event, StandInCupy
from tests.distributed.nccl_stand_in import FIRST, QUICK, StandInNccl, number
from tests.distributed.test_nccl_failures import IN_PROGRESS, SYSTEM_ERROR, Cpu, Nccl, ffi, not_done
from tests.gpu import verbs

# On real processes ----------------------------------------------------------------------------


@pytest.fixture
def ranks(pool: Any) -> Any:
    return pool(2, env={"STAND_IN": "1", "NCCL_RUNTIME_CONNECT": "0"})


@pytest.mark.parametrize("dtype", ["float32", "int16"])
def test_every_verb(ranks: Any, dtype: str) -> None:
    for layout in ("contiguous", "strided"):
        ranks.run(verbs.all_reduce_every_op, dtype, layout)
        ranks.run(verbs.by_meaning, dtype, layout)
    ranks.run(verbs.all_reduce_multiple_mixed, True, True)
    for count in (0, 100):
        ranks.run(verbs.broadcast_from_each, dtype, count)
        ranks.run(verbs.all_gather_unequal, dtype, count)
        ranks.run(verbs.reduce_scatter_parts, dtype, count)
        ranks.run(verbs.ring_of_messages, count)
    ranks.run(verbs.composed_verbs, dtype)


def given_to_each(rank: int, size: int) -> tuple[list[str], list[str]]:
    """Return the functions of NCCL that the first, and the quick communicator have been given."""
    x = verbs.on_gpu(np.ones((size, 3)))
    given = joining.load().lib.given
    for names in given.values():
        names.clear()
    fl.all_reduce(x, scale=0.5)
    fl.all_reduce_multiple([x, x.copy()], scale=0.5)
    fl.broadcast(x, root=1)
    fl.reduce(x, root=0)
    fl.reduce_scatter(x)
    fl.all_gather(x)
    fl.all_to_all(x)
    if rank == 0:
        fl.send(x, 1)
    else:
        fl.recv(x, 0)
    return given[FIRST], given[QUICK]


ALONE = ["all_reduce", "broadcast", "reduce", "reduce_scatter", "all_gather"]
TOGETHER = ["all_reduce", "all_reduce", "send", "send", "recv", "recv"]


def test_collectives_of_their_own_go_to_the_quick_one(ranks: Any) -> None:
    for (first, quick), message in zip(ranks.run(given_to_each), ("send", "recv"), strict=True):
        assert first == [*TOGETHER, message]
        assert quick == ALONE


def test_without_the_variable_on_every_rank_there_is_none(pool: Any) -> None:
    def env(rank: int) -> dict[str, str]:
        return {"STAND_IN": "1", "NCCL_RUNTIME_CONNECT": str(rank)}

    for first, quick in pool(2, env=env).run(given_to_each):
        assert len(first) == len(ALONE) + len(TOGETHER) + 1
        assert quick == []


@pytest.mark.parametrize(
    ("version", "value", "expected"),
    [(22809, "0", True), (22809, "1", False), (22809, None, False), (21706, "0", False)],
)
def test_nccl_must_be_told_and_new_enough(
    version: int, value: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NCCL_RUNTIME_CONNECT", raising=False)
    if value is not None:
        monkeypatch.setenv("NCCL_RUNTIME_CONNECT", value)
    assert connects_at_once(NcclLibrary(ffi, None, "stand-in", version)) is expected


# The beginning and the end --------------------------------------------------------------------


class Both(Nccl):
    """Knows which communicator was ended how."""

    def __init__(self) -> None:
        super().__init__()
        LOG.clear()

    ncclCommAbort = StandInNccl.ncclCommAbort


def communicator(nccl: Nccl, timeout: float = 0.05) -> Communicator:
    library = NcclLibrary(ffi, nccl, "stand-in", 22809)
    return Communicator(library, bytes(range(128)), 0, 2, timeout, connected=True)


def test_the_end_is_that_of_the_quick_one_first() -> None:
    made = communicator(Both())
    assert made.close()
    assert LOG == [("destroy", QUICK), ("finalize", FIRST), ("destroy", FIRST)]
    assert not made.close()
    with pytest.raises(GroupClosedError):
        made.require("all_reduce")


def test_a_failure_aborts_both_and_once() -> None:
    made = communicator(Both())
    made.fail(PeerLostError("rank 1 is gone"))
    made.fail(PeerLostError("rank 1 is gone"))
    assert not made.close()
    assert LOG == [("abort", QUICK), ("abort", FIRST)]


def test_a_failure_of_either_is_seen() -> None:
    class Failing(Both):
        def ncclCommGetAsyncError(self, comm: Any, state: Any) -> int:
            state[0] = SYSTEM_ERROR if number(comm) == QUICK else 0
            return 0

    made = communicator(Failing())
    made.watch("all_reduce", time.monotonic())
    assert type(made.broken) is DistributedError
    assert LOG == [("abort", QUICK), ("abort", FIRST)]


def test_splitting_ends_with_the_timeout() -> None:
    nccl = Both()
    nccl.answers["ncclCommSplit"] = nccl.state = IN_PROGRESS
    with pytest.raises(CollectiveTimeoutError, match=r"\[init\] rank 0 of 2"):
        communicator(nccl)
    assert LOG == [("abort", FIRST)]


def test_a_split_that_fails_is_a_failure_to_join() -> None:
    nccl = Both()
    nccl.answers["ncclCommSplit"] = SYSTEM_ERROR
    with pytest.raises(DistributedError, match=r"\[init\] rank 0 of 2.*status 2"):
        communicator(nccl)
    assert LOG == [("abort", FIRST)]


# The number of collectives on their way -------------------------------------------------------


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> StandInCupy:
    library = StandInCupy(1)
    monkeypatch.setitem(sys.modules, "cupy", library)
    monkeypatch.setattr(Event, "__init__", not_done)
    monkeypatch.setattr(streams, "_MOST", 3)
    return library


def backend_of(cupy: StandInCupy, timeout: float) -> tuple[NcclBackend, Call]:
    backend = NcclBackend(Cpu(), communicator(Both(), timeout), cupy, 0)
    return backend, Call(ALL_REDUCE, cupy.asarray(np.ones(4)), blocking=False)


def test_one_too_many_waits_for_the_oldest(cupy: StandInCupy) -> None:
    backend, call = backend_of(cupy, 30.0)
    flights: Any = [backend.start(call) for _ in range(3)]
    timer = threading.Timer(0.05, vars(flights[0].flight.event).update, [{"done": True}])
    timer.start()
    begun = time.monotonic()
    flights.append(backend.start(call))
    assert time.monotonic() - begun >= 0.04
    timer.join()
    for work in flights:
        work.flight.event.done = True
    backend.close()
    assert [entry for entry in LOG if entry[0] == "nccl"] == [("nccl", "all_reduce")] * 4
    assert LOG[-3:] == [("destroy", QUICK), ("finalize", FIRST), ("destroy", FIRST)]


def test_the_wait_for_room_ends_with_the_timeout(cupy: StandInCupy) -> None:
    backend, call = backend_of(cupy, 0.3)
    for _ in range(3):
        backend.start(call)
    with pytest.raises(CollectiveTimeoutError, match=r"\[all_reduce\].*within 0.3 seconds"):
        backend.start(call)
    backend.close()
    assert LOG[-2:] == [("abort", QUICK), ("abort", FIRST)]


def test_the_end_does_not_wait_inside_nccl_for_what_still_runs(cupy: StandInCupy) -> None:
    backend, call = backend_of(cupy, 30.0)
    backend.communicator.timeout = 0.1
    backend._watchdog.stop()
    backend.start(call)
    backend.close()
    assert LOG[-2:] == [("abort", QUICK), ("abort", FIRST)]
