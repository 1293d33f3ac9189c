"""An exception that a host program catches is reported to the other ranks all the same."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.distributed.conformance import on_ranks
from tests.distributed.harness import run_ranks


@fl.abort_on_exception()
def train(batch: Any) -> Any:
    """A user's function: what it raises is reported."""
    with fl.abort_on_exception():  # nested: the innermost reports
        if batch is None:
            raise ValueError("a bad batch")
        if isinstance(batch, BaseException):
            raise batch
    return fl.all_reduce(np.zeros(3))


def caught(fn: Any, *args: Any) -> str:
    """What a host program does: catch, and live on."""
    try:
        fn(*args)
    except BaseException as error:  # noqa: BLE001 - as hosts do
        return f"{type(error).__name__}: {error}"
    return ""


def by_a_host(rank: int, size: int, error: BaseException | None) -> str:
    fl.barrier()
    said = caught(train, error if rank == 1 else np.zeros(3))
    if rank != 1:
        fl.distributed_shutdown()  # the group is closed, so this waits for nobody
    return said


@on_ranks(("shm", 2), ("gloo", 2), ("hierarchical", 3), ("mpi", 2), fresh=True)
def test_the_others_raise_while_its_host_lives_on(rank: int, size: int) -> None:
    said = by_a_host(rank, size, None)
    if rank == 1:
        assert said == "ValueError: a bad batch"
    else:
        assert said.startswith("PeerLostError: ")
        assert "it raised ValueError: a bad batch" in said
        assert "in train\n" in said


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_what_ends_a_program_is_reported_too(error: BaseException) -> None:
    said = run_ranks(by_a_host, 2, error, deadline=30)
    assert f"it raised {type(error).__name__}" in said[0]


@on_ranks(("shm", 3), ("gloo", 3), fresh=True)
def test_a_thread_reports_while_another_one_waits(rank: int, size: int) -> None:
    """Rank 1 waits in a call that nobody joins, and raises on another thread."""
    fl.barrier()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(train, None) if rank == 1 else None
        x = np.zeros(3)
        said = caught(fl.recv, x, 1) if rank == 2 else caught(fl.all_reduce, x)
    if future is None:
        assert "PeerLostError" in said
    else:
        assert said.startswith(("GroupClosedError", "PeerLostError"))  # whichever it notices first
        assert repr(future.exception()) == "ValueError('a bad batch')"


@on_ranks(("shm", 2))
def test_an_end_as_planned_is_none_to_report(rank: int, size: int) -> None:
    for end in (SystemExit(0), SystemExit()):
        assert caught(train, end).startswith("SystemExit")
    assert fl.all_reduce(np.array(rank)) == 1


def test_without_other_ranks_it_does_nothing() -> None:
    assert caught(train, None) == "ValueError: a bad batch"
    assert caught(train, np.zeros(3)) == ""


def test_a_function_that_runs_later_is_refused() -> None:
    async def later() -> None:
        """Do nothing."""

    with pytest.raises(TypeError, match=r"cannot decorate .*later"):
        fl.abort_on_exception()(later)
