"""Two hosts of two ranks: the short form of the conformance suite, and one fault of each kind."""

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.cluster.hosts import Cluster
from tests.distributed import conformance
from tests.distributed.conformance import on_ranks
from tests.distributed.programs import every_verb, run_program


@pytest.fixture(scope="module")
def ranks(cluster: Cluster) -> Iterator[Any]:
    with cluster.ranks(2) as pool:
        yield pool


def places(rank: int, size: int) -> tuple[str, int]:
    return os.uname().nodename, int(fl.all_reduce(np.array(rank)))


def test_ranks_run_in_their_hosts(ranks: Any) -> None:
    assert ranks.run(places) == [("h0", 6), ("h0", 6), ("h1", 6), ("h1", 6)]


@on_ranks()
def test_the_short_form_of_the_conformance_suite(rank: int, size: int) -> None:
    for verb in ("all_reduce", "reduce"):
        for dtype in ("float32", "float16", "int8"):
            conformance.every_op(rank, size, verb, dtype, "strided")
            conformance.every_size(rank, size, verb, dtype, [1, 16_384, 16_385, 300_001])
    conformance.all_reduce_multiple_equals_a_loop(rank, size, True, True, "sum", 1.0)
    conformance.many_in_flight(rank, size)
    run_program(rank, size, every_verb(size, "float32", (1, 100_000)))
    conformance.ring_of_messages(rank, size, 100_000)
    conformance.locations(rank, size, "float32")


def reduce_for_ever(rank: int, size: int, dies: int) -> None:
    for turn in range(10**9):
        fl.all_reduce(np.ones(1000))
        if rank == dies and turn == 20:
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_rank_is_named_on_both_hosts(cluster: Cluster) -> None:
    with cluster.ranks(2) as pool:
        outcomes = pool.outcomes(reduce_for_ever, 3)
    assert outcomes[3].signal == signal.SIGKILL
    for outcome in outcomes[:3]:
        assert outcome.error_type == "PeerLostError", outcome.report()
        assert "rank 3" in outcome.message


@pytest.mark.slow
def test_a_pulled_cable_ends_the_call_on_both_hosts() -> None:
    with Cluster(2) as cluster, cluster.ranks(2, params={"TIMEOUT": 3}) as pool:
        pool.run(places)
        cluster[1].cut()
        began = time.monotonic()
        outcomes = pool.outcomes(reduce_for_ever, -1)
        cluster[1].mend()
    assert time.monotonic() - began < 15
    for outcome in outcomes:
        assert "DistributedError" in outcome.error_classes, outcome.report()
