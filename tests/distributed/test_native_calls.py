"""The native entry: calls with arrays and by address, their results and their records.

An address of memory is (address, dtype code, shape, owner).
"""

import contextlib
import functools
import gc
import itertools
import re
import signal
import time
import weakref
from typing import Any

import numpy as np
import pytest

import flashlight_py as fl
from flashlight_py._native.codes import DTYPES
from flashlight_py.distributed.api.group import ProcessGroup
from flashlight_py.distributed.calls import journal
from flashlight_py.distributed.calls.arrays import dtype_of_code, native_code
from flashlight_py.distributed.calls.journal import Record
from flashlight_py.distributed.constants import ReduceOp
from flashlight_py.distributed.start.world import current_world
from flashlight_py.distributed.verbs import VERBS
from flashlight_py.distributed.work import Work
from flashlight_py.errors import MismatchError
from tests.distributed import conformance
from tests.distributed.conformance import late_mismatch, mismatch_error, on_ranks, slow
from tests.tables import pairs

in_both = on_ranks(("shm", 2), ("gloo", 2), native=True)
CODES = {verb.name: verb.code for verb in (*VERBS, journal.SENDRECV)}


def settled_world() -> ProcessGroup:
    """Release operations of other tests: until then native code leaves calls to Python."""
    gc.collect()
    fl.barrier()
    return current_world().group


def native(group: ProcessGroup, verb: str, x: Any = None, **options: Any) -> Any:
    """Call the native entry, and wait for asynchronous results."""
    op = False if verb in ("send", "recv") else "sum"  # for a receive: whether it is partial
    defaults = {"out": None, "op": op, "scale": 1.0, "peer": 0, "tag": 0, "async_op": False}
    got = group.fast.collective(CODES[verb], x, *{**defaults, **options}.values())
    return got.wait() if isinstance(got, Work) else got


@in_both
def test_native_entry_leaves_unsupported_arrays_to_python(rank: int, size: int) -> None:
    group = settled_world()
    x, ints = np.zeros(4), np.zeros(4, int)
    locked, shared = np.zeros(4), np.zeros(8)
    locked.flags.writeable = False
    for verb, options in [
        ("all_reduce", {"x": [1.0]}),
        ("all_reduce", {"x": x[::2], "async_op": True}),
        ("all_reduce", {"x": x.astype(">f8")}),
        ("all_reduce", {"x": locked}),
        ("all_reduce", {"x": x, "op": "land"}),
        ("all_reduce", {"x": x, "op": "and"}),
        ("all_reduce", {"x": x, "scale": float("nan")}),
        ("all_reduce", {"x": ints, "op": "avg"}),
        ("all_reduce", {"x": ints, "scale": 0.5}),
        ("all_reduce", {"x": x.astype(bool)}),
        ("all_reduce", {"x": x.astype(complex), "op": "max"}),
        ("all_reduce", {"x": np.zeros(3, "M8[s]")}),
        ("broadcast", {"x": x, "peer": size}),
        ("broadcast", {"x": x, "peer": -1}),
        ("broadcast", {"x": x, "peer": True}),
        ("reduce_scatter", {"x": np.zeros(2 * size + 1)}),
        ("reduce_scatter", {"x": np.zeros(2 * size), "op": [2] * size}),
        ("all_to_all", {"x": np.zeros(())}),
        ("all_to_all", {"x": shared, "out": shared}),
        ("all_to_all", {"x": shared, "out": np.zeros(8, int)}),
        ("all_gather", {"x": shared[:4], "out": shared}),
        ("send", {"x": x, "peer": rank}),
        ("recv", {"x": locked, "peer": 1 - rank}),
        ("recv", {"x": x, "peer": 1 - rank, "op": 1}),
        ("recv", {"x": np.zeros(()), "peer": None, "op": True}),
        ("send", {"x": x, "peer": None}),
        ("send", {"x": x, "peer": 1 - rank, "tag": -1}),
    ]:
        assert native(group, verb, **options) is NotImplemented, (verb, options)
    assert group.fast.sendrecv(shared[:4], 1 - rank, shared[2:6], 1 - rank, 0, 0) is NotImplemented
    for dtype in map(conformance.dtype_of, DTYPES):
        assert native(group, "broadcast", np.zeros(3, dtype)) is not NotImplemented


