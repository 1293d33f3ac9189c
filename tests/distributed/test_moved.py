"""Verbs that only move data: rows without bytes, and arrays of dtypes without arithmetic."""

import itertools
import re
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.errors import MismatchError
from tests.distributed.conformance import (
    assert_equal,
    dtype_of,
    late_message_mismatches,
    mismatch_now_or_later,
    on_ranks,
    ranks_in,
    values,
)
from tests.distributed.programs import MOVING, every_verb, run_program

ranks = ranks_in(("single", 1), ("shm", 3), ("gloo", 3), slow=[("hierarchical", 4), ("mpi", 3)])


@pytest.mark.parametrize("name", ["f4", "M8[s]"])
@on_ranks()
def test_gathers_count_rows_without_bytes(rank: int, size: int, name: str) -> None:
    many = [1, 4, 0, 2][:size]
    total = sum(many)
    dtype = np.dtype(name)  # native code leaves dates to Python
    x = np.zeros((many[rank], 2, 0, 3) if dtype.kind == "M" else (many[rank], 0), dtype)
    tail = x.shape[1:]
    assert fl.all_gather(x).shape == (total, *tail)
    assert fl.all_gather(x, async_op=True).wait().shape == (total, *tail)
    for root in range(size):
        for joined in (fl.gather(x, root), fl.gather(x, root, async_op=True).wait()):
            assert (joined is None) == (rank != root)
            assert joined is None or joined.shape == (total, *tail)
    out = np.empty((total, *tail), dtype)
    assert fl.all_gather(x, out=out) is out
    assert fl.all_gather(x, out=out, async_op=True).wait() is out
    joined = fl.gather(x, 0, out=out)
    assert joined is (out if rank == 0 else None)
    for wrong in (np.empty((total + 1, *tail), dtype), np.empty((0, *tail), dtype)):
        for async_op in (False, True):
            with pytest.raises(ValueError, match=f"expected out with {total} rows"):
                ended(fl.all_gather(x, out=wrong, async_op=async_op))
        if rank == 0:
            with pytest.raises(ValueError, match=f"expected out with {total} rows"):
                fl.gather(x, 0, out=wrong)
        else:
            fl.gather(x, 0)
    # The other ranks know how many rows arrive.
    part = np.zeros((size, *tail), dtype)
    assert fl.scatter(part if rank == 0 else None, 0).shape == (1, *tail)
    assert fl.reduce_scatter(part, op="max").shape == (1, *tail)
    assert fl.all_to_all(part).shape == part.shape
    rows = [r + rank for r in range(size)]
    all_rows = np.zeros((sum(rows), *tail), dtype)
    arrive = sum(rank + r for r in range(size))
    assert fl.all_to_all(all_rows, rows=rows).shape == (arrive, *tail)
    own_rows = np.zeros((sum(many), *tail), dtype)
    got = fl.scatter(own_rows if rank == 0 else None, 0, rows=many)
    assert got.shape == (many[rank], *tail)
    assert fl.reduce_scatter(own_rows, op="max", rows=many).shape == (many[rank], *tail)


@on_ranks()
def test_gathers_reject_an_out_without_rows(rank: int, size: int) -> None:
    """The address of an ``out`` without bytes must not be used."""
    memory = np.array([0, 64, 0, 0], np.int64)
    for x in (np.zeros((2, 2), np.int64), np.zeros((2, 2), "M8[s]")):
        out, arrays = np.ndarray((0, 2), x.dtype, memory.data), (x, np.asfortranarray(x))
        verbs = fl.all_gather, fl.gather
        for array, verb, async_op in itertools.product(arrays, verbs, (False, True)):
            if verb is fl.gather and rank:
                assert ended(verb(array, async_op=async_op)) is None
                continue
            with pytest.raises(ValueError, match=f"expected out with {2 * size} rows, .* got 0"):
                ended(verb(array, out=out, async_op=async_op))


def block(source: int, target: int) -> np.ndarray:
    """Return the block that one rank sends to the other."""
    kinds = ("f4", "M8[s]", "U3", "?", "c16")
    x = np.arange(2 * (source + target)).astype(kinds[(source + 2 * target) % 5])
    return x.reshape(2, -1) if source else x[::2] if target else x


