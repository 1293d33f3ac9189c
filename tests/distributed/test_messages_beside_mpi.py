"""Random programs of messages receive the same in this package and in MPI."""

from typing import Any

import pytest

from tests.distributed.conformance import BACKENDS
from tests.distributed.message_programs import run_on_both

pytest.importorskip("mpi4py")

TRIED = [("shm", 2), ("shm", 4), ("gloo", 3), ("hierarchical", 4), ("mpi", 3)]


def ranks_of(pool: Any, backend: str, size: int) -> Any:
    return pool(size, **{**BACKENDS[backend][1], "init": "mpi"})


@pytest.mark.parametrize(("backend", "size"), TRIED)
def test_random_messages_are_received_as_in_mpi(pool: Any, backend: str, size: int) -> None:
    ranks_of(pool, backend, size).run_each(run_on_both, [(100, 8, 1), (100, 100, 2)])


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "size"), TRIED)
def test_10_000_random_messages_are_received_as_in_mpi(pool: Any, backend: str, size: int) -> None:
    programs = [(10_000, 30, 3), (10_000, 1000, 4)]
    ranks_of(pool, backend, size).run_each(run_on_both, programs, deadline=110.0)
