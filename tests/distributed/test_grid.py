"""Cartesian grids, and messages beyond their edges."""

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.distributed.api.groups import Grid, extents_of
from tests.distributed import conformance
from tests.distributed.conformance import (
    LAYOUTS,
    WORLDS,
    assert_equal,
    on_ranks,
    ranks_in,
    values,
    with_layout,
)
from tests.distributed.harness import run_ranks

ranks = ranks_in(*WORLDS)


def factorisations(size: int, dims: int) -> Iterator[tuple[int, ...]]:
    for shape in itertools.product(range(1, size + 1), repeat=dims):
        if math.prod(shape) == size:
            yield shape


def compare_with_mpi(rank: int, size: int, most_dims: int) -> int:
    from mpi4py import MPI

    tried = 0
    for count in range(1, size + 1) if size < 12 else [size]:
        members = MPI.COMM_WORLD.group.Incl(range(count))
        group = fl.new_group(range(count))
        if rank < count:
            communicator = MPI.COMM_WORLD.Create_group(members)
            for dims in range(most_dims + 1):
                for shape in factorisations(count, dims):
                    for periodic in itertools.product((False, True), repeat=dims):
                        cart = communicator.Create_cart(shape, periodic)
                        check_same_grid(cart, group.grid(shape, periodic), MPI.PROC_NULL)
                        cart.Free()
                        tried += 1
            communicator.Free()
        members.Free()
        group.close()
    return tried


def check_same_grid(cart: Any, grid: Grid, no_rank: int) -> None:
    where = repr(grid)
    assert grid.coords == tuple(cart.coords), where
    for other in range(cart.Get_size()):
        assert grid.coords_of(other) == tuple(cart.Get_coords(other)), where
        assert grid.rank_of(grid.coords_of(other)) == other, where
    for dim, extent in enumerate(grid.shape):
        for steps in range(-extent - 1, extent + 2):
            expected = tuple(None if r == no_rank else r for r in cart.Shift(dim, steps))
            assert grid.shift(dim, steps) == expected, (where, dim, steps)
            assert grid.shift(dim - len(grid.shape), steps) == expected


def test_grid_matches_mpi(pool: Any) -> None:
    pytest.importorskip("mpi4py")
    tried = pool(4, init="mpi", params={"BACKEND": "mpi"}).run(compare_with_mpi, 2)
    assert tried[0] == tried[1] + 7


@pytest.mark.slow
def test_grid_matches_mpi_for_twelve_ranks() -> None:
    pytest.importorskip("mpi4py")
    run_ranks(compare_with_mpi, 12, 3, init="mpi", params={"BACKEND": "mpi"}, deadline=120.0)


def test_grid_computes_extents_like_mpi() -> None:
    mpi = pytest.importorskip("mpi4py.MPI")
    for size, dims in itertools.product(range(1, 65), range(1, 5)):
        extents, expected = extents_of([None] * dims, size), mpi.Compute_dims(size, dims)
        assert math.prod(extents) == size
        assert list(extents) == sorted(extents, reverse=True)
        spread = extents[0] - extents[-1]
        assert spread <= expected[0] - expected[-1], (size, dims, extents, expected)
        if dims < 3:
            assert list(extents) == expected
    assert extents_of((2, None, -1), 36) == (2, 6, 3)
    assert extents_of((np.int64(3), None), 12) == (3, 4)
    assert extents_of(7, 7) == extents_of(None, 7) == (7,)
    assert extents_of((None, None), 99_991) == (99_991, 1)  # a prime; computed at once


def test_grid_rejects_invalid_arguments() -> None:
    grid = fl.grid((1, 1), periodic=(True, False))
    assert grid == Grid(0, (1, 1), (True, False))
    assert grid.shift(0, 5) == (0, 0)
    assert grid.shift(1) == (None, None)
    assert grid.rank_of((-7, 0)) == 0
    assert grid.rank_of((0, 1)) is None
    for shape, pattern in [
        ((2, 3), r"must be 1, the number of ranks.* got 6 for shape \(2, 3\)"),
        ((2, None), r"got 2 for shape \(2, None\)"),
        ((0, 1), "positive integers"),
        ((1.0, 1), "positive integers"),
    ]:
        with pytest.raises(ValueError, match=pattern):
            fl.grid(shape)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="1 or 2 values"):
        fl.grid((1, 1), periodic=[True])
    with pytest.raises(ValueError, match=r"dim must be a dimension of \(1, 1\), got 2"):
        grid.shift(2)
    with pytest.raises(ValueError, match="coords must have 2 numbers"):
        grid.rank_of([0])
    with pytest.raises(ValueError, match="rank must be a rank of this group"):
        grid.coords_of(1)
    with pytest.raises(TypeError, match="group must be a ProcessGroup"):
        fl.grid(1, group=3)  # type: ignore[arg-type]


