"""The MPI backend beside its CPU backend, on one host and several, and amid what MPI moves."""

from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.distributed import mpi_mix, mpi_ranks
from tests.distributed.conformance import two_hosts
from tests.distributed.harness import run_outcomes
from tests.distributed.test_failures import mismatch_then_go_on, stay_away

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
    assert all(
        f"calls are compared over {path}" in text for text, _ in ranks.run(mpi_ranks.describe)
    )
    ranks.run(mpi_mix.mix, 4, 60)
    ranks.run(mpi_ranks.messages_by_tag, 1000)
    for name in ("shape", "verb"):
        for message in ranks.run(mismatch_then_go_on, name):
            assert "called different things" in message
            assert "rank 0 called" in message


@ONE_AND_SEVERAL
@pytest.mark.parametrize(
    ("how", "own", "others"),
    [
        (
            "is interrupted",
            "KeyboardInterrupt",
            "lost rank 1 (it stopped in all_reduce: KeyboardInterrupt())",
        ),
        ("raises", "GroupClosedError", "it raised ValueError: in another thread"),
        ("leaves", "GroupClosedError", "lost rank 1 (it has left the group)"),
    ],
)
def test_who_ends_in_the_middle_is_named_at_once(
    control: str, how: str, own: str, others: str
) -> None:
    outcomes = run_outcomes(mpi_ranks.stop_in_the_middle, 3, how, **mpi_world(control))
    assert outcomes[1].value.startswith(own), outcomes[1].report()
    for rank in (0, 2):
        assert outcomes[rank].value.startswith("PeerLostError"), outcomes[rank].report()
        assert f"rank {rank} of 3: lost rank 1" in outcomes[rank].value
        assert others in outcomes[rank].value


@pytest.mark.slow
@ONE_AND_SEVERAL
def test_what_does_not_get_on_ends_after_the_timeout(control: str) -> None:
    world = mpi_world(control, TIMEOUT=1)
    for outcome in run_outcomes(mpi_ranks.stop_in_the_middle, 3, "is stuck", **world):
        assert "did not finish within 1 seconds" in outcome.value, outcome.report()


@pytest.mark.slow
@pytest.mark.parametrize("control", ["shm", GLOO])
def test_a_rank_that_has_done_its_part_may_leave(control: str) -> None:
    for outcome in run_outcomes(mpi_ranks.leave_in_order, 3, **mpi_world(control)):
        assert outcome.value == [1.0] * 10, outcome.report()


@pytest.mark.parametrize("control", [GLOO, pytest.param("both", marks=pytest.mark.slow)])
def test_a_rank_that_stays_away_is_named_on_several_hosts(control: str) -> None:
    outcomes = run_outcomes(stay_away, 3, 4.0, **mpi_world(control, TIMEOUT=1))
    for rank in (0, 2):
        assert "rank 1 did not join within" in outcomes[rank].value, outcomes[rank].report()


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
    world: dict[str, Any] = {"init": "mpi", "params": {"BACKEND": "mpi", "TIMEOUT": 2}}
    outcomes = run_outcomes(
        reduce_where_another_has_left, 3, env={"FLASHLIGHT_CHECKS": "0"}, **world
    )
    assert all(outcome.ok for outcome in outcomes), outcomes


@pytest.mark.slow
def test_without_comparing_a_wait_ends_all_the_same() -> None:
    world = {**mpi_world("shm", TIMEOUT=1), "env": {"FLASHLIGHT_CHECKS": "0"}}
    outcomes = run_outcomes(mpi_ranks.stay_away_unchecked, 3, **world)
    for rank in (0, 2):
        assert "a rank did not join" in outcomes[rank].value, outcomes[rank].report()
