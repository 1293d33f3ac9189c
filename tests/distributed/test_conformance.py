"""Every backend compared with NumPy: dtypes, layouts, sizes, ops, sync and async."""

import itertools
import random
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py.distributed.verbs import VERBS
from tests.distributed import conformance
from tests.distributed.programs import every_verb, run_program

LARGER = [("gloo", 3), ("portable", 3), ("shm", 4), ("hierarchical", 4), ("mpi", 3)]
ranks = conformance.ranks_in(
    *(world for world in conformance.WORLDS if world not in LARGER), slow=LARGER
)

# The in-place reductions, and verbs that return a result on every rank; all_reduce is first.
REDUCTIONS = [verb.name for verb in VERBS if verb.reduces and verb.in_place]
FOR_ALL = [name for name in REDUCTIONS if not conformance.BY_NAME[name].rooted]
WIDTHS = ("int8", "float16", "complex128")

DATES = ("M8[ns]", "m8[25s]", ">M8[D]")
NO_ORDER = ("bfloat16", "bool", "int8", "uint8")  # byte order does not apply to 1-byte dtypes
CASES = [
    (dtype, layout)
    for dtype, layout in itertools.product(conformance.DTYPES, conformance.LAYOUTS)
    if dtype not in NO_ORDER or layout != "swapped bytes"
]


def test_reductions_match_numpy_for_each_dtype_and_each_layout(ranks: Any) -> None:
    some = [(d, lay) for d, lay in CASES if d == "float32" or lay == "strided"]
    # The arithmetic of the other verbs is the same.
    few = [(d, lay) for d, lay in some if d in ("float32", *WIDTHS)]
    dated = [*itertools.product(DATES, ("contiguous", "strided", "reversed", "empty"))]
    of = {verb: dated + (few if verb != REDUCTIONS[0] else some) for verb in REDUCTIONS}
    every = [(verb, *case) for verb, cases in of.items() for case in cases]
    ranks.run_each(conformance.check_every_op, every)


@pytest.mark.slow
def test_reductions_match_numpy_for_every_dtype_in_every_layout(ranks: Any) -> None:
    ranks.run_each(conformance.check_every_op, [(REDUCTIONS[0], *case) for case in CASES])


