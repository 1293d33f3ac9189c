"""The MPI backend beside its CPU backend, on one host and several, and amid what MPI moves."""

from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.distributed import mpi_mix, mpi_ranks
from tests.distributed.conformance import two_hosts
from tests.distributed.harness import run_ranks
from tests.distributed.test_failures import CALLS, stay_away
from tests.distributed.told import told_now_or_later

pytest.importorskip("mpi4py")


def apart(rank: int) -> dict[str, str]:
    """No two ranks share memory."""
    return {"FLASHLIGHT_MEMORY_DOMAIN": str(rank)}


WORLDS: dict[str, dict[str, Any]] = {"shm": {}, "gloo": {"env": apart}, "both": {"env": two_hosts}}
GLOO = pytest.param("gloo", marks=pytest.mark.slow)
ONE_AND_SEVERAL = pytest.mark.parametrize("control", ["shm", GLOO])


def mpi_world(control: str, **params: Any) -> dict[str, Any]:
    return {"init": "mpi", "params": {"BACKEND": "mpi", **params}, **WORLDS[control]}


@pytest.mark.parametrize(
    ("control", "path"),
    [
        pytest.param("gloo", "Gloo", marks=pytest.mark.slow),
        ("both", "shared memory inside hosts, Gloo between"),
    ],
)
def test_on_several_hosts(pool: Any, control: str, path: str) -> None:
    ranks = pool(3, **mpi_world(control))
    for text, _ in ranks.run(mpi_ranks.describe):
        assert f"calls are compared over {path}" in text
    ranks.run(mpi_mix.mix, 4, 60)
    ranks.run(mpi_ranks.messages_by_tag, 1000)
    ranks.run(call_differently)


def call_differently(rank: int, size: int) -> None:
    for name in ("shape", "verb"):
        message = told_now_or_later(lambda name=name: CALLS[name](rank))
        assert "called different things" in message
        assert "rank 0 called" in message
        assert np.all(fl.all_reduce(np.ones(5)) == size)  # the group lives on


@ONE_AND_SEVERAL
@pytest.mark.parametrize(
    ("how", "own", "others"),
    [
        ("is interrupted", "KeyboardInterrupt", "(it stopped in all_reduce: KeyboardInterrupt())"),
        ("raises", "GroupClosedError", "it raised ValueError: in another thread"),
        ("leaves", "GroupClosedError", "lost rank 1 (it has left the group)"),
    ],
)
def test_who_ends_in_the_middle_is_named_at_once(
    control: str, how: str, own: str, others: str
) -> None:
    texts = run_ranks(mpi_ranks.stop_in_the_middle, 3, how, **mpi_world(control))
    assert texts[1].startswith(own), texts
    for rank in (0, 2):
        assert texts[rank].startswith("PeerLostError"), texts
        assert f"rank {rank} of 3: lost rank 1" in texts[rank]
        assert others in texts[rank]


@pytest.mark.slow
@ONE_AND_SEVERAL
def test_what_does_not_get_on_ends_after_the_timeout(control: str) -> None:
    world = mpi_world(control, TIMEOUT=1)
    for text in run_ranks(mpi_ranks.stop_in_the_middle, 3, "is stuck", **world):
        assert "did not finish within 1 seconds" in text


@pytest.mark.slow
@ONE_AND_SEVERAL
def test_a_rank_that_has_done_its_part_may_leave(control: str) -> None:
    assert run_ranks(mpi_ranks.leave_in_order, 3, **mpi_world(control)) == [[1.0] * 10] * 3


@pytest.mark.parametrize("control", [GLOO, pytest.param("both", marks=pytest.mark.slow)])
def test_a_rank_that_stays_away_is_named_on_several_hosts(control: str) -> None:
    texts = run_ranks(stay_away, 3, 4.0, **mpi_world(control, TIMEOUT=1))
    assert all("rank 1 did not join within" in texts[rank] for rank in (0, 2)), texts


def reduce_where_another_has_left(rank: int, size: int) -> None:
    group = fl.new_group(range(size))
    if rank == size - 1:
        group.close()
    else:
        with pytest.raises(fl.errors.DistributedError):
            group.all_reduce(np.full(4, 5.0))
    fl.barrier()


@pytest.mark.slow
def test_without_comparing_a_rank_that_has_left_takes_no_part() -> None:
    world = mpi_world("shm", TIMEOUT=2)
    run_ranks(reduce_where_another_has_left, 3, **world, env={"FLASHLIGHT_CHECKS": "0"})


@pytest.mark.slow
def test_without_comparing_a_wait_ends_all_the_same() -> None:
    world = mpi_world("shm", TIMEOUT=1)
    texts = run_ranks(mpi_ranks.stay_away_unchecked, 3, **world, env={"FLASHLIGHT_CHECKS": "0"})
    assert all("a rank did not join" in texts[rank] for rank in (0, 2)), texts