@on_ranks()
def test_collectives_accept_blocks_of_any_layout(rank: int, size: int) -> None:
    sent = [block(rank, target) for target in range(size)]
    for async_op in (False, True):
        for outs in (None, [np.zeros_like(block(source, rank)) for source in range(size)]):
            got = ended(fl.all_to_all(sent, out=outs, async_op=async_op))
            for source, part in enumerate(got):
                assert part.dtype == block(source, rank).dtype
                np.testing.assert_array_equal(part, block(source, rank))
                assert outs is None or part is outs[source]
                part[:] = part  # is writable
    for wrong in (sent * 2, [None] * size):
        with pytest.raises((TypeError, ValueError), match="all_to_all"):
            fl.all_to_all(wrong)
    with pytest.raises(ValueError, match="rows and return_rows must be omitted"):
        fl.all_to_all(sent, rows=[1] * size)
    wrong_out = rf"out\[{rank}\] must be float32 \(2,\), as rank {rank} sends, got float64"
    for async_op in (False, True):
        with pytest.raises(ValueError, match=wrong_out):  # before data is sent
            fl.all_to_all(
                [np.ones(2, "f4")] * size, out=[np.zeros(2) for _ in sent], async_op=async_op
            )
        other, outs = (rank + 1) % size, [np.zeros(2, "f4") for _ in sent]
        outs[other] = np.zeros(2)
        with pytest.raises(
            ValueError, match=rf"out\[{other}\] must be .* rank {other} sends, got float64"
        ):
            ended(fl.all_to_all([np.ones(2, "f4")] * size, out=outs, async_op=async_op))
    with pytest.raises(ValueError, match=r"shares memory" if size > 1 else "sends"):
        fl.all_to_all(sent, out=[np.zeros(3)] * size)


RECORD = np.dtype([("x", "f4"), ("y", "i8", (2,)), ("when", "M8[ms]"), ("name", "U3")])
HOLES = np.dtype({"names": ["b", "a"], "formats": ["f8", "u1"], "offsets": [8, 1], "itemsize": 24})
MOVED = [
    *("datetime64[ns]", "datetime64[25s]", "timedelta64[D]", "timedelta64", ">M8[s]"),
    *("U2", "S8", "V5", "V1", RECORD, HOLES, [("r", RECORD), ("s", "S3")], "float8_e5m2", []),
    *([(("a title", "x"), "i2")], [("half", "bfloat16")], [("x", ">f4"), ("y", "<i2")]),
    (np.record, [("x", "f4")]),
]


LAYOUTS = [("contiguous", "sum"), ("reversed", "max"), ("fortran", "max")]  # max with out


def test_movement_verbs_accept_any_dtype(ranks: Any) -> None:
    for i, dtype in enumerate(map(dtype_of, MOVED)):
        ways = LAYOUTS if dtype == RECORD else [LAYOUTS[i % len(LAYOUTS)]]
        ranks.run(run_program, every_verb(ranks.size, dtype, [2], MOVING, [3], ways))


def test_movement_verbs_accept_any_size(ranks: Any) -> None:
    """No rows, and more bytes than one message holds."""
    for dtype, ways in ((RECORD, LAYOUTS[:1]), (np.dtype("M8[s]"), LAYOUTS[1:])):
        ranks.run(run_program, every_verb(ranks.size, dtype, [2], MOVING, [0, 3000], ways))


@on_ranks()
def test_partial_receive_from_any_rank_accepts_any_dtype(rank: int, size: int) -> None:
    for dtype in map(dtype_of, MOVED):
        x = values(1, (3, 2), dtype)
        if rank == 0 < size - 1:
            got = fl.recv(np.zeros((8, 2), dtype), None, tag=1, partial=True)
            assert_equal(got, x, str(dtype))
        elif rank == 1:
            fl.send(x, 0, tag=1)


@on_ranks()
def test_movement_verbs_accept_an_out_of_either_byte_order(rank: int, size: int) -> None:
    x = np.arange(2 * size, dtype=">f4").reshape(size, 2)
    for order, rows in itertools.product("<>", (None, [1] * size)):
        out, several = np.zeros((1, 2), f"{order}f4"), np.zeros((size, 2), f"{order}f4")
        for array in (x, np.split(x, size)):
            assert fl.scatter(array if rank == 0 else None, rows=rows, out=out) is out
            assert out.tolist() == x[rank : rank + 1].tolist()
        assert fl.all_to_all(x, rows=rows, out=several) is several
        assert several.tolist() == x[rank : rank + 1].tolist() * size
        blocks = np.split(several, size)
        assert fl.all_to_all(np.split(x, size), out=blocks)[0] is blocks[0]


