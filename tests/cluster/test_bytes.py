"""Bytes between hosts: minimum bytes, few exchanges, and the short conformance suite."""

import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.cluster.hosts import Cluster
from tests.distributed import conformance
from tests.distributed.conformance import dtype_of, on_ranks
from tests.distributed.programs import every_verb, run_program

MB = 1 << 20
CALLS = [
    *(("all_reduce", name) for name in ("float32", "float16", "bfloat16")),
    *(("all_gather", "float32"), ("reduce_scatter", "float32"), ("reduce_scatter", "float16")),
    *(("reduce", "float32"), ("broadcast", "float32")),
]
# Bytes of headers and of the comparison of calls, in addition to the arrays.
MOST = 1.01


def fewest(verb: str, size: int, counts: list[int]) -> float:
    """Return the least number of bytes of the busiest host, by bytes per rank and ranks per
    host."""
    hosts, ranks = len(counts), sum(counts)
    if verb in ("reduce", "broadcast"):
        return size
    if verb == "all_reduce":
        return 2 * (hosts - 1) / hosts * size
    # Bytes that a host sends and receives, from its own parts and the parts of other hosts. For
    # sums the directions are exchanged.
    parts = max(max(ranks - count, count * (hosts - 1)) for count in counts)
    return size * parts / (ranks if verb == "reduce_scatter" else 1)


def call(rank: int, size: int, verb: str, name: str, count: int) -> None:
    root = {"root": size - 1} if verb in ("reduce", "broadcast") else {}
    getattr(fl, verb)(np.ones(count, dtype_of(name)), **root)


def over_the_fewest(cluster: Cluster, ranks: Any, counts: list[int], verb: str, name: str) -> float:
    count = 4 * MB // dtype_of(name).itemsize
    ranks.run(call, verb, name, 16)  # the first call connects
    before = [cluster.bytes(host) for host in cluster]
    ranks.run(call, verb, name, count)
    after = [cluster.bytes(host) for host in cluster]
    moved = [
        new - old
        for pair in zip(before, after, strict=True)
        for old, new in zip(*pair, strict=True)
    ]
    return max(moved) / fewest(verb, 4 * MB, counts)


@pytest.mark.slow
@pytest.mark.parametrize("counts", [[2, 2], [1, 1, 1, 1], [3, 1], [1, 2, 1]], ids=str)
def test_collectives_send_the_minimum_of_bytes_between_hosts(counts: list[int]) -> None:
    with Cluster(len(counts)) as cluster, cluster.ranks(counts) as ranks:
        results = {one: over_the_fewest(cluster, ranks, counts, *one) for one in CALLS}
    assert 1 <= min(results.values()) <= max(results.values()) < MOST, results


def exchanges(rank: int, size: int) -> float:
    """Return the mean seconds of a small call, because a late rank waits less than the others."""
    x = np.ones(1024, np.float32)
    for _ in range(4):
        fl.all_reduce(x)
    began = time.perf_counter()
    for _ in range(20):
        fl.all_reduce(x)
    return (time.perf_counter() - began) / 20


@pytest.mark.slow
def test_small_collectives_take_one_exchange_between_hosts() -> None:
    delay = 0.05
    with Cluster(2, delay=delay) as cluster, cluster.ranks(2) as ranks:
        assert delay * 0.9 <= np.mean(ranks.run(exchanges)) < delay * 1.7


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