@in_both
def test_native_and_python_signatures_are_equal(rank: int, size: int) -> None:
    """Native code describes a plain array, Python an array of the other byte order."""
    for shape in [(), (0,), (3, 0, 2), (2, 3, 4), (1,) * 7 + (2, 3, 4), (2,) * 12]:
        x = np.full(shape, rank, np.dtype("f8" if rank else ">f8"))
        assert np.all(fl.all_reduce(x, 0.5, op="max") == 0.5)
        assert np.all(fl.broadcast(np.full(shape, rank, x.dtype)) == 0)


def record_of(group: ProcessGroup) -> Record:
    return group.journal.records(1)[-1]


@pytest.mark.parametrize("count", [1, 100_000])
@in_both
def test_end_of_an_operation_is_recorded_without_a_wait(rank: int, size: int, count: int) -> None:
    group = settled_world()
    x = np.full(count, 1.0)
    group.fast.collective(CODES["all_reduce"], x, None, "sum", 1.0, 0, 0, True)
    until = time.monotonic() + 10
    while not record_of(group).ended:
        assert time.monotonic() < until
        time.sleep(0.001)
    group.synchronize()
    assert np.all(x == size)


@on_ranks(("shm", 2))
def test_all_to_all_rows_are_compared_and_checked(rank: int, size: int) -> None:
    """Native code reads lists of rows, Python reads arrays: both are the same call."""
    group = settled_world()
    rows, x = [[3, 3], [2, 4]][rank], np.arange(12.0).reshape(6, 2)
    expected = np.concatenate([x[:3], x[:2]] if rank == 0 else [x[3:], x[2:]])
    for row_kinds in ((rows,) * 2, (tuple(rows), np.array(rows))):
        assert np.array_equal(fl.all_to_all(x, rows=row_kinds[rank]), expected)
    assert "all_to_all" in record_of(group).values
    with pytest.raises(MismatchError, match=r"all_to_all\(float32 \(6, 2\), rows=\.\.\.\)"):
        fl.all_to_all(x.astype(np.float32) if rank == 0 else x, rows=rows)
    with pytest.raises(MismatchError, match=r"rank 1 called all_to_all\(rows=\.\.\.\)"):
        fl.barrier() if rank == 0 else fl.all_to_all(x, rows=rows)
    for refused in ([6], [7, -1], [3, 4], [True, 5], [2.0, 4], []):
        assert native(group, "all_to_all", x, op=refused) is NotImplemented


@in_both
def test_batch_of_messages_is_started_natively(rank: int, size: int) -> None:
    group, peer = settled_world(), 1 - rank
    for count in (3, 3000, 300_000):
        x, out = np.full(count, rank + 1.0), np.zeros((2, count))
        ops = [fl.P2POp("recv", out[0], peer, 5), fl.P2POp("recv", out[1], peer, 6)]
        ops += [fl.P2POp("send", x, peer, 5), fl.P2POp("send", x, peer, 6)]
        work = group.fast.sendrecv(ops)
        assert isinstance(work, Work)
        assert all(array is one.x for array, one in zip(work.wait(), ops, strict=True))
        assert work.is_completed()
        assert work.source is None
        assert np.all(out == peer + 1)
        out[:] = 0
        assert fl.batch_isend_irecv(ops).wait()[0] is ops[0].x
        assert np.all(out == peer + 1)
    for refused in (
        [fl.P2POp("recv", out[0], peer), fl.P2POp("recv", out[0][:3], peer)],
        [fl.P2POp("send", [1, 2], peer)],
        [fl.P2POp("send", x, peer, partial=True)],
        [object()],
        (),
    ):
        assert group.fast.sendrecv(refused) is NotImplemented
    ops = [fl.P2POp("send", np.zeros(30_000 + rank), peer)]
    ops += [fl.P2POp("recv", np.zeros(30_002), peer)]
    with pytest.raises(MismatchError, match="float64"):
        fl.batch_isend_irecv(ops).wait()
    sent = [record for record in group.journal.records() if record.values[2] == "send"]
    assert rank or len(sent) >= 13


