"""Every backend against NumPy: dtypes, layouts, sizes, ops, sync and async."""

import itertools
from typing import Any

import pytest

from flashlight_py.distributed.verbs import VERBS
from tests.distributed import conformance
from tests.distributed.conformance import BY_NAME, DTYPES, LAYOUTS, WORLDS, ranks_in
from tests.distributed.programs import every_verb, run_program

LARGER = [("gloo", 3), ("hierarchical", 4), ("mpi", 3)]
ranks = ranks_in(*(world for world in WORLDS if world not in LARGER), slow=LARGER)

# The verbs that reduce in place, and those of which every rank gets a result: all_reduce is first.
REDUCTIONS = [verb.name for verb in VERBS if verb.reduces and verb.in_place]
FOR_ALL = [name for name in REDUCTIONS if not BY_NAME[name].rooted]
WIDTHS = ("int8", "float16", "complex128")

DATES = ("M8[ns]", "m8[25s]", ">M8[D]")
NO_ORDER = ("bfloat16", "bool", "int8", "uint8")  # their bytes have none that is swapped
CASES = [
    (dtype, layout)
    for dtype, layout in itertools.product(DTYPES, LAYOUTS)
    if dtype not in NO_ORDER or layout != "swapped bytes"
]


def test_reductions_of_every_dtype_and_of_every_layout(ranks: Any) -> None:
    some = [(d, lay) for d, lay in CASES if d == "float32" or lay == "strided"]
    # Of the others: what differs between them is not the arithmetic.
    few = [(d, lay) for d, lay in some if d in ("float32", *WIDTHS)]
    of = {verb: few if verb != REDUCTIONS[0] else some for verb in REDUCTIONS}
    few += itertools.product(DATES, ("contiguous", "strided", "reversed", "empty"))
    every = [(verb, *case) for verb, cases in of.items() for case in cases]
    ranks.run_each(conformance.every_op, every)


@pytest.mark.slow
def test_reductions_of_every_dtype_in_every_layout(ranks: Any) -> None:
    ranks.run_each(conformance.every_op, [(REDUCTIONS[0], *case) for case in CASES])


def test_reductions_of_sizes_around_every_threshold(ranks: Any) -> None:
    """16 KB travel inline in memory, 64 KB over TCP; more in 512 KB chunks of each rank's part."""
    for verb, dtype in itertools.product(FOR_ALL, ("float32", "float16", "int8")):
        itemsize = conformance.dtype_of(dtype).itemsize
        inline = [(16 << 10) // itemsize, (64 << 10) // max(1, ranks.size - 1) // itemsize]
        chunk = (512 << 10) // itemsize
        around = [*inline, chunk, chunk * ranks.size, 2 * chunk * ranks.size]
        counts = [n + d for n in around for d in (-1, 0, 1)]
        counts += [2, 3, 5, 3 * chunk * ranks.size + 17]
        ranks.run(conformance.every_size, verb, dtype, counts)
    widest = itertools.product(FOR_ALL, ("bfloat16", "clongdouble"), ([300_001],))
    ranks.run_each(conformance.every_size, widest)


def test_a_reduction_gives_the_same_bits_every_time(ranks: Any) -> None:
    for verb, count in itertools.product(FOR_ALL, (100, 300_001)):
        runs = [ranks.run(conformance.reduce_again, verb, count) for _ in range(3)]
        assert runs[0] == runs[1] == runs[2]
        if not BY_NAME[verb].prefix:
            assert len(set(runs[0])) == 1, "on every rank"


def test_all_reduce_multiple_of_mixed_arrays(ranks: Any) -> None:
    ways = itertools.product((False, True), (False, True), ("sum", "max"), (2.0,))
    mean = itertools.product((False, True), (False, True), ("avg",), (1 / 3,))
    ranks.run_each(conformance.all_reduce_multiple_equals_a_loop, [*ways, *mean])


def test_works_that_are_in_flight_or_dropped(ranks: Any) -> None:
    ranks.run(conformance.many_in_flight)
    ranks.run(conformance.synchronise_strided)
    ranks.run(conformance.dropped_work_is_safe)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_everything_at_once_in_any_order_of_waiting(ranks: Any, seed: int) -> None:
    ranks.run(conformance.everything_at_once, seed, 150)


@pytest.mark.parametrize(
    ("verb", "dtypes", "rows"),
    [
        ("broadcast", ("float32", "int8", "bool", "complex128"), (0, 1, 7, 4097, 150_001)),
        ("all_gather", ("float64", "uint8"), (0, 1, 10, 100_000)),
        ("reduce_scatter_uneven", DATES, (0, 100)),
        ("reduce_scatter", ("float32", "float16", "int64", *DATES), (0, 1, 100, 150_000)),
    ],
)
def test_verbs_from_every_root_with_every_op(
    ranks: Any, verb: str, dtypes: tuple[str, ...], rows: tuple[int, ...]
) -> None:
    for dtype in dtypes:
        ops = conformance.ops_of(dtype) if verb.startswith("reduce_scatter") else ["sum"]
        ways = [*itertools.product(("fortran",), ops), ("strided", ops[0])]
        ranks.run(run_program, every_verb(ranks.size, dtype, [2], [verb], rows, ways))


def test_messages(ranks: Any) -> None:
    """Around a ring, and beside the collectives of another thread."""
    if ranks.size == 1:
        pytest.skip("a world of one has nobody to send to (refused: test_arguments.py)")
    ranks.run_each(conformance.ring_of_messages, [(0,), (1,), (5_000,), (1_000_000,)])
    if ranks.size % 2 == 0:
        ranks.run(conformance.two_threads)


def test_where_the_extremes_are(ranks: Any) -> None:
    ranks.run_each(conformance.locations, [("float32",), ("bfloat16",), ("int8",)])