@on_ranks(("shm", 2))
def test_movement_verbs_keep_dtype_metadata(rank: int, size: int) -> None:
    x = np.arange(size, dtype=np.int32).astype(np.dtype("i4", metadata={"of": lambda: 1}))
    assert fl.scatter(x if rank == 0 else None, 0, rows=[1] * size).tolist() == [rank]


def ended(result: Any) -> Any:
    return result.wait() if isinstance(result, fl.Work) else result


OTHER = np.dtype([("x", "f4"), ("z", "i8", (2,)), ("when", "M8[ms]"), ("name", "U3")])
LONG = [np.dtype([(f"a field {n}", "i4") for n in range(last)]) for last in (30, 31)]
PAIRS = [
    ("M8[ns]", "M8[us]", "datetime64[ns]", "datetime64[us]"),
    (RECORD, OTHER, "('y', '<i8', (2,))", "('z', '<i8', (2,))"),
    ("S8", "f8", "|S8", "float64"),
    (LONG[0], LONG[1], "a field 0", "#"),
]
CALLS: list[Any] = [
    fl.broadcast,
    fl.all_gather,
    lambda x: fl.gather(x, 1),
    fl.all_to_all,
    lambda x: fl.scatter(x, 0, out=x[: len(x) // fl.get_world_size()].copy()),
    lambda x: fl.scatter(
        x,
        rows=[len(x), *[0] * (fl.get_world_size() - 1)],
        out=x[:0].copy() if fl.get_world_rank() else None,
    ),
]


@on_ranks()
def test_different_dtypes_raise_mismatch_error_with_their_names(rank: int, size: int) -> None:
    if size == 1:
        return
    for one, other, *names in PAIRS:
        x = np.zeros((12, 2), one if rank == 0 else other)
        for call in CALLS:
            message = mismatch_now_or_later(lambda call=call, x=x: call(x))
            assert all(name in message for name in names), message
        if rank < 2:
            with pytest.raises(MismatchError) as caught:
                fl.sendrecv(x, 1 - rank, out=x.copy(), src=1 - rank)
            assert all(name in str(caught.value) for name in names), str(caught.value)
            late_message_mismatches(1 - rank)
        fl.barrier()
    dates = np.zeros(12, "M8[ns]" if rank == 0 else "M8[us]" if rank == 1 else "i8")
    for verb in (fl.all_reduce, fl.reduce, fl.reduce_scatter, fl.scan, fl.exscan):
        for op in ("min", "max"):
            message = mismatch_now_or_later(lambda verb=verb, op=op: verb(dates, op=op))
            assert re.search(r"datetime64\[ns\] .*datetime64\[us\] ", message), message


@on_ranks()
def test_dtypes_that_numpy_considers_equal_match(rank: int, size: int) -> None:
    for one, other in (("M8[s]", "M8[1000ms]"), ("m8[3ms]", "m8[3000us]")):
        assert np.dtype(other) == np.dtype(one)
        for kind in (lambda name: name, lambda name: [("a", "i4"), ("b", name, (2,))]):
            dtype = np.dtype(kind(other if rank else one))
            array = np.full(12, b"x" * dtype.itemsize).view(dtype)
            got = fl.broadcast(array.copy() if rank == 0 else np.zeros(12, dtype), 0)
            assert (got == array).all()


EXTREMES = {"min": np.minimum, "max": np.maximum}


@on_ranks()
def test_verbs_accept_dates_in_lists_and_scalars(rank: int, size: int) -> None:
    everyone = [values(r, (40, 2), "M8[ns]") for r in range(size)]
    for (op, ufunc), many in itertools.product(EXTREMES.items(), (False, True)):
        xs = [everyone[rank].copy(), everyone[rank][:1].copy()]
        fl.all_reduce_multiple(xs, op=op, contiguous=many)  # type: ignore[arg-type]
        np.testing.assert_array_equal(xs[0], ufunc.reduce(everyone))
        np.testing.assert_array_equal(xs[1], ufunc.reduce(everyone)[:1])
    alone = np.array("NaT" if rank == size - 1 else "2020", "M8[Y]")
    assert np.isnat(fl.all_reduce(alone.copy(), op="max"))
    assert np.isnat(fl.all_reduce(alone[()], op="min"))
    assert fl.all_reduce(np.timedelta64(rank, "s"), op="max") == np.timedelta64(size - 1, "s")
    latest, where = fl.all_reduce_location(alone.reshape(1), op="max")
    assert np.isnat(latest).all()
    assert where.tolist() == [size - 1]