@in_both
def test_all_to_all_returns_rows_to_a_rank_without_rows(rank: int, size: int) -> None:
    """The rank sends no rows and receives some."""
    settled_world()
    for width in (3, 5000):
        x = np.arange(4.0 * width).reshape(4, width)
        part, rows = (x[:0], [0, 0]) if rank == 0 else (x, [3, 1])
        for out in (None, None, np.full((3, width) if rank == 0 else (1, width), -1.0)):
            got = fl.all_to_all(part, rows=rows, out=out)
            assert np.array_equal(got, x[:3] if rank == 0 else x[3:])


class Alarm(Exception):
    """The exception of a signal handler."""


@on_ranks(("shm", 2), fresh=True)
def test_interrupted_batch_raises_the_exception_of_the_handler(rank: int, size: int) -> None:
    """A handler raises at any time while messages are started. All messages end later."""

    def handler(number: int, frame: Any) -> None:
        raise Alarm

    began, kept = 0, []
    if rank == 0:
        before = signal.signal(signal.SIGALRM, handler)
        for _ in range(60):
            arrays = [np.zeros(3) for _ in range(6)]
            ops = [fl.P2POp("recv", x, 1, tag=began + i) for i, x in enumerate(arrays)]
            with contextlib.suppress(Alarm):  # an alarm may arrive while the timer is stopped
                try:
                    signal.setitimer(signal.ITIMER_REAL, 0.0002)
                    kept.append(fl.batch_isend_irecv(ops))
                finally:
                    signal.setitimer(signal.ITIMER_REAL, 0)
            began += 6
        with contextlib.suppress(Alarm):  # the last alarm may arrive here
            signal.signal(signal.SIGALRM, before)
        signal.signal(signal.SIGALRM, before)


in_all = on_ranks(*((name, size) for name in ("shm", "gloo") for size in (2, 3)), native=True)
BFLOAT16 = DTYPES.index("bfloat16")
# Whether x and out are passed by address.
MIXED = ((1, 1), (0, 0), (1, 0), (0, 1))


class Size(tuple[int, ...]):
    """A shape like torch.Size."""

    __slots__ = ()


