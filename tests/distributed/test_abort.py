"""An exception that a host program catches is reported to the other ranks all the same."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.distributed import conformance
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


WORLDS: Any = [
    ({"params": {"BACKEND": "shm"}}, 2),
    ({"params": {"BACKEND": "gloo"}}, 2),
    ({"env": conformance.two_hosts}, 3),
]


@pytest.mark.parametrize(("world", "size"), WORLDS, ids=["shm", "gloo", "two hosts"])
def test_the_others_raise_while_its_host_lives_on(world: Any, size: int) -> None:
    said = run_ranks(by_a_host, size, None, deadline=30, **world)
    assert said[1] == "ValueError: a bad batch"
    for rank in {*range(size)} - {1}:
        assert said[rank].startswith("PeerLostError: ")
        assert "it raised ValueError: a bad batch" in said[rank]
        assert "in train\n" in said[rank]


def test_the_others_raise_under_mpi() -> None:
    pytest.importorskip("mpi4py")
    said = run_ranks(by_a_host, 2, None, deadline=30, init="mpi", params={"BACKEND": "mpi"})
    assert "it raised ValueError: a bad batch" in said[0]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_what_ends_a_program_is_reported_too(error: BaseException) -> None:
    said = run_ranks(by_a_host, 2, error, deadline=30)
    assert f"it raised {type(error).__name__}" in said[0]


def in_a_thread(rank: int, size: int) -> tuple[str, str]:
    """Rank 1 waits in a call that nobody joins, and raises on another thread."""
    fl.barrier()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(train, None) if rank == 1 else None
        x = np.zeros(3)
        said = caught(fl.recv, x, 1) if rank == 2 else caught(fl.all_reduce, x)
        return said, "" if future is None else repr(future.exception())


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_a_thread_reports_while_another_one_waits(backend: str) -> None:
    zero, one, two = run_ranks(in_a_thread, 3, deadline=30, params={"BACKEND": backend})
    assert one[0].startswith(("GroupClosedError", "PeerLostError"))  # whichever it notices first
    assert one[1] == "ValueError('a bad batch')"
    assert "PeerLostError" in zero[0]
    assert "PeerLostError" in two[0]


def success(rank: int, size: int) -> Any:
    for end in (SystemExit(0), SystemExit()):
        assert caught(train, end).startswith("SystemExit")
    return fl.all_reduce(np.array(rank))


def test_an_end_as_planned_is_none_to_report() -> None:
    assert run_ranks(success, 2) == [1, 1]


def test_without_other_ranks_it_does_nothing() -> None:
    assert caught(train, None) == "ValueError: a bad batch"
    assert caught(train, np.zeros(3)) == ""


def test_a_function_that_runs_later_is_refused() -> None:
    async def later() -> None:
        """Do nothing."""

    with pytest.raises(TypeError, match=r"cannot decorate .*later"):
        fl.abort_on_exception()(later)
