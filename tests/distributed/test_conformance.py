"""Every backend against NumPy: dtypes, layouts, sizes, ops, sync and async."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import conformance
from tests.distributed.conformance import DTYPES, LAYOUTS, WORLDS, ranks_in

ranks = ranks_in(*WORLDS)


@pytest.mark.parametrize("dtype", DTYPES)
def test_all_reduce_of_every_dtype_layout_and_op(ranks: Any, dtype: str) -> None:
    for layout in LAYOUTS:
        if not (layout == "swapped bytes" and dtype in ("bfloat16", "bool", "int8", "uint8")):
            ranks.run(conformance.all_reduce_every_op, dtype, layout)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8"])
def test_all_reduce_of_sizes_around_every_threshold(ranks: Any, dtype: str) -> None:
    """16 KB travel inline in memory, 64 KB over TCP; more in 512 KB chunks of each rank's part."""
    itemsize = conformance.dtype_of(dtype).itemsize
    inline = [(16 << 10) // itemsize, (64 << 10) // max(1, ranks.size - 1) // itemsize]
    chunk = (512 << 10) // itemsize
    around = [*inline, chunk, chunk * ranks.size, 2 * chunk * ranks.size]
    counts = [2, 3, 5, *(n + d for n in around for d in (-1, 0, 1)), 3 * chunk * ranks.size + 17]
    ranks.run(conformance.all_reduce_sizes, dtype, counts)


def test_all_reduce_gives_the_same_bits_on_every_rank_and_every_time(ranks: Any) -> None:
    for count in (100, 300_001):
        runs = [ranks.run(conformance.all_reduce_twice, count) for _ in range(3)]
        assert len({bits for run in runs for bits in run}) == 1


@pytest.mark.parametrize("contiguous", [False, True])
@pytest.mark.parametrize("async_op", [False, True])
def test_all_reduce_multiple_of_mixed_arrays(ranks: Any, contiguous: bool, async_op: bool) -> None:
    ranks.run(conformance.all_reduce_multiple_mixed, contiguous, async_op)


def test_many_operations_in_flight_and_sync_distributed(ranks: Any) -> None:
    ranks.run(conformance.many_in_flight)


def test_sync_distributed_brings_results_home_that_nobody_waits_for(ranks: Any) -> None:
    ranks.run(conformance.synchronise_strided)


def test_a_dropped_work_writes_into_live_memory(ranks: Any) -> None:
    ranks.run(conformance.dropped_work_is_safe)


@pytest.mark.parametrize("dtype", ["float32", "int8", "bool", "complex128"])
def test_broadcast_from_every_root(ranks: Any, dtype: str) -> None:
    for count in (0, 1, 7, 4097, 300_001):
        ranks.run(conformance.broadcast_from_each, dtype, count)


@pytest.mark.parametrize("dtype", ["float64", "uint8"])
def test_all_gather_of_unequal_first_dimensions(ranks: Any, dtype: str) -> None:
    for rows in (0, 1, 10, 100_000):
        ranks.run(conformance.all_gather_unequal, dtype, rows)


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64"])
def test_reduce_scatter_keeps_this_ranks_part(ranks: Any, dtype: str) -> None:
    for rows in (0, 1, 100, 150_000):
        ranks.run(conformance.reduce_scatter_parts, dtype, rows)


def test_send_and_recv_around_a_ring(ranks: Any) -> None:
    if ranks.size == 1:
        pytest.skip("a world of one has nobody to send to (refused: test_arguments.py)")
    for count in (0, 1, 5_000, 1_000_000):
        ranks.run(conformance.ring_of_messages, count)


def test_messages_run_beside_collectives(ranks: Any) -> None:
    if ranks.size > 1:
        ranks.run(conformance.messages_beside_collectives)


def test_two_threads_of_a_rank_call_different_verbs(ranks: Any) -> None:
    if ranks.size in (2, 4):
        ranks.run(conformance.two_threads)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_where_the_extremes_are(ranks: Any, dtype: str) -> None:
    ranks.run(conformance.locations, dtype)