class Owner:
    """An owner of memory that can be weakly referenced."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory


def by_address(x: Any, owner: Any = None) -> tuple[Any, ...]:
    """Return ``x`` by address. With ``owner``, nothing else keeps its memory alive."""
    return x.ctypes.data, native_code(x.dtype), Size(x.shape), x if owner is None else owner


def ops_of(code: int) -> tuple[str, ...]:
    kind = dtype_of_code(code).kind
    by_kind = {"b": ("max", "xor"), "i": ("sum", "and"), "u": ("prod", "or"), "c": ("avg", "prod")}
    return by_kind.get(kind, ("sum", "avg", "min"))


def calls_of(code: int, size: int) -> list[tuple[str, dict[str, Any]]]:
    """Yield every verb that supports the dtype of ``code``."""
    moved = [("broadcast", {"root": 1}), ("all_gather", {}), ("gather", {"root": 1})]
    moved += [("scatter", {"root": 1}), ("all_to_all", {})]
    for op in ops_of(code):
        moved += [(verb, {"op": op}) for verb in ("all_reduce", "reduce_scatter", "scan", "exscan")]
        moved.append(("reduce", {"op": op, "root": 1}))
    return moved


@pytest.mark.parametrize(
    ("ranks", "async_op", "count"),
    [
        *pairs([("shm", 2), ("gloo", 2)], (False, True), (3, 30_000)),
        *slow(*pairs([("shm", 3), ("gloo", 3)], (True, False), (3, 30_000))),
    ],
    indirect=["ranks"],
)
@on_ranks()
def test_calls_by_address_equal_calls(rank: int, size: int, async_op: bool, count: int) -> None:
    """Public verbs return the same bits for arrays."""
    group = settled_world()
    for code in range(len(DTYPES)) if count < 100 else (4, BFLOAT16, 12):
        x = np.arange(2 * size * count).reshape(2 * size, count) % 3 + rank
        x = x.astype(dtype_of_code(code))
        for verb, options in calls_of(code, size):
            copied, case = x.copy(), (verb, options, code)
            arguments = {"op": options.get("op", "sum"), "peer": options.get("root", 0)}
            expected = getattr(fl, verb)(x.copy(), **options)
            in_place = conformance.BY_NAME[verb].in_place
            if not in_place:
                got = native(group, verb, x, async_op=async_op, **arguments)
                assert got is expected is None or np.array_equal(got, expected), case
            out = None if in_place or expected is None else np.zeros_like(expected)
            for one, other in MIXED[: 2 if in_place else 4]:
                copied[...] = x
                first = by_address(copied) if one else copied
                if "op" in options:  # as a name, or as a ReduceOp
                    arguments["op"] = options["op"] if one else ReduceOp[options["op"].upper()]
                second = None if out is None else by_address(out) if other else out
                got = native(group, verb, first, out=second, async_op=async_op, **arguments)
                assert got is (first if in_place else second), case
                where = copied if in_place else out
                if verb == "exscan" and rank == 0:  # fl.exscan writes the identity later
                    continue
                assert where is None or np.array_equal(where, expected), case
            assert record_of(group).as_dict()["dtype"] == str(x.dtype)


@pytest.mark.parametrize("async_op", [False, True])
@in_all
def test_all_gather_accepts_an_input_in_its_result(rank: int, size: int, async_op: bool) -> None:
    """FSDP of torch passes the row of a rank at its position in the result."""
    group = settled_world()
    for count in (4, 5_000, 300_000):
        out = np.full((size, count), -1.0)
        part = out[rank : rank + 1]
        part[:] = rank
        gather = functools.partial(native, group, "all_gather", async_op=async_op)
        room = by_address(out)
        assert gather(by_address(part), out=room) is room
        assert (out == np.arange(size)[:, None]).all()
        before = [*group.journal.header]
        others = out[(rank + 1) % size :][:1]
        halves = by_address(out.reshape(2 * size, -1)[2 * rank : 2 * rank + 2])
        for x in (by_address(others), part, halves):
            assert gather(x, out=room) is NotImplemented, x
        assert gather(by_address(out[0]), out=by_address(out.reshape(-1))) is NotImplemented
        assert [*group.journal.header] == before


@in_both
def test_calls_by_address_accept_memory_without_elements(rank: int, size: int) -> None:
    group = settled_world()
    x, gathered = np.full((), rank + 1.0), np.zeros(size)
    out = by_address(gathered)
    assert native(group, "all_gather", by_address(x), out=out) is out
    assert gathered.tolist() == [rank + 1.0 for rank in range(size)]
    native(group, "all_reduce", by_address(x))
    assert x == size * (size + 1) / 2
    rows = {"all_gather": size * size, "gather": size * size, "scatter": 1, "reduce_scatter": 1}
    for verb in {*CODES} - {"barrier", "send", "recv", "sendrecv"}:
        x, in_place = (0, 12, (size, 0), None), conformance.BY_NAME[verb].in_place
        out = None if in_place else (0, 12, (rows.get(verb, size), 0), None)
        for async_op in (False, True):
            got = native(group, verb, x, out=out, async_op=async_op)
            assert got is (out or x) or (verb, got) == ("gather", None)


@in_both
def test_native_entry_leaves_malformed_addresses_to_python(rank: int, size: int) -> None:
    group = settled_world()
    x = np.zeros(4 * size)
    full = by_address(x)
    address, code, shape, owner = full
    before = [*group.journal.header]
    addresses = float(address), True, None, -address, address + 2**64, 0, 12
    codes = -1, len(DTYPES), 2**70, "float64", np.float64
    shapes = [*shape], 8, (-1,), (1.0,), (True,), (2**70,), (2**60, 2), (2**40, 2**40), (1,) * 9
    wrong: list[Any] = [(), full[:3], (*full, None), [*full], Size(full)]
    wrong += [(bad, code, shape, owner) for bad in addresses]
    wrong += [(address, bad, shape, owner) for bad in codes]
    wrong += [(address, code, bad, owner) for bad in shapes]
    for arguments in wrong:
        for verb in ("all_reduce", "broadcast", "scan"):
            assert native(group, verb, arguments) is NotImplemented, arguments
        out = by_address(np.zeros(4))
        assert native(group, "reduce_scatter", arguments, out=out) is NotImplemented, arguments
        if arguments != ():
            assert native(group, "all_gather", out, out=arguments) is NotImplemented, arguments
        assert native(group, "send", arguments, peer=1 - rank) is NotImplemented, arguments
        assert native(group, "recv", arguments, peer=1 - rank) is NotImplemented, arguments
        ops = [fl.P2POp("recv", arguments, 1 - rank)]
        assert group.fast.sendrecv(ops) is NotImplemented, arguments
        pair = arguments, 1 - rank, by_address(np.zeros(4))
        assert group.fast.sendrecv(*pair, 1 - rank, 0, 0) is NotImplemented, arguments
    for verb, arguments in [  # it would have to create an array, or the arguments do not match
        ("all_gather", {}),
        ("all_to_all", {}),
        ("reduce_scatter", {}),
        ("gather", {"peer": rank}),
        ("scatter", {}),
        ("scatter", {"peer": 1}),
        ("all_to_all", {"out": by_address(np.zeros(size))}),
        ("all_to_all", {"out": by_address(np.zeros(4 * size, int))}),
        ("all_to_all", {"out": (address + 8, *full[1:])}),
        ("all_to_all", {"out": x}),
        ("all_reduce", {"op": "and"}),
        ("broadcast", {"peer": size}),
    ]:
        assert native(group, verb, full, **arguments) is NotImplemented, (verb, arguments)
    for out in (None, full):
        assert native(group, "all_to_all", full, out=out, op=[4] * size) is NotImplemented
    mixed = [fl.P2POp("recv", full, 1 - rank), fl.P2POp("send", x, 1 - rank)]
    assert group.fast.sendrecv(mixed) is NotImplemented
    assert group.fast.sendrecv(x, 1 - rank, full, 1 - rank, 0, 0) is NotImplemented
    assert [*group.journal.header] == before  # no call was recorded
    arguments = full if rank else x  # a rank without a result needs no memory for it
    assert (native(group, "gather", arguments) is None) == (rank > 0)


@pytest.mark.parametrize("async_op", [False, True])
@in_all
def test_mismatch_by_address_raises_on_every_rank(rank: int, size: int, async_op: bool) -> None:
    """The group remains usable."""
    group = settled_world()
    errors, x = [], np.zeros((3 + rank, 2))
    for verb, array in itertools.product(("all_reduce", "broadcast", "reduce"), (by_address(x), x)):
        now = mismatch_error(functools.partial(native, group, verb, array, async_op=async_op))
        errors.append(now or late_mismatch())
        recorded = record_of(group).error
        assert re.match(rf"MismatchError: \[({verb}|barrier)\]", recorded), recorded
        assert recorded.removeprefix("MismatchError: ") == errors[-1]
        if now:  # ranks that ran ahead raise in the next call
            late_mismatch()
    for part in (np.zeros((2 * size, 3 + rank)), np.zeros(2 * size, "f8" if rank else "f4")):
        for verb, rows in [("all_gather", 2 * size * size), ("all_to_all", 2 * size)]:
            out = by_address(np.zeros((rows, *part.shape[1:]), part.dtype))
            with pytest.raises(MismatchError) as caught:
                native(group, verb, by_address(part), out=out, async_op=async_op)
            errors.append(str(caught.value))
    memory = np.zeros(3, np.uint16)
    array = (memory.ctypes.data, BFLOAT16, (3,), memory) if rank else by_address(memory)
    with pytest.raises(MismatchError) as caught:
        native(group, "all_reduce", array, async_op=async_op)
    errors.append(str(caught.value))
    assert record_of(group).error
    x = np.ones(3)
    native(group, "all_reduce", by_address(x), async_op=async_op)
    assert np.all(x == size)
    assert "all_reduce(float64 (3, 2)" in errors[0]
    assert "all_reduce(float64 (4, 2)" in errors[0]
    assert "all_reduce(bfloat16 (3,)" in errors[-1]
    assert "all_reduce(uint16 (3,)" in errors[-1]


@on_ranks(("shm", 2), ("shm", 3))
def test_all_to_all_of_rows_checks_the_length_of_out(rank: int, size: int) -> None:
    group = settled_world()
    for code in (BFLOAT16, 12):
        for width in (0, 1, 5000):
            rows = [1 + (rank + r) % 2 for r in range(size)]
            x = (np.arange(sum(rows) * width) % 99 + rank).astype(dtype_of_code(code))
            x = x.reshape(sum(rows), width)
            expected = fl.all_to_all(x, rows=rows)
            assert native(group, "all_to_all", x, op=rows).tobytes() == expected.tobytes()
            for one, other in MIXED[: 2 if code == BFLOAT16 else 4]:
                out, first = np.zeros_like(expected), by_address(x) if one else x
                second = by_address(out) if other else out
                assert native(group, "all_to_all", first, out=second, op=rows) is second
                assert out.tobytes() == expected.tobytes()
                more = np.zeros((len(expected) + 1, width), x.dtype) if rank == 0 else out
                second = by_address(more) if other else more
                y = native(group, "all_to_all", first, out=second, op=rows)
                assert (y is second) == (rank > 0)
                assert rank or y.shape == expected.shape
            if rank:
                assert fl.all_to_all(first, rows=rows, out=second) is second
            else:
                with pytest.raises(ValueError, match="expected out with"):
                    fl.all_to_all(first, rows=rows, out=second)
    x, out = (by_address(np.zeros((size, 5 + rank))) for _ in range(2))
    with pytest.raises(MismatchError):
        native(group, "all_to_all", x, out=out, op=[1] * size)


@pytest.mark.parametrize("async_op", [False, True])
@in_all
def test_unequal_gathers_check_the_length_of_out(rank: int, size: int, async_op: bool) -> None:
    group = settled_world()
    rows = size * (size + 1) // 2
    for width in (0, 3, 30_000):
        x = np.full((rank + 1, width), rank)
        expected = np.concatenate([np.full((r + 1, width), r) for r in range(size)])
        wrong_rows = rf"expected out with {rows} rows, .* got {rows + 1}"
        for (one, other), verb in itertools.product(MIXED, ("all_gather", "gather")):
            first, out = by_address(x) if one else x, np.zeros((rows, width), int)
            second = by_address(out) if other else out
            got = native(group, verb, first, out=second, async_op=async_op)
            assert got is (second if verb == "all_gather" or rank == 0 else None)
            assert got is None or np.array_equal(out, expected)
            out = np.full((rows + (rank == 0), width), -1)
            second = by_address(out) if other else out
            with contextlib.nullcontext() if rank else pytest.raises(ValueError, match=wrong_rows):
                native(group, verb, first, out=second, async_op=async_op)
            assert rank or np.all(out == -1)
        assert np.array_equal(native(group, "all_gather", x, async_op=async_op), expected)
        got = native(group, "gather", x, peer=size - 1, async_op=async_op)
        assert np.array_equal(got, expected) if rank == size - 1 else got is None


@in_all
def test_messages_by_address_receive_the_sent_values(rank: int, size: int) -> None:
    group = settled_world()
    after, before = (rank + 1) % size, (rank - 1) % size
    for count in (3, 50_000):
        for code in (BFLOAT16, 3):
            x = (np.arange(count) % 7 + rank).astype(dtype_of_code(code))
            expected = (np.arange(count) % 7 + before).astype(x.dtype)
            for one, other in MIXED[: 2 if code == BFLOAT16 else 4]:
                out = np.zeros_like(x)
                source, room = by_address(x) if one else x, by_address(out) if other else out
                assert group.fast.sendrecv(source, after, room, before, 4, 4) is room
                assert out.tobytes() == expected.tobytes()
                out[:] = 0
                start = group.fast.collective
                receive = start(CODES["recv"], room, None, None, None, before, 5, True)
                send = start(CODES["send"], source, None, None, None, after, 5, True)
                assert receive.wait() is room
                assert receive.source == before
                send.wait()
                assert out.tobytes() == expected.tobytes()
                out[:] = 0
                ops = [fl.P2POp("recv", room, before, 6), fl.P2POp("send", source, after, 6)]
                assert group.fast.sendrecv(ops).wait()[0] is room
                assert out.tobytes() == expected.tobytes()
            if rank == 0:
                assert native(group, "send", by_address(x), peer=1) is None
            elif rank == 1:
                assert native(group, "recv", room) is room
                assert out.tobytes() == expected.tobytes()
    if rank < 2:
        # More bytes than a send copies before its receiver has called.
        x = by_address(np.zeros(60_000, dtype_of_code(BFLOAT16) if rank else np.float16))
        with pytest.raises(MismatchError, match="bfloat16"):
            native(group, "recv" if rank else "send", x, peer=1 - rank)


@pytest.mark.parametrize("count", [3, 300_000])
@in_both
def test_owner_lives_until_a_dropped_operation_ends(rank: int, size: int, count: int) -> None:
    """The caller drops the Work at once."""
    group = settled_world()
    # A send of few bytes has ended when it returns.
    for verb in ("all_reduce", "all_gather", *(("send",) if count > 10_000 else ())):
        if rank == 0:
            owners = [Owner(np.ones(count)), Owner(np.zeros(2 * count))]
            x, out = (by_address(owner.memory, owner) for owner in owners)
            watched = [weakref.ref(owner) for owner in owners]
            output = None if verb != "all_gather" else out
            op, peer = ((None, None), 1) if verb == "send" else (("sum", 1.0), 0)
            group.fast.collective(CODES[verb], x, output, *op, peer, 7, True)
            del x, out, owners, output
            gc.collect()
            used = watched if verb == "all_gather" else watched[:1]
            assert all(ref() is not None for ref in used)
            fl.send(np.zeros(1), 1, tag=9)  # now the other rank can join
            fl.recv(np.zeros(1), 1, tag=9)
            group.synchronize()
            gc.collect()
            assert all(ref() is None for ref in watched)
        else:
            fl.recv(np.zeros(1), 0, tag=9)
            array, out = np.ones(count), np.zeros(2 * count)
            output = None if verb != "all_gather" else by_address(out)
            native(group, "recv" if verb == "send" else verb, by_address(array), out=output, tag=7)
            assert np.all((out if verb == "all_gather" else array) == 1 + (verb == "all_reduce"))
            fl.send(np.zeros(1), 0, tag=9)


def test_world_of_one_accepts_addresses() -> None:
    x = by_address(np.ones(3, np.float32))
    fl.barrier()  # the first call is not on the fast path
    assert native(current_world().group, "all_reduce", x) is x