def test_reductions_match_numpy_for_sizes_around_every_threshold(ranks: Any) -> None:
    """Inline limits: 16 KB in memory, 64 KB over TCP. Chunks above have 512 KB per rank."""
    for verb, dtype in itertools.product(FOR_ALL, ("float32", "float16", "int8")):
        itemsize = conformance.dtype_of(dtype).itemsize
        inline = [(16 << 10) // itemsize, (64 << 10) // max(1, ranks.size - 1) // itemsize]
        chunk = (512 << 10) // itemsize
        around = [*inline, chunk, chunk * ranks.size, 2 * chunk * ranks.size]
        counts = [n + d for n in around for d in (-1, 0, 1)]
        counts += [2, 3, 5, 3 * chunk * ranks.size + 17]
        ranks.run(conformance.check_every_size, verb, dtype, counts)
    widest = itertools.product(FOR_ALL, ("bfloat16", "clongdouble"), ([300_001],))
    ranks.run_each(conformance.check_every_size, widest)


@conformance.on_ranks()
def test_reductions_have_the_same_bits_in_every_run(rank: int, size: int) -> None:
    for verb, count in itertools.product(FOR_ALL, (100, 300_001)):
        x = conformance.values(rank, (count,), "float32")
        first, *others = [getattr(fl, verb)(x.copy()).tobytes() for _ in range(3)]
        assert others == [first] * 2
        if not conformance.BY_NAME[verb].prefix:
            assert len(set(fl.all_gather_object(zlib.crc32(first)))) == 1, "on every rank"


@pytest.mark.parametrize(("op", "scale"), [("max", 2.0), ("avg", 1 / 3)])
@conformance.on_ranks()
def test_all_reduce_multiple_sums_mixed_arrays(rank: int, size: int, op: Any, scale: float) -> None:
    """Arrays below and above the packing limit, more than one message, contiguous and strided."""
    for contiguous, async_op in itertools.product((False, True), (False, True)):
        names = ["float32", "float16", "float64"] + ["int32"] * (op != "avg")
        shapes = [(), (0,), (3, 2), (2, 3), *[(1500,)] * 60, (2500,), (9000,)]
        shapes += [(n,) for n in range(99)]
        xs = [
            conformance.values(rank, shape, names[i % len(names)]).copy()
            for i, shape in enumerate(shapes)
        ]
        xs[2] = conformance.with_layout(xs[2], "fortran")
        if rank % 2:  # handled in Python on this rank
            xs[7] = conformance.with_layout(xs[7], "strided")
        expected = [x.copy() for x in xs]
        for x in expected:
            fl.all_reduce(x, scale, op=op)
        result = fl.all_reduce_multiple(xs, scale, op=op, async_op=async_op, contiguous=contiguous)
        got = result.wait() if async_op else result
        assert all(a is b for a, b in zip(got, xs, strict=True))
        assert [x.tobytes() for x in xs] == [x.tobytes() for x in expected]


@conformance.on_ranks()
def test_async_verbs_complete_even_if_their_work_is_dropped(rank: int, size: int) -> None:
    """If the program keeps neither Work nor array, the library still writes to live memory."""
    conformance.check_pending_works(rank, size)
    room = np.full((1000, 2), float(rank))
    packed = [np.full(10, float(rank)), np.full((2, 2), float(rank))]
    fl.all_reduce(room[:, 1], async_op=True)
    fl.all_reduce_multiple(packed, async_op=True, contiguous=True)
    fl.sync_distributed()
    assert all(np.all(x == sum(range(size))) for x in packed)
    assert np.all(room[:, 1] == sum(range(size)))
    assert np.all(room[:, 0] == rank)
    for i in range(50):
        fl.all_reduce(np.full(50_000, float(i)), async_op=True)
    x = np.ones(3)
    fl.all_reduce(x)
    assert np.all(x == size)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_concurrent_verbs_match_numpy_in_any_order_of_waiting(ranks: Any, dtype: str) -> None:
    calls = every_verb(ranks.size, dtype, (10, 2000))
    ranks.run(run_program, random.Random(1).sample(calls, 150), 12)


@pytest.mark.parametrize(
    ("verb", "dtypes", "rows"),
    [
        ("broadcast", ("bool", "complex128"), (0, 1, 7, 4097, 150_001)),
        ("all_gather", ("float64", "uint8"), (0, 1, 10, 100_000)),
        ("reduce_scatter_uneven", DATES, (0, 100)),
        ("reduce_scatter", ("float16", "int64", *DATES), (0, 1, 100)),
        ("reduce_scatter", ("float32",), (150_000,)),
    ],
)
def test_verbs_match_numpy_for_every_root_and_op(
    ranks: Any, verb: str, dtypes: tuple[str, ...], rows: tuple[int, ...]
) -> None:
    for dtype in dtypes:
        ops = conformance.ops_of(dtype) if verb.startswith("reduce_scatter") else ["sum"]
        ways = [*itertools.product(("fortran",), ops), ("strided", ops[0])]
        ranks.run(run_program, every_verb(ranks.size, dtype, [2], [verb], rows, ways))


@conformance.on_ranks()
def test_messages_in_a_ring_arrive_during_collectives_of_a_thread(rank: int, size: int) -> None:
    if size == 1:
        return  # no other rank (error case: test_arguments.py)
    for count in (0, 1, 5_000, 1_000_000):
        conformance.check_message_ring(rank, size, count)
    if size % 2:
        return
    peer = rank ^ 1

    def reduce() -> None:
        for _ in range(200):
            array = np.full(3_000, rank + 1.0)
            fl.reduce(array, root=0)
            assert rank != 0 or np.all(array == size * (size + 1) / 2)

    with ThreadPoolExecutor(1) as thread:
        reduced = thread.submit(reduce)
        for turn in range(200):
            message = np.full(3, turn, np.int32) if rank < peer else np.zeros(3, np.int32)
            if rank < peer:
                fl.send(message, peer)
            else:
                fl.recv(message, peer)
            assert np.all(message == turn)
        reduced.result()


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8"])
@conformance.on_ranks()
def test_all_reduce_location_returns_values_and_ranks(rank: int, size: int, name: str) -> None:
    everyone = [conformance.values(r, (40, 3), name).copy() for r in range(size)]
    if everyone[0].dtype.kind not in "biu":
        everyone[-1][0] = everyone[0][1, 0] = np.nan
    for op, find in (("min", np.argmin), ("max", np.argmax)):
        x = conformance.with_layout(everyone[rank], "fortran")
        got, ranks = fl.all_reduce_location(x, op=op)
        conformance.assert_equal(
            ranks, find(np.stack(everyone), axis=0), f"where the {op} of {name} is"
        )
        expected = conformance.combine_arrays(everyone, op, 1.0, flat=True)
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got.astype(float), expected.astype(float))  # NaNs as well
        assert x.tobytes() == everyone[rank].tobytes(), "the argument stays"
    got, ranks = fl.all_reduce_location(np.array(-1.0 * rank), op="min", async_op=True).wait()
    assert (got.shape, ranks.shape, int(ranks)) == ((), (), size - 1)
