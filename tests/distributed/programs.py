"""Random programs: lists of calls that every rank makes. Each result is compared with NumPy.

A call is plain data, which hypothesis can draw and shrink and which can be sent to ranks. The input
of every rank follows from the call and the rank, so any rank can compute all inputs.
"""

import contextlib
import dataclasses
import random
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

import flashlight_py as fl
from flashlight_py.distributed.calls.combining import RESULTS
from flashlight_py.distributed.verbs import ALL_TO_ALL, REDUCE_SCATTER, SCATTER
from flashlight_py.distributed.verbs import VERBS as VERBS_OF_ALL
from tests.distributed.conformance import (
    DTYPES,
    Array,
    assert_equal,
    combine_arrays,
    dtype_of,
    expected_result,
    ops_of,
    ranks_by_host,
    takes_scale,
    unchanged_value,
    values,
    with_layout,
)

# Verbs of the table, each also with unequal parts if it supports them.
TABLE_VERBS = {verb.name: verb for verb in VERBS_OF_ALL if verb in RESULTS}
UNEVEN = {f"{verb}_uneven": verb for verb in (REDUCE_SCATTER, SCATTER, ALL_TO_ALL)}
MESSAGES = ("sendrecv", "crossing messages")
OBJECTS = ("broadcast_object", "all_gather_object", "gather_object", "scatter_object")
# Verbs that accept a root, and verbs that accept async_op.
ROOTED = [name for name, verb in (TABLE_VERBS | UNEVEN).items() if verb.rooted]
ROOTED += ["broadcast_object", "gather_object", "scatter_object"]
ASYNCHRONOUS = (*TABLE_VERBS, *UNEVEN, "several", *MESSAGES)
VERBS = (*ASYNCHRONOUS, *OBJECTS, "barrier")
# Verbs that compute nothing and accept any dtype.
MOVING = [name for name, verb in (TABLE_VERBS | UNEVEN).items() if not verb.reduces]
MOVING += MESSAGES
# Widths of rows on both sides of every size threshold of the libraries.
WIDTHS = (1, 3, 700, 30_000)
TAGS = (0, 2**31 - 1)  # the smallest and the largest
MOST_CALLS = 12  # per program: the ranks receive all calls in one request


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of one verb. ``members`` are ranks of the world, in the order of the group."""

    verb: str
    dtype: Any
    rows: int
    width: int
    layout: str
    root: int
    op: str
    scale: float
    async_op: bool
    members: tuple[int, ...]

    def array(self, member: int, rows: int | None = None) -> Array:
        """Return the input of rank ``member`` of the group."""
        count = self.rows if rows is None else rows
        return values(self.members[member], (count, self.width), self.dtype)

    def unequal(self, member: int) -> Array:
        """Return the same input with a first dimension that depends on the rank."""
        return self.array(member, self.rows * (member % 3))

    def rows_for(self, member: int) -> int:
        return self.rows * ((member + 1) % 3)

    def rows_between(self, source: int, destination: int) -> int:
        return (self.rows * (source + 2 * destination)) % 5


@st.composite
def programs(draw: Any, size: int, verbs: Sequence[str] = VERBS) -> list[Call]:
    some = [draw(st.permutations(range(size)))[: draw(st.integers(1, size))] for _ in range(2)]
    groups = [tuple(range(size)), *map(tuple, some)]
    return draw(st.lists(_calls(groups, verbs), min_size=1, max_size=MOST_CALLS))


@st.composite
def _calls(draw: Any, groups: Sequence[tuple[int, ...]], verbs: Sequence[str]) -> Call:
    dtype = draw(st.sampled_from(DTYPES))
    op = draw(st.sampled_from(ops_of(dtype)))
    scales = [1.0, 2.0] if is_whole(dtype) else [1.0, 0.375]
    scales = scales if takes_scale(dtype, op) else [1.0]
    layouts = ["contiguous", "fortran", "strided", "reversed"]
    members = draw(st.sampled_from(groups))
    return Call(
        verb=draw(st.sampled_from(verbs)),
        dtype=dtype,
        rows=draw(st.integers(0, 4)),
        width=draw(st.sampled_from(WIDTHS)),
        layout=draw(st.sampled_from(layouts)),
        root=draw(st.integers(0, len(members) - 1)),
        op=op,
        scale=draw(st.sampled_from(scales)),
        async_op=draw(st.booleans()),
        members=members,
    )


def every_verb(
    size: int,
    dtype: Any,
    widths: Sequence[int],
    verbs: Sequence[str] = VERBS,
    every_rows: Sequence[int] = (0, 1, 3),
    ways: Sequence[tuple[str, str]] = (("contiguous", "sum"),),
) -> list[Call]:
    everyone = tuple(range(size))
    return [
        Call(verb, dtype, rows, width, layout, root, op, 1.0, async_op, everyone)
        for verb in verbs
        for rows in every_rows
        for width in widths
        for layout, op in ways
        for roots in [everyone if verb in ROOTED else (0,)]
        for root, async_op in {(0, False), *((root, verb in ASYNCHRONOUS) for root in roots)}
    ]


def is_whole(dtype: Any) -> bool:
    return dtype_of(dtype).kind in "iu"


Steps = Generator[None, None, Any]  # yields while an asynchronous call is open


def run_program(rank: int, size: int, program: Sequence[Call], most_pending: int = 0) -> None:
    """Make every call and check its result. Up to ``most_pending`` asynchronous calls stay open,
    and each rank finishes them in an order of its own."""
    groups: dict[tuple[int, ...], fl.ProcessGroup] = {}
    order, pending = random.Random(rank), []
    for call in program:
        if call.members not in groups:
            groups[call.members] = fl.new_group(call.members)
        group = groups[call.members]
        if group.is_member:
            print(call, flush=True)  # printed so that the log of a stuck rank ends with it
            pending.append(_run(call, group))
            next(pending[-1], None)
        while len(pending) > order.randint(0, most_pending):
            index = order.randrange(len(pending))
            if next(pending[index], "has ended"):
                del pending[index]
    for steps in pending:
        for _ in steps:
            pass
    for group in groups.values():
        group.close()
    fl.barrier()


def _run(call: Call, group: fl.ProcessGroup) -> Steps:
    try:
        yield from _STEPS[call.verb](call, group) or ()
    except Exception as error:
        raise AssertionError(f"rank {group.rank} of {group.size} in {call}") from error


def _out(call: Call, like: Array) -> Array | None:
    return with_layout(np.empty_like(like), call.layout) if call.op in ("max", "avg") else None


def _result(call: Call, answer: Any) -> Steps:
    if not call.async_op:
        return answer
    while True:
        yield  # other calls may follow
        with contextlib.suppress(fl.errors.CollectiveTimeoutError):
            return answer.wait(0.02)


def _of_the_table(call: Call, group: fl.ProcessGroup) -> Steps:
    """Compare with the definition of the verb in the table, for equal or unequal parts."""
    verb, rank, size = (TABLE_VERBS | UNEVEN)[call.verb], group.rank, group.size
    options = {name: getattr(call, name) for name in ("op", "scale", "root") if name in verb.takes}
    rows = [call.rows_for(r) if call.verb in UNEVEN else call.rows for r in range(size)]
    if call.verb in UNEVEN:
        options["rows"] = rows
    inputs = [call.unequal(r) if verb.ragged else call.array(r) for r in range(size)]
    if verb.cuts:
        inputs = [call.array(r, sum(rows)) for r in range(size)]
    x = with_layout(inputs[rank], call.layout)
    expected = expected_result(verb, inputs, rank, flat=True, **options)
    if expected is not None and not verb.reduces:  # NumPy removes the padding of records
        expected = expected.astype(x.dtype)
    out = None if verb.in_place or expected is None else _out(call, expected)
    if out is not None:
        options["out"] = out
    answer = getattr(fl, verb.name)(x, async_op=call.async_op, group=group, **options)
    got = yield from _result(call, answer)
    assert got is x if verb.in_place else out is None or got is out
    if not verb.in_place:
        assert_equal(x, inputs[rank], "the argument stays")
        assert got is None or got.dtype in (x.dtype, x.dtype.newbyteorder("=")), repr(call)
    elif expected is None:
        expected = unchanged_value(verb.name, inputs[rank], call.op)
    if verb.reduces:
        assert_reduced(call, got, expected)
    elif expected is None:
        assert got is None, repr(call)
    else:
        assert_equal(got, expected, repr(call))


def assert_reduced(call: Call, got: Array, expected: Array) -> None:
    """Compare bit by bit, except if ranks of several hosts are combined host by host."""
    if np.array_equal(got, expected):
        return
    if not ranks_by_host(len(call.members)) or got.dtype.kind in "iubmM":
        assert_equal(got, expected, repr(call))
        return
    accuracy = {2: 1e-2, 4: 1e-5}.get(got.real.dtype.itemsize, 1e-12)
    got, expected = (np.asarray(a, np.complex128) for a in (got, expected))
    np.testing.assert_allclose(got, expected, accuracy, accuracy, err_msg=repr(call))


def _scatter(call: Call, group: fl.ProcessGroup) -> Steps:
    is_uneven = call.verb in UNEVEN
    rows = [call.rows_for(r) if is_uneven else call.rows for r in range(group.size)]
    array = values(99, (sum(rows), call.width), call.dtype)
    parts = np.split(array, np.cumsum(rows)[:-1])
    xs: Any = None
    if group.rank == call.root:
        as_list = call.layout == "fortran"
        xs = [with_layout(p, "fortran") for p in parts]
        xs = xs if as_list else with_layout(array, call.layout)
    part = parts[group.rank]
    machines, out = part.dtype.newbyteorder("="), None
    if call.layout == "strided" or group.rank % 2:  # in both byte orders
        out = np.empty(part.shape, part.dtype if call.async_op else machines)
    options: dict[str, Any] = {"rows": rows} if is_uneven else {}
    options |= {"out": out, "group": group, "async_op": call.async_op}
    got = yield from _result(call, fl.scatter(xs, call.root, **options))
    assert got is out or (out is None and got.dtype == machines), repr(call)
    assert_equal(got, part, repr(call))


def _several(call: Call, group: fl.ProcessGroup) -> Steps:
    rank, size = group.rank, group.size
    lists = [[call.unequal(r), values(r, (3,), "int16"), call.array(r)] for r in range(size)]
    expected = [np.concatenate(arrays) for arrays in zip(*lists, strict=True)]
    outs = [None, np.empty_like(expected[1]), None] if call.layout == "fortran" else None
    inputs = [with_layout(array, "contiguous") for array in lists[rank]]
    gathered = fl.all_gather(inputs, out=outs, async_op=call.async_op, group=group)
    wide = [values(r, (2 * size, call.width), call.dtype) for r in range(size)]
    reduced = fl.reduce_scatter(
        (wide[rank], wide[rank][:size]),
        scale=call.scale,
        op=call.op,
        out=None,
        async_op=call.async_op,
        group=group,
    )
    gathered, reduced = (yield from _result(call, gathered)), (yield from _result(call, reduced))
    assert outs is None or gathered[1] is outs[1]
    for got, array in zip(gathered, expected, strict=True):
        assert_equal(got, array, repr(call))
    for rows, part in zip((2, 1), reduced, strict=True):
        parts = [array[rows * rank : rows * (rank + 1)] for array in wide]
        assert_reduced(call, part, combine_arrays(parts, call.op, call.scale, flat=True))


def _all_to_all_uneven(call: Call, group: fl.ProcessGroup) -> Steps:
    size, rank = group.size, group.rank
    table = [[call.rows_between(s, d) for d in range(size)] for s in range(size)]
    everyone = [call.array(s, sum(table[s])) for s in range(size)]
    x = with_layout(everyone[rank], call.layout)
    pieces = [np.split(everyone[s], np.cumsum(table[s])[:-1])[rank] for s in range(size)]
    expected = np.concatenate(pieces).astype(call.dtype)
    out = _out(call, expected)
    answer = fl.all_to_all(
        x, rows=table[rank], out=out, async_op=call.async_op, group=group, return_rows=rank % 2 == 0
    )
    got = yield from _result(call, answer)
    if rank % 2 == 0:
        got, received_rows = got
        assert received_rows == [table[source][rank] for source in range(size)], repr(call)
    assert out is None or got is out
    assert_equal(got, expected, repr(call))


def _sendrecv(call: Call, group: fl.ProcessGroup) -> None:
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    x, expected = with_layout(call.array(group.rank), call.layout), call.array(before)
    out = x if call.async_op else with_layout(np.zeros_like(expected), call.layout)
    got = fl.sendrecv(x, after, out=out, src=before, tag=call.rows, group=group)
    assert got is out
    assert_equal(out, expected, repr(call))


def _crossing_messages(call: Call, group: fl.ProcessGroup) -> Steps:
    """Exchange two messages with every rank and itself, and receive them in another order."""
    size, rank = group.size, group.rank
    outs = {
        (peer, tag): with_layout(np.zeros_like(call.array(peer)), call.layout)
        for peer in range(size)
        for tag in TAGS
    }
    sends = [
        fl.P2POp("send", with_layout(call.array(rank, call.rows), call.layout), peer, tag)
        for peer in range(size)
        for tag in TAGS[::-1]
    ]
    receives = [fl.P2POp("recv", out, peer, tag) for (peer, tag), out in outs.items()]
    ops = sends + receives if call.async_op else receives + sends
    work = fl.batch_isend_irecv(ops, group=group)
    yield
    work.wait()
    for (peer, _), out in outs.items():
        assert_equal(out, call.array(peer), repr(call))


def _objects(call: Call, group: fl.ProcessGroup) -> None:
    """Exchange objects whose pickles have very different sizes."""
    everyone = [{"rank": m, "values": call.unequal(m), "text": "x" * m} for m in range(group.size)]
    obj, is_root = everyone[group.rank], group.rank == call.root
    argument: Any = obj
    if call.verb == "scatter_object":
        argument = everyone if is_root else None
    root = {} if call.verb == "all_gather_object" else {"root": call.root}
    got = getattr(fl, call.verb)(argument, group=group, **root)
    if call.verb == "gather_object" and not is_root:
        assert got is None, repr(call)
        return
    expected = {"broadcast_object": everyone[call.root], "scatter_object": obj}
    pairs = (
        zip(got, everyone, strict=True) if isinstance(got, list) else [(got, expected[call.verb])]
    )
    for one, target in pairs:
        assert (one["rank"], one["text"]) == (target["rank"], target["text"]), repr(call)
        assert_equal(one["values"], target["values"], repr(call))


def _barrier(call: Call, group: fl.ProcessGroup) -> None:
    fl.barrier(group=group)


_STEPS: dict[str, Callable[[Call, fl.ProcessGroup], Steps | None]] = {
    **dict.fromkeys((*TABLE_VERBS, *UNEVEN), _of_the_table),
    **dict.fromkeys(("scatter", "scatter_uneven"), _scatter),
    "several": _several,
    "all_to_all_uneven": _all_to_all_uneven,
    "sendrecv": _sendrecv,
    "crossing messages": _crossing_messages,
    **dict.fromkeys(OBJECTS, _objects),
    "barrier": _barrier,
}
