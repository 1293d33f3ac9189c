"""Verbs return numbers for numbers. Other objects that are not arrays raise errors."""

import contextlib
import math

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.distributed.calls.checks import require_bits
from flashlight_py.distributed.constants import ReduceOp
from tests.distributed.conformance import on_ranks


@on_ranks(("shm", 2))
def test_verbs_return_numbers_for_each_kind_of_number(rank: int, size: int) -> None:
    world = fl.new_group(range(size))
    results = [
        fl.all_reduce(rank + 0.5),
        fl.all_reduce(rank + 0.5, op="avg"),
        fl.all_reduce(rank + 1, scale=2),
        fl.all_reduce(rank == 1, op="max"),
        fl.all_reduce(rank == 1, op="min"),
        fl.all_reduce(complex(rank, 1)),
        world.all_reduce(rank + 2, op="prod"),
        fl.all_reduce(rank, async_op=True).wait(),
        fl.broadcast(10 * rank, root=1),
        fl.broadcast(0.5 * rank, root=1, async_op=True).wait(),
        fl.reduce(rank + 1, root=1),
        fl.all_reduce(np.float32(rank)),
        fl.all_reduce(np.int16(-2)),
        fl.all_reduce(-7),
    ]
    world.close()
    reduced = 3 if rank == 1 else 1  # reduce leaves the numbers of other ranks unchanged
    expected: list[object] = [2.0, 1.0, 6, True, False, 1 + 2j, 6, 1, 10, 0.5, reduced]
    expected += [np.float32(1), np.int16(-4), -14]
    assert results == expected
    assert [type(x) for x in results] == [type(x) for x in expected]


@on_ranks(("shm", 2))
def test_all_reduce_location_returns_a_number_and_a_rank(rank: int, size: int) -> None:
    pair = fl.all_reduce_location(np.float32(-rank), async_op=True).wait()
    pairs = [
        fl.all_reduce_location(rank + 0.5, op="max"),
        fl.all_reduce_location(5 - rank),
        fl.all_reduce_location(rank == 1, op="max"),
        pair,
        fl.all_reduce_location(np.datetime64(rank, "s")),
    ]
    expected = [(1.5, 1), (4, 1), (True, 1), (np.float32(-1), 1), (np.datetime64(0, "s"), 0)]
    assert pairs == expected
    assert [(type(x), type(r)) for x, r in pairs] == [(type(x), int) for x, _ in expected]
    with pytest.raises(OverflowError, match="all_reduce_location: "):
        fl.all_reduce_location(2**63)


@on_ranks(("single", 1), ("gloo", 3), ("shm", 5), ("hierarchical", 4), ("mpi", 3))
def test_scans_return_numbers(rank: int, size: int) -> None:
    assert fl.scan(1) == rank + 1
    assert fl.exscan(2.5) == 2.5 * rank
    assert fl.exscan(rank + 2, op="prod") == math.prod(range(2, rank + 2))
    assert fl.exscan(True, op="or") is (rank > 0)
    assert fl.scan(rank > 0, op="or") is (rank > 0)
    with pytest.raises(OverflowError):
        fl.scan(2**63 - size + 1)
    with pytest.raises(TypeError, match="scan: for bool"):
        fl.scan(np.ones(2, bool), op="sum")


@pytest.mark.parametrize(
    ("x", "op", "scale", "size", "fits"),
    [
        (2**63 - 1, "max", 1.0, 8, True),
        (2**63, "max", 1.0, 8, False),
        (2**61, "sum", 1.0, 3, True),
        (-(2**61), "sum", 1.0, 4, False),
        (2**61, "sum", 8.0, 1, False),
        (2**20, "prod", 1.0, 3, True),
        (2**20, "prod", 1.0, 4, False),
        (2**61, "sum", float("inf"), 1, True),  # rejected later for another reason
    ],
)
def test_require_bits_limits_integers(x: int, op: str, scale: float, size: int, fits: bool) -> None:
    error = pytest.raises(OverflowError, match=f"must fit into 64 bits.* got {x}")
    with contextlib.nullcontext() if fits else error:
        require_bits("all_reduce", x, ReduceOp[op.upper()], scale, size)


def test_world_of_one_returns_the_same_number() -> None:
    assert fl.all_reduce(3.5) == 3.5
    assert fl.all_reduce(7, scale=3) == 21
    assert fl.broadcast(True) is True
    with pytest.raises(OverflowError):
        fl.broadcast(2**63)
    with pytest.raises(TypeError, match="bool"):
        fl.all_reduce(True)