@on_ranks(("shm", 2))
def test_grid_raises_on_a_process_outside_the_group(rank: int, size: int) -> None:
    group = fl.new_group([1])
    if rank == 1:
        assert group.grid((1, 1)).coords == (0, 0)
    else:
        with pytest.raises(ValueError, match="the rank of this process"):
            group.grid((1, 1))
    with pytest.raises(ValueError, match=f"must be {size}, the number of ranks"):
        fl.grid((size, 2))


def halos(rank: int, size: int, layout: str, periodic: bool) -> None:
    """Exchange arrays with both neighbours, by sendrecv and in a batch. Edges receive nothing."""
    grid = fl.grid((1, size), periodic)
    x, empty = (values(number, (6, 5), "float32") for number in (rank, 77))
    sent, ends = with_layout(x, layout), [grid.shift(1, -1), grid.shift(1, +1)]
    expected_halos = [empty if src is None else values(src, (6, 5), "float32") for src, _ in ends]
    for is_batch in (False, True):
        outs = [with_layout(empty, layout) for _ in ends]
        if is_batch:
            sends = [fl.P2POp(fl.isend, sent, ends[i][1], i) for i in (0, 1)]
            receives = [fl.P2POp(fl.irecv, outs[i], ends[i][0], i) for i in (0, 1)]
            got = fl.batch_isend_irecv([*sends, *receives]).wait()
            assert got[0] is sent
            got = got[2:]
        else:
            got = [
                fl.sendrecv(sent, dst, out=out, src=src)
                for (src, dst), out in zip(ends, outs, strict=True)
            ]
        for side in (0, 1):
            assert got[side] is outs[side]
            assert_equal(got[side], expected_halos[side], f"is_batch={is_batch}, of {ends[side]}")


def test_grid_neighbours_exchange_halos_of_every_layout(ranks: Any) -> None:
    shaped = [layout for layout in LAYOUTS if conformance.shape_of(layout) == (6, 5)]
    ranks.run_each(halos, [*itertools.product(shaped, (False, True))])


@on_ranks()
def test_messages_with_peer_none_have_no_effect(rank: int, size: int) -> None:
    """Arrays of messages without a peer are not checked. Other functions name the valid ones."""
    x, out = np.full(3, 1.0), np.zeros(3)
    assert fl.sendrecv("no array", None, out=out, src=None) is out  # type: ignore[arg-type]
    assert fl.sendrecv(x, rank, out=out, src=rank) is out
    assert out.tolist() == [1.0] * 3
    for send in (fl.send, fl.isend):
        with pytest.raises(ValueError, match=r"got None. Only sendrecv and P2POp"):
            send(x, None)  # type: ignore[arg-type]
    no_rank = [fl.P2POp("send", x, None), fl.P2POp(fl.irecv, out, None, partial=True)]
    work = fl.batch_isend_irecv(no_rank)
    assert work.is_completed()
    assert [got is op.x for got, op in zip(work.wait(), no_rank, strict=True)] == [True] * 2
    assert fl.batch_isend_irecv([]).wait() == []
    group = fl.new_group([0])
    if rank == 0:
        assert group.sendrecv(x, None, out=out, src=0 if rank else None) is out
    group.close()
    calls = [
        lambda: group.sendrecv(x, None, out=out, src=None),
        lambda: group.batch_isend_irecv(no_rank),
    ]
    for call in calls:
        with pytest.raises((fl.errors.GroupClosedError, ValueError), match=r"closed|on a member"):
            call()
    for kind in ("receive", fl.send, print, [], None):
        with pytest.raises(ValueError, match="kind must be 'send', 'recv'"):
            fl.P2POp(kind, x, 0)  # type: ignore[arg-type]
