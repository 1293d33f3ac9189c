"""Prefix reductions: what the table's meaning does not show, and large ones among many ranks."""

import itertools
import math
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from tests.distributed import conformance
from tests.distributed.conformance import on_ranks, ranks_in

ranks = ranks_in(("single", 1), ("gloo", 3), ("shm", 5), ("hierarchical", 4), ("mpi", 3))


@on_ranks()
def test_means_and_what_rank_0_has_of_an_exscan(rank: int, size: int) -> None:
    averages = np.array([[rank, 2 * rank]], np.float16)
    assert fl.scan(averages, op="avg").tolist() == [[rank / 2, rank]]
    assert fl.exscan(np.array(float(rank)), op="avg") == ((rank - 1) / 2 if rank else 0)
    for op, scale, later, first in (
        ("max", 2, 10, -(2**63)),
        ("lor", 1, 1, 0),
        ("sum", 2, 10 * rank, 0),
    ):
        x = np.array([5, 5])[::2]  # not contiguous
        assert fl.exscan(x, op=op, scale=scale) is x
        assert x[0] == (later if rank else first), op


@on_ranks()
def test_of_numbers(rank: int, size: int) -> None:
    assert fl.scan(1) == rank + 1
    assert fl.exscan(2.5) == 2.5 * rank
    product = fl.exscan(rank + 2, op="prod")
    assert product == math.prod(range(2, rank + 2))
    assert fl.exscan(True, op="or") is (rank > 0)
    assert fl.scan(rank > 0, op="or") is (rank > 0)
    with pytest.raises(OverflowError):
        fl.scan(2**63 - size + 1)
    with pytest.raises(TypeError, match="scan: a bool array"):
        fl.scan(np.ones(2, bool), op="sum")


@on_ranks()
def test_several_in_flight(rank: int, size: int) -> None:
    counts = [3, 50_000, 0, 200_000]
    arrays = [np.full(count, rank + 1.0) for count in counts]
    verbs = [fl.scan, fl.exscan, fl.scan, fl.exscan]
    works = [verb(x, async_op=True) for verb, x in zip(verbs, arrays, strict=True)]
    with fl.split(rank % 2) as group:  # beside them
        assert np.all(group.scan(np.ones(2)) == group.rank + 1)
    fl.sync_distributed()
    assert all(work.wait() is x for work, x in zip(works, arrays, strict=True))
    sums = [(rank + 1) * (rank + 2) / 2, rank * (rank + 1) / 2]
    for i, x in enumerate(arrays):
        assert np.all(x == sums[i % 2]), i


def test_large_ones_of_every_kind(ranks: Any) -> None:
    """16-bit floats go as float32; the widest elements; and more than a chunk of every rank."""
    dtypes, counts = ("float16", "bfloat16", "clongdouble", "int8"), [300_001]
    verbs = ("scan", "exscan")
    ranks.run_each(
        conformance.every_size, [(v, d, counts) for v, d in itertools.product(verbs, dtypes)]
    )
