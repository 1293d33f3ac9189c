"""Two hosts of two ranks: the short form of the conformance suite."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.hosts import Cluster
from tests.distributed import conformance
from tests.distributed.conformance import on_ranks
from tests.distributed.programs import every_verb, run_program


@pytest.fixture(scope="module")
def ranks(cluster: Cluster) -> Iterator[Any]:
    with cluster.ranks(2) as pool:
        yield pool


@on_ranks()
def test_two_hosts_of_two_ranks_pass_the_short_conformance_suite(rank: int, size: int) -> None:
    assert os.uname().nodename == f"h{rank // 2}"
    for verb in ("all_reduce", "reduce"):
        conformance.check_every_op(rank, size, verb, "float32", "strided")
        conformance.check_every_size(rank, size, verb, "float16", [1, 16_384, 16_385, 300_001])
    conformance.check_pending_works(rank, size)
    run_program(rank, size, every_verb(size, "float32", (1, 100_000)))
    conformance.check_message_ring(rank, size, 100_000)
